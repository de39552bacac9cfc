"""Help in sections: a group's commands and a command's options, grouped by what they are for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from launcher.cli.defaults import NO_DEFAULT, find_variable, long_name
from launcher.cli.usage_errors import is_flag, naming_command, refuse_command, refuse_extra
from launcher.cli.values import Words, parse_duration

OTHER = "Options"
"""The section of options that name no section; it has `--help` and comes last."""
SHORT_HELP_LIMIT = 100
"""Characters of a command's line in a list and in completions; a longer one would be cut."""


class Group(click.Group):
    """A group whose errors are ours."""

    def get_short_help_str(self, limit: int = SHORT_HELP_LIMIT) -> str:
        return super().get_short_help_str(limit)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        with naming_command(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise refuse_command(args[0], self.commands, ctx.command_path)
        return super().resolve_command(ctx, args)


class SectionedGroup(Group):
    """A group that lists its commands by section."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections: dict[str, list[str]] = {}

    def add_section(self, title: str, commands: Iterable[click.Command]) -> None:
        """Adds the commands in this order."""
        for command in commands:
            assert command.name is not None
            self.add_command(command)
            self._sections.setdefault(title, []).append(command.name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in self._sections.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_sections(
            {
                title: [(name, self.commands[name].get_short_help_str(SHORT_HELP_LIMIT)) for name in names]
                for title, names in self._sections.items()
            },
            formatter,
        )


class SectionedOption(click.Option):
    """An option in a section of its command's help, with its default in words instead of click's range.

    Its variable has its name on the command line, not that of click's parameter.
    """

    def __init__(self, *args: Any, section: str = OTHER, default_text: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section
        self.default_text = default_text
        if self.multiple and self.type is click.STRING:
            self.type = Words()

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        name = long_name(self)
        return os.environ.get(find_variable(ctx.command_path, name)) or None if name not in NO_DEFAULT else None

    def value_from_envvar(self, ctx: click.Context) -> Any:
        try:
            return super().value_from_envvar(ctx)
        except ValueError:  # the text cannot be split into words
            from launcher.errors import UsageError

            variable = find_variable(ctx.command_path, long_name(self))
            raise UsageError(f"{variable}: expected words as in a shell, but a quote is not closed") from None

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None:
            return None
        text = self.help or ""
        return record[0], f"{text}  [default: {self.default_text}]" if self.default_text else text


def option(*names: str, **settings: Any) -> Callable[..., Any]:
    """`click.option` with a `section` of the help, and a `default_text` for a default that can vary."""
    return click.option(*names, **{"cls": SectionedOption, **settings})


def read_option(word: str, known: Mapping[str, click.Parameter]) -> tuple[list[click.Parameter], bool]:
    """The options that a word names, and whether the value of the last one is the next word; empty if one is unknown.

    Args:
        word: `--name`, `--name=value`, `-n`, `-nvalue`, or `-vd`, which is `-v -d`.
        known: the command's options, by their names.
    """
    if word.startswith("--"):
        name, equals, _ = word.partition("=")
        return ([known[name]], not equals and not is_flag(known[name])) if name in known else ([], False)
    found: list[click.Parameter] = []
    for position, letter in enumerate(word[1:], 2):
        option = known.get(f"-{letter}")
        if option is None:
            return [], False
        found.append(option)
        if not is_flag(option):
            return found, position == len(word)
    return found, False


def fill_bare(args: Sequence[str], params: Iterable[click.Parameter], *, interspersed: bool) -> list[str]:
    """Adds the implied value to each option that may stand without a value, unless the next word is its value.

    Args:
        args: the words of the command line.
        params: the command's parameters.
        interspersed: whether options may follow other words.
    """
    known = {name: each for each in params for name in each.opts if isinstance(each, click.Option)}
    filled: list[str] = []
    position = 0
    while position < len(args) and args[position] != "--":
        word = args[position]
        options, takes_next = read_option(word, known) if word.startswith("-") else ([], False)
        if not options and not interspersed:
            break
        bare = getattr(options[-1], "bare", "") if takes_next else ""
        if bare and not _may_be_duration(args[position + 1] if position + 1 < len(args) else ""):
            word, takes_next = f"{word}={bare}", False
        filled += [word, *args[position + 1 : position + 1 + takes_next]]
        position += 1 + takes_next
    return [*filled, *args[position:]]


def _may_be_duration(word: str) -> bool:
    """Whether the word is a duration, possibly without its unit."""
    try:
        return parse_duration(f"{word}s" if word.isdecimal() else word) >= 0
    except ValueError:
        return False


class SectionedCommand(click.Command):
    """A command that lists its options by section."""

    allow_extra_args = True  # they are refused here

    def get_short_help_str(self, limit: int = SHORT_HELP_LIMIT) -> str:
        return super().get_short_help_str(limit)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = fill_bare(args, self.get_params(ctx), interspersed=ctx.allow_interspersed_args)
        with naming_command(ctx):
            extra = super().parse_args(ctx, args)
        if extra and not ctx.resilient_parsing:
            raise refuse_extra(extra, ctx)
        return extra

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                title = parameter.section if isinstance(parameter, SectionedOption) else OTHER
                sections.setdefault(title, []).append(record)
        sections[OTHER] = sections.pop(OTHER)
        write_sections(sections, formatter)


def write_sections(sections: Mapping[str, Sequence[tuple[str, str]]], formatter: click.HelpFormatter) -> None:
    """Writes each section's names and texts; the texts of all sections line up."""
    widest = max(len(name) for records in sections.values() for name, _ in records)
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl([(name.ljust(widest), text) for name, text in records])

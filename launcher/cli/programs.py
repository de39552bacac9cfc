"""Commands whose arguments end in a program and its own arguments."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.sections import SectionedCommand

if TYPE_CHECKING:
    from launcher.spec.models import ClusterSpec

_MARK = "\0command"
_ALIKE = 0.85
"""How alike an unknown option and one of ours are, if it is a typing error; difflib's ratio."""


class ProgramCommand(SectionedCommand):
    """A command whose arguments end in a program; it remembers a `--` before the program, which click drops."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.allow_interspersed_args = False
        if "--" in args:
            position = args.index("--") + 1
            args = [*args[:position], _MARK, *args[position:]]
        rest = super().parse_args(context, args)
        program: tuple[str, ...] = context.params["program"]
        context.meta["distlaunch.is_command"] = program[:1] == (_MARK,)
        # Behind a script, `--` is one of the script's arguments.
        context.params["program"] = tuple(word for word in program if word != _MARK)
        return rest


class SpecOrProgramCommand(ProgramCommand):
    """A command of a spec and more arguments for its program or, after `-H` or `--hostfile`, of a program.

    After a spec, options of the command may follow, up to the first other word.
    """

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        first = self._skip_options(args, 0)
        named = {word[:2] if word[:2] == "-H" else word.partition("=")[0] for word in args[:first]}
        context.meta["distlaunch.names_hosts"] = bool(named & {"-H", "--hosts", "--hostfile"})
        if first < len(args) and args[first] == "--" and not context.meta["distlaunch.names_hosts"]:
            args = [*args[:first], *args[first + 1 :]]  # before a spec, `--` ends the options, as everywhere
        elif not context.meta["distlaunch.names_hosts"]:
            more = self._skip_options(args, first + 1)
            rest = args[more:]
            self._check_option(rest[:1], context)
            args = [*args[:first], *args[first + 1 : more], *args[first : first + 1], *rest[rest[:1] == ["--"] :]]
        rest = super().parse_args(context, args)
        if not context.meta["distlaunch.names_hosts"] and (context.params["hosts"] or context.params["hostfile"]):
            raise click.UsageError("-H and --hostfile go before the program, and take the place of a spec.", context)
        return rest

    def _skip_options(self, args: Sequence[str], start: int) -> int:
        """The position of the first word from there on that is neither an option of this command nor its value."""
        known = {name: each for each in self.params if isinstance(each, click.Option) for name in each.opts}
        known |= {"-h": click.Option(["-h"], is_flag=True), "--help": click.Option(["--help"], is_flag=True)}
        position = start
        while position < len(args) and args[position].startswith("-"):
            word, takes_next = args[position], False
            if word.startswith("--"):
                option = known.get(word.partition("=")[0])
                takes_next = option is not None and not option.is_flag and "=" not in word
            else:
                option = known.get(word[:2])
                while option is not None and option.is_flag and len(word) > 2:
                    word = f"-{word[2:]}"
                    option = known.get(word[:2])
                takes_next = option is not None and not option.is_flag and len(word) == 2
            if option is None:
                break
            position += 2 if takes_next else 1
        return min(position, len(args))

    def _check_option(self, words: Sequence[str], context: click.Context) -> None:
        """Refuses an option that was probably meant for this command.

        Raises:
            NoSuchOption: it is much like one of them.
        """
        known = [name for each in self.params for name in each.opts if name.startswith("--")]
        for word in words:
            name = word.partition("=")[0]
            if len(name) > 2 and difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE):
                close = difflib.get_close_matches(name, known, n=1)[0]
                raise click.UsageError(
                    f"No such option: {name} Did you mean {close}? Write `--` before an argument of the program.",
                    context,
                )


def make_host_spec(
    context: click.Context, hosts: Sequence[str], hostfile: Path | None, program: Sequence[str], *, module: bool
) -> ClusterSpec:
    """The spec that `-H` or `--hostfile` and the program stand for."""
    from launcher.errors import UsageError
    from launcher.spec import command_line

    if not module and program and Path(program[0]).suffix in (".yaml", ".yml"):
        raise UsageError(f"{program[0]} is a spec, which names its own machines", hint="remove -H and --hostfile")
    option, found = command_line.read_hosts(hosts, hostfile)
    is_command = context.meta["distlaunch.is_command"]
    return command_line.make_host_spec(
        option, found, command_line.make_program(program, is_module=module, is_command=is_command)
    )


def check_spec_argument(words: Sequence[str], *, module: bool) -> Path:
    """The path of the spec, the first of these words."""
    from launcher.errors import UsageError

    if module or (words and Path(words[0]).suffix == ".py"):
        program = f"-m {words[0]}" if module and words else "-m" if module else words[0]
        raise UsageError(
            f"{program} is a program, and no machine is named",
            hint="name a spec or, with -H, machines; `distlaunch local` runs a program on this machine",
        )
    if not words:
        raise UsageError("no spec is named", hint="name one or, with -H, machines and a program")
    return Path(words[0])

"""Commands whose arguments end in a program and its own arguments."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.completion import complete_specs
from launcher.cli.sections import SectionedCommand

if TYPE_CHECKING:
    from launcher.spec.models import ClusterSpec

_MARK = "\0command"
_ALIKE = 0.85
"""An unknown option that is at least this similar to one of ours (difflib's ratio) is a typing error."""


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
        # After a script, `--` is one of the script's arguments.
        context.params["program"] = tuple(word for word in program if word != _MARK)
        return rest


class SpecOrProgramCommand(ProgramCommand):
    """A command that takes a spec and arguments for its program or, after `-H` or `--hostfile`, a program.

    Options of the command may also follow the spec, up to the first other word.
    """

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        first, given = self._skip_options(args, 0)
        names_hosts = bool(given & {"hosts", "hostfile", "slurm"})
        if not names_hosts:
            if args[first : first + 1] == ["--"]:
                args = [*args[:first], *args[first + 1 :]]
            more, _ = self._skip_options(args, first + 1)
            rest = args[more:]
            if not context.resilient_parsing:  # completion sets it: the words are incomplete
                self._check_option(rest[:1], context)
            args = [*args[:first], *args[first + 1 : more], *args[first : first + 1], *rest[rest[:1] == ["--"] :]]
        left = super().parse_args(context, args)
        if (
            not context.resilient_parsing
            and not names_hosts
            and (context.params["hosts"] or context.params["hostfile"] or context.params["slurm"])
        ):
            message = "-H, --hostfile and --slurm go before the program, and replace a spec."
            raise click.UsageError(message, context)
        context.meta["distlaunch.names_hosts"] = names_hosts
        return left

    def _skip_options(self, args: Sequence[str], start: int) -> tuple[int, set[str | None]]:
        """The index, from `start` on, of the first word that is neither an option of this command nor an option's
        value, and the parameters that the options before it set."""
        context = click.Context(self, help_option_names=["-h", "--help"])
        known = {name: each for each in self.get_params(context) for name in each.opts}
        position = start
        given: set[str | None] = set()
        while position < len(args) and args[position].startswith("-"):
            word = args[position]
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            while not word.startswith("--") and is_flag(known.get(name)) and len(word) > 2:  # `-vd` is `-v -d`
                word = f"-{word[2:]}"
                name = word[:2]
            if name not in known:
                break
            given.add(known[name].name)
            position += 1 if is_flag(known[name]) or word != name else 2
        return min(position, len(args)), given

    def _check_option(self, words: Sequence[str], context: click.Context) -> None:
        """Refuses an option that was probably meant for this command.

        Raises:
            UsageError: its name is similar to that of one of our options.
        """
        known = [name for each in self.params for name in each.opts if name.startswith("--")]
        for word in words:
            name = word.partition("=")[0]
            if len(name) > 2 and difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE):
                close = difflib.get_close_matches(name, known, n=1)[0]
                raise click.UsageError(
                    f"No such option: {name}. Did you mean {close}? Write `--` before an argument of the program.",
                    context,
                )


def complete_first_spec(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """A spec, if it can be the first word; else any file."""
    from click.shell_completion import CompletionItem

    params = context.params
    if params.get("program") or params.get("hosts") or params.get("hostfile") or params.get("slurm"):
        return [CompletionItem(incomplete, type="file")]
    return complete_specs(context, parameter, incomplete)


def is_flag(parameter: click.Parameter | None) -> bool:
    """Whether the parameter is an option without a value."""
    return isinstance(parameter, click.Option) and parameter.is_flag


def make_host_spec(
    context: click.Context,
    hosts: Sequence[str],
    hostfile: Path | None,
    program: Sequence[str],
    *,
    module: bool,
    slurm: bool,
) -> ClusterSpec:
    """The spec for the program on the machines of `-H`, `--hostfile` or `--slurm`."""
    from launcher.errors import UsageError
    from launcher.spec import command_line

    if not module and program and Path(program[0]).suffix in (".yaml", ".yml"):
        hint = "remove --slurm, and write `nodes: slurm` in the spec" if slurm else "remove -H and --hostfile"
        raise UsageError(f"{program[0]} is a spec, which names its own machines", hint=hint)
    if slurm and (hosts or hostfile is not None):
        raise UsageError("--slurm cannot be combined with -H or --hostfile", hint="use one of them")
    is_command = context.meta["distlaunch.is_command"]
    what = command_line.make_program(program, is_module=module, is_command=is_command)
    if slurm:
        return command_line.make_slurm_spec(what)
    option, found = command_line.read_hosts(hosts, hostfile)
    return command_line.make_host_spec(option, found, what)


def check_spec_argument(words: Sequence[str], *, module: bool) -> Path:
    """The path of the spec, the first of these words."""
    from launcher.errors import UsageError

    if module or (words and Path(words[0]).suffix == ".py"):
        program = f"-m {words[0]}" if module and words else "-m" if module else words[0]
        raise UsageError(
            f"{program} is a program, but no machine is named",
            hint="name a spec or, with -H, machines; `distlaunch local` runs a program on this machine",
        )
    if not words:
        raise UsageError("no spec is named", hint="name a spec or, with -H, machines and a program")
    return Path(words[0])

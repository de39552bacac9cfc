"""Commands whose arguments end in a program and its own arguments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.completion import complete_specs
from launcher.cli.sections import SectionedCommand
from launcher.cli.usage_errors import is_flag

if TYPE_CHECKING:
    from launcher.spec.models import ClusterSpec

_MARK = "\0command"


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


class SpecCommand(SectionedCommand):
    """A command that takes a spec and arguments for its program; a word with a dash before `--` is an option."""

    appends_arguments = True


class SpecOrProgramCommand(ProgramCommand):
    """A command that takes a spec and arguments for its program or, after `-H`, `--hostfile` or `--slurm`, a program.

    Options of the command may also follow the spec, but not the program.
    """

    appends_arguments = True

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        names_hosts = bool(self._leading(args) & {"hosts", "hostfile", "slurm"})
        context.meta["distlaunch.names_hosts"] = names_hosts
        if names_hosts:
            return super().parse_args(context, args)
        left = SectionedCommand.parse_args(self, context, args)
        context.meta["distlaunch.is_command"] = False
        if context.params["hosts"] or context.params["hostfile"] or context.params["slurm"]:
            from launcher.errors import UsageError

            raise UsageError("-H, --hostfile and --slurm go before the program", hint="with a spec, remove them")
        return left

    def _leading(self, args: Sequence[str]) -> set[str | None]:
        """The parameters that the options before the first other word set."""
        known = {name: each for each in self.params for name in each.opts}
        position = 0
        given: set[str | None] = set()
        while position < len(args) and args[position].startswith("-"):
            word = args[position]
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            while not word.startswith("--") and is_flag(known.get(name)) and len(word) > 2:  # `-vd` is `-v -d`
                given.add(known[name].name)
                word = f"-{word[2:]}"
                name = word[:2]
            if name not in known:
                break
            given.add(known[name].name)
            position += 1 if is_flag(known[name]) or word != name else 2
        return given


def find_misplaced(context: click.Context, words: Sequence[str]) -> list[str]:
    """The options of this command among the words of a script or module, in its order; none after `--`."""
    if context.meta["distlaunch.is_command"]:
        return []
    known = {name for each in context.command.get_params(context) for name in each.opts if name.startswith("-")}
    if context.meta.get("distlaunch.names_hosts") is False:  # a spec: such words are options
        return []
    words = words[: words.index("--")] if "--" in words else words
    return list(dict.fromkeys(name for name in (word.partition("=")[0] for word in words[1:]) if name in known))


def find_beside(context: click.Context, spec: ClusterSpec) -> str:
    """What to do about a script that is missing in the current folder and there beside the spec; empty otherwise."""
    path, script = context.meta.get("distlaunch.spec"), spec.program.script
    if path is None or script is None or spec.working_directory is not None or spec.sync is not None:
        return ""
    folder = path.absolute().parent
    if Path(script).exists() or not (folder / script).exists():
        return ""
    return f"{script} is beside the spec: change to {folder}, or set `working_directory: {folder}`"


def complete_first_spec(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """A spec, if it can be the first word; else any file."""
    from click.shell_completion import CompletionItem

    params = context.params
    if params.get("program") or params.get("hosts") or params.get("hostfile") or params.get("slurm"):
        return [CompletionItem(incomplete, type="file")]
    return complete_specs(context, parameter, incomplete)


def make_host_spec(
    context: click.Context,
    hosts: Sequence[str],
    hostfile: Path | None,
    program: Sequence[str],
    *,
    module: bool,
    slurm: bool,
    python: str | None,
) -> ClusterSpec:
    """The spec for the program on the machines of `-H`, `--hostfile` or `--slurm`."""
    from launcher.errors import UsageError
    from launcher.spec import command_line
    from launcher.spec.overrides import Override, override

    if not module and program and Path(program[0]).suffix in (".yaml", ".yml"):
        hint = "remove --slurm, and write `nodes: slurm` in the spec" if slurm else "remove -H and --hostfile"
        raise UsageError(f"{program[0]} is a spec, which names its own machines", hint=hint)
    if slurm and (hosts or hostfile is not None):
        raise UsageError("--slurm cannot be combined with -H or --hostfile", hint="use one of them")
    is_command = context.meta["distlaunch.is_command"]
    what = command_line.make_program(program, is_module=module, is_command=is_command)
    if slurm:
        spec = command_line.make_slurm_spec(what)
    else:
        spec = command_line.make_host_spec(*command_line.read_hosts(hosts, hostfile), what)
    return override(spec, Override("--python", ("python",), python))


def load_command_spec(
    context: click.Context,
    hosts: Sequence[str],
    hostfile: Path | None,
    program: Sequence[str],
    *,
    module: bool,
    slurm: bool,
    python: str | None,
    variables: Sequence[str] = (),
) -> ClusterSpec:
    """The spec of a command line that names one, or hosts and a program.

    Args:
        context: of a SpecOrProgramCommand.
        hosts: of `-H`.
        hostfile: of `--hostfile`.
        program: the other words.
        module: whether the program is a module.
        slurm: whether `--slurm` is given.
        python: of `--python`.
        variables: the variables that `-e` names; they need not be set in this environment.
    """
    from launcher.spec import command_line
    from launcher.spec.loading import load_spec
    from launcher.spec.overrides import Override, override
    from launcher.spec.variables import name_of

    if context.meta["distlaunch.names_hosts"]:
        return make_host_spec(context, hosts, hostfile, program, module=module, slurm=slurm, python=python)
    path = check_spec_argument(program, module=module)
    context.meta["distlaunch.spec"] = path
    spec = load_spec(path, {**dict.fromkeys(map(name_of, variables), ""), **os.environ})
    spec = override(spec, Override("--python", ("python",), python))
    return command_line.append_arguments(spec, program[1:])


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

"""Commands whose arguments end in a program and its own arguments."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from launcher.cli.changes import find_value, read_changes
from launcher.cli.completion import complete_specs
from launcher.cli.options import host_options
from launcher.cli.sections import SectionedCommand, fill_bare, read_option

if TYPE_CHECKING:
    from launcher.spec.models import ClusterSpec
    from worker_entry.protocol.strategy_names import StrategyName

_MARK = "\0command"
_HOSTS: dict[str, Any] = {"hosts": (), "hostfile": None, "slurm": False}
"""The parameters that name machines, with their values if none is named."""


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
        args = fill_bare(args, self.params, interspersed=False)
        leading, first = self._leading(args)
        # A spec on the command line comes before the machines of a variable or of the file of defaults.
        ours = not is_spec(first) and any(
            isinstance(each, click.Option) and each.name in _HOSTS and each.consume_value(context, {})[0]
            for each in self.params
        )
        names_hosts = bool(leading & {*_HOSTS}) or ours
        context.meta["distlaunch.names_hosts"] = names_hosts
        if names_hosts:
            return super().parse_args(context, args)
        left = SectionedCommand.parse_args(self, context, args)
        context.meta["distlaunch.is_command"] = False
        if any(context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in _HOSTS):
            from launcher.errors import UsageError

            raise UsageError("-H, --hostfile and --slurm go before the program", hint="with a spec, remove them")
        context.params.update(_HOSTS)
        return left

    def _leading(self, args: Sequence[str]) -> tuple[set[str | None], str]:
        """The parameters that the leading options set, and the first word after those options."""
        known = {name: each for each in self.params for name in each.opts}
        position = 0
        given: set[str | None] = set()
        while position < len(args) and args[position].startswith("-"):
            options, takes_next = read_option(args[position], known)
            if not options:
                break
            given |= {each.name for each in options}
            position += 1 + takes_next
        return given, args[position] if position < len(args) else ""


def complete_first_spec(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """A spec, if it can be the first word; else any file."""
    from click.shell_completion import CompletionItem

    params = context.params
    if params.get("program") or params.get("hosts") or params.get("hostfile") or params.get("slurm"):
        return [CompletionItem(incomplete, type="file")]
    return complete_specs(context, parameter, incomplete)


@dataclass(frozen=True, eq=False)
class SpecOrHosts:
    """The values of `host_options` and the words after them: a spec and arguments, or hosts and a program."""

    context: click.Context
    hosts: Sequence[str]
    hostfile: Path | None
    slurm: bool
    module: bool
    program: Sequence[str]

    @property
    def names_hosts(self) -> bool:
        """Whether the command line names hosts instead of a spec."""
        return bool(self.hosts or self.slurm) or self.hostfile is not None

    def load(self) -> ClusterSpec:
        """The spec, with the changes of the options."""
        if self.names_hosts:
            return self.make_host_spec(self.hosts)
        return load_changed(self.context, check_spec_argument(self.program, module=self.module), self.program[1:])

    def make_host_spec(self, hosts: Sequence[str]) -> ClusterSpec:
        """The spec for the program on these hosts, or on those of `--hostfile` or `--slurm`, changed by the options."""
        from launcher.errors import UsageError
        from launcher.spec import command_line

        if not self.module and self.program and is_spec(self.program[0]):
            hint = "remove --slurm, and write `nodes: slurm` in the spec" if self.slurm else "remove -H and --hostfile"
            raise UsageError(f"{self.program[0]} is a spec, which names its own machines", hint=hint)
        if self.slurm and (hosts or self.hostfile is not None):
            raise UsageError("--slurm cannot be combined with -H or --hostfile", hint="use one of them")
        is_command = self.context.meta["distlaunch.is_command"]
        what = command_line.make_program(self.program, is_module=self.module, is_command=is_command)
        if self.slurm:
            spec = command_line.make_slurm_spec(what)
        else:
            spec = command_line.make_host_spec(*command_line.read_hosts(hosts, self.hostfile), what)
        return read_changes(self.context).apply(spec, os.environ)

    def find_beside(self, spec: ClusterSpec) -> str:
        """A hint if the script is missing in the current folder but exists in the spec's folder; else empty."""
        script = spec.program.script
        if self.names_hosts or script is None or spec.working_directory is not None or spec.sync is not None:
            return ""
        folder = Path(self.program[0]).absolute().parent
        if Path(script).exists() or not (folder / script).exists():
            return ""
        return f"{script} is beside the spec: change to {folder}, or set `working_directory: {folder}`"


def takes_spec_or_hosts(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `host_options`; the command gets their values and its words as one SpecOrHosts."""

    @click.pass_context
    @functools.wraps(command)
    def run(
        context: click.Context,
        /,
        hosts: tuple[str, ...],
        hostfile: Path | None,
        slurm: bool,
        module: bool,
        program: tuple[str, ...],
        **options: Any,
    ) -> Any:
        return command(SpecOrHosts(context, hosts, hostfile, slurm, module, program), **options)

    return host_options(run)


def load_changed(context: click.Context, path: Path, arguments: Sequence[str], *, check: bool = True) -> ClusterSpec:
    """The spec of a file, with more arguments for its program and the changes of the options.

    `check`: whether all variables that it takes from the environment must be there.
    """
    from launcher.spec.command_line import append_arguments
    from launcher.spec.loading import load_spec

    changes = read_changes(context)
    environ = {**dict.fromkeys(changes.names, ""), **os.environ} if check else None
    return changes.apply(append_arguments(load_spec(path, environ), arguments), os.environ, check=check)


def make_local_spec(
    context: click.Context,
    program: Sequence[str],
    *,
    module: bool,
    workers: int | None,
    ps: int | None = None,
    evaluator: bool = False,
    oversubscribe: bool = False,
) -> ClusterSpec:
    """The spec for a program on this machine, changed by the options; without a program, for the demo."""
    from launcher.spec import command_line
    from launcher.spec.field_options import FRAMEWORK, STRATEGY
    from worker_entry.system import hardware

    strategy: StrategyName = find_value(context, STRATEGY, "multi_worker_mirrored")
    tasks = command_line.make_tasks(strategy, workers, ps, evaluator=evaluator)
    if not oversubscribe:
        command_line.check_workers(tasks["worker"], hardware.cores())
    spec = command_line.make_spec(
        tasks=tasks,
        strategy=strategy,
        framework=find_value(context, FRAMEWORK, "tensorflow"),
        program=command_line.make_program(program, is_module=module, is_command=context.meta["distlaunch.is_command"]),
    )
    return read_changes(context).apply(spec, os.environ)


def find_misplaced(context: click.Context, words: Sequence[str]) -> list[str]:
    """The options of this command among the words of a script or module, in its order; none after `--`."""
    if context.meta["distlaunch.is_command"]:
        return []
    known = {name for each in context.command.get_params(context) for name in each.opts if name.startswith("-")}
    words = words[: words.index("--")] if "--" in words else words
    return list(dict.fromkeys(name for name in (word.partition("=")[0] for word in words[1:]) if name in known))


def is_spec(word: str) -> bool:
    """Whether a word of the command line is the name of a spec, and not of a program."""
    return Path(word).suffix in (".yaml", ".yml")


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

"""Turns a command line into the spec of a cluster on this machine, on named hosts, or in a Slurm job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError, ValidationError

from launcher.errors import UsageError
from launcher.spec.explain import explain_option, refuse_options
from launcher.spec.fields import PortRange, check_collected
from launcher.spec.hosts import Host, HostError, parse_hosts, parse_lines
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import SLURM, NodeSpec
from launcher.spec.parts import ProgramSpec
from launcher.spec.strategies import FRAMEWORKS, RULES, Framework, find_role_problem
from launcher.tasks import LOCAL, WORKERS, TaskType, name_local
from launcher.wording import count_of, name_errors, shorten
from worker_entry.protocol.strategy_names import StrategyName

WORKERS_PER_CORE = 4
"""With more workers per core, a cluster cannot form in time; each worker also needs some 300 MB."""
WORKERS_ALWAYS = 8
"""The number of workers that every machine may run, however few cores it has."""
HOSTFILE_LIMIT = 1 << 20
"""The maximum size of a host file, in bytes."""

PORTS = PortRange(first=20000, last=29999)


def check_workers(workers: int, cores: int) -> None:
    """Refuses more workers than a machine with this many cores can run.

    Raises:
        UsageError: there are too many workers.
    """
    limit = max(WORKERS_ALWAYS, WORKERS_PER_CORE * cores)
    if workers > limit:
        raise UsageError(
            f"{workers:,} workers are too many for {count_of(cores, 'core')}; the limit is {limit}",
            hint="lower --workers, or use --oversubscribe to start them anyway",
        )


def make_program(words: Sequence[str], *, is_module: bool, is_command: bool) -> ProgramSpec | None:
    """The program to run: a command after `--`, a Python module after `-m`, else a script; None for the demo.

    Raises:
        UsageError: `-m` or `--` without a name, or an argument that is not UTF-8.
    """
    for word in words:
        check_text(word)
    if not words:
        if is_module or is_command:
            raise UsageError(f"{'-m' if is_module else '--'} needs the name of a program after it")
        return None
    if not words[0]:
        raise UsageError("the name of the program is empty")
    if is_command and not is_module:
        return ProgramSpec(command=list(words))
    if is_module:
        return ProgramSpec(module=words[0], args=list(words[1:]))
    return ProgramSpec(script=words[0], args=list(words[1:]))


def check_text(word: str) -> None:
    """Checks that an argument is UTF-8.

    Raises:
        UsageError: the argument is not UTF-8.
    """
    try:
        word.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"the argument {word!r} is not UTF-8", hint="rename the file, or pass it in another way"
        ) from None


def make_tasks(strategy: StrategyName, workers: int | None, ps: int | None, *, evaluator: bool) -> dict[TaskType, int]:
    """The number of tasks of each type.

    Raises:
        UsageError: the strategy does not allow these tasks.
    """
    alone = RULES[strategy].alone
    if alone and workers not in (None, 1):
        raise UsageError(
            f"{strategy} runs one process with all devices, not {workers} workers",
            hint="remove --workers; --devices emulates several devices",
        )
    if ps is not None and strategy != "parameter_server":
        raise UsageError(f"{strategy} has no parameter servers", hint="remove --ps, or use parameter_server")
    tasks: dict[TaskType, int] = {"worker": workers or (1 if alone else WORKERS)}
    if strategy == "parameter_server":
        tasks |= {"chief": 1, "ps": ps or 1}
    if evaluator:
        tasks["evaluator"] = 1
    problem = find_role_problem(strategy, tasks)
    if problem is not None:
        raise UsageError(problem[1])
    return tasks


def make_spec(
    *, tasks: dict[TaskType, int], strategy: StrategyName, framework: Framework, program: ProgramSpec | None
) -> ClusterSpec:
    """The spec that the command line describes.

    Raises:
        UsageError: the spec would not be valid; the error names every option at fault.
    """
    if framework in FRAMEWORKS and (strategy != "multi_worker_mirrored" or set(tasks) > {"worker"}):
        raise UsageError(f"--framework {framework} has no strategies", hint="use only --workers")
    if framework == "torch" and program is None:
        raise UsageError("--framework torch has no demo", hint="name a program")
    given: dict[str, Any] = {} if program is None else {"program": program}
    given |= {"framework": framework} if framework in FRAMEWORKS else {"strategy": strategy}
    try:
        return ClusterSpec(
            name=name_local(sum(tasks.values())), nodes=[NodeSpec(host=LOCAL, tasks=tasks)], ports=PORTS, **given
        )
    except ValidationError as error:
        raise refuse_options(explain_option("--workers", error)) from None


def read_hosts(hosts: Sequence[str], hostfile: Path | None) -> tuple[str, list[Host]]:
    """Returns the hosts of `-H` or `--hostfile`, and the option that errors about them name.

    Raises:
        UsageError: both are given, or the file or a host cannot be read.
    """
    if hostfile is None:
        for text in hosts:
            check_text(text)
        try:
            return "-H", parse_hosts(hosts)
        except HostError as error:
            raise UsageError(f"-H: {error}") from None
    if hosts:
        raise UsageError("-H and --hostfile cannot be combined", hint="use one of them")
    try:
        with hostfile.open("rb") as file:
            text = file.read(HOSTFILE_LIMIT + 1).decode()
    except OSError as error:
        raise UsageError(f"cannot read the host file {hostfile}: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise UsageError(f"the host file {hostfile} is not UTF-8", hint="is it a host file?") from None
    if len(text) > HOSTFILE_LIMIT:
        raise UsageError(f"the host file {hostfile} is larger than {HOSTFILE_LIMIT >> 20} MiB")
    found, errors = parse_lines(text)
    if errors:
        count = name_errors(len(errors))
        raise UsageError(f"the host file {hostfile} has {count}", evidence=shorten(errors))
    if not found:
        raise UsageError(f"the host file {hostfile} names no host", hint="write one per line, like `gpu-a slots=2`")
    return f"--hostfile {hostfile}", found


def make_host_spec(option: str, hosts: Sequence[Host], program: ProgramSpec | None) -> ClusterSpec:
    """The spec of a cluster with a worker for each slot; `option`: the option that named the hosts.

    Raises:
        UsageError: the spec of these hosts would not be valid.
    """
    given: Mapping[str, Any] = {} if program is None else {"program": program}
    try:
        return ClusterSpec.model_validate({"nodes": [host.fields() for host in hosts], **given})
    except ValidationError as error:
        raise refuse_options(explain_option(option, error)) from None


def make_slurm_spec(program: ProgramSpec | None) -> ClusterSpec:
    """The spec of a cluster on the nodes of the Slurm job that this process runs in."""
    given: Mapping[str, Any] = {} if program is None else {"program": program}
    return ClusterSpec.model_validate({"nodes": SLURM, **given})


def append_arguments(spec: ClusterSpec, words: Sequence[str]) -> ClusterSpec:
    """The spec with these words appended to the arguments of its program.

    Raises:
        UsageError: a word is not UTF-8.
    """
    for word in words:
        check_text(word)
    program, field = spec.program, "args" if spec.program.command is None else "command"
    if not words:
        return spec
    return spec.changed(program=program.changed(**{field: [*getattr(program, field), *words]}))


def check_patterns(patterns: Sequence[str]) -> None:
    """Checks patterns of `distlaunch collect`.

    Raises:
        UsageError: a pattern matches nothing in a working directory.
    """
    for pattern in patterns:
        try:
            check_collected(pattern)
        except PydanticCustomError as error:
            raise UsageError(error.message()) from None

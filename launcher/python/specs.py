"""Specs for Python programs: read from a file, or made for a cluster on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.errors import UsageError
from launcher.spec import command_line, field_options, loading
from launcher.spec.models import ClusterSpec
from launcher.spec.parts import ProgramSpec
from launcher.spec.settings import set_fields, set_option
from launcher.spec.strategies import Framework
from launcher.spec.variables import set_variables
from worker_entry.protocol.strategy_names import StrategyName


def load_spec(path: str | os.PathLike[str], *, settings: Sequence[str] = ()) -> ClusterSpec:
    """Reads and checks a spec file.

    Args:
        path: the file.
        settings: overrides of fields, like `restart.max_restarts=3`.

    Raises:
        SpecError: the file cannot be read, or has errors; the error lists all errors with their lines.
        UsageError: a setting is wrong.

    >>> spec = load_spec("cluster.yaml", settings=["restart.max_restarts=3"])
    >>> [str(task) for _, task in spec.placements()], spec.restart.max_restarts
    (['worker:0', 'worker:1'], 3)
    """
    return set_fields(loading.load_spec(Path(path), os.environ), settings)


def local_spec(
    script: str | os.PathLike[str] | None = None,
    *args: str,
    module: str | None = None,
    command: Sequence[str] | None = None,
    workers: int | None = None,
    ps: int | None = None,
    evaluator: bool = False,
    strategy: StrategyName = "multi_worker_mirrored",
    framework: Framework = "tensorflow",
    devices: int | None = None,
    env: Mapping[str, str] | None = None,
    python: str | os.PathLike[str] | None = None,
    settings: Sequence[str] = (),
) -> ClusterSpec:
    """The spec of a cluster on this machine, as `distlaunch local` makes it.

    Args:
        script: a Python script; the built-in demo if `script`, `module` and `command` are all missing.
        args: the arguments of the script or the module.
        module: a Python module, instead of a script.
        command: any other program with its arguments, instead of a script.
        workers: the number of workers; by default two, or one for a strategy with one process.
        ps: the number of parameter servers; by default one, for `parameter_server` only.
        evaluator: whether to add an evaluator.
        strategy: the strategy of tf.distribute that the program uses.
        framework: `tensorflow`, or `torch` or `jax` for their variables.
        devices: splits each task's CPU into this many devices if there is no GPU.
        env: environment variables of all tasks, in addition to those of this process.
        python: the interpreter of the tasks; by default, the interpreter of this process.
        settings: fields of the spec, like `timeouts.start_s=60`.

    Raises:
        UsageError: the arguments contradict each other.

    >>> spec = local_spec("train.py", "--epochs", "3", workers=4, settings=["restart.max_restarts=1"])
    >>> spec.program.script, spec.program.args, len(list(spec.placements()))
    ('train.py', ['--epochs', '3'], 4)
    """
    if sum(given is not None for given in (script, module, command)) > 1:
        raise UsageError("script, module and command each name the program", hint="give one of them")
    if command is not None and args:
        raise UsageError("the arguments of a command belong in its list; remove `args`")
    if workers is not None and workers < 1:
        raise UsageError(f"workers is {workers}; a cluster needs at least one")
    spec = command_line.make_spec(
        tasks=command_line.make_tasks(strategy, workers, ps, evaluator=evaluator),
        strategy=strategy,
        framework=framework,
        program=_make_program(script, args, module, command),
    )
    own = [
        set_option(option, value, option.name)
        for option, value in (
            (field_options.DEVICES, devices),
            (field_options.PYTHON, None if python is None else os.fspath(python)),
        )
        if value is not None
    ]
    variables = [f"{name}={value}" for name, value in (env or {}).items()]
    return set_fields(set_variables(spec, variables, os.environ), [*own, *settings])


def _make_program(
    script: str | os.PathLike[str] | None, args: Sequence[str], module: str | None, command: Sequence[str] | None
) -> ProgramSpec | None:
    first = os.fspath(script) if script is not None else module
    words = list(command) if command is not None else [*([] if first is None else [first]), *args]
    return command_line.make_program(words, is_module=module is not None, is_command=command is not None)

"""Starts this machine's agent as soon as a command line is read: before its spec, its plan and its run exist.

For a Python program, the agent also begins to import TensorFlow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.changes import find_given, find_variables
from launcher.spec.field_options import REPORT, TENSORBOARD

if TYPE_CHECKING:
    from launcher.transports.agent_process import EarlyAgent
    from worker_entry.protocol.values import Program

FORESEEN = {"env", *(field.name for field in (REPORT, TENSORBOARD))}
"""Options with which the agent and the import are the same, and which cannot be wrong otherwise than `-e` can."""
MOST_WORKERS = 8
"""With more workers, the import is a small part of their start."""


@contextlib.contextmanager
def agent_started(
    context: click.Context, program: Sequence[str], *, module: bool, workers: int | None, run_dir: Path | None
) -> Iterator[EarlyAgent | None]:
    """Starts an agent on this machine, and ends it afterwards if no run has taken it.

    Yields None if the command line may be wrong or want another agent, or if none can be started.
    """
    from launcher.tasks import WORKERS

    workers = workers or WORKERS
    is_command = context.meta["distlaunch.is_command"]
    is_there = module or is_command or not program or Path(program[0]).is_file()
    variables = find_variables(context)
    is_right = is_there and all(map(str.isidentifier, variables)) and find_given(context) <= FORESEEN
    agent = _start(workers, run_dir) if is_right and workers <= MOST_WORKERS else None
    if agent is None:
        yield None
        return
    try:
        if not is_command:
            from launcher.plan.import_env import make_early_preload
            from worker_entry.system import hardware

            what = _find_program(program, module=module)
            agent.preload(make_early_preload(what, workers, hardware.cores(), variables))
        yield agent
    finally:
        agent.end()


def _start(workers: int, run_dir: Path | None) -> EarlyAgent | None:
    from launcher.errors import DistlaunchError
    from launcher.rundir.names import choose_folder, make_run_id
    from launcher.tasks import name_local
    from launcher.transports.agent_process import EarlyAgent
    from worker_entry.system import kernel

    if not kernel.LINUX:
        return None
    run_id = make_run_id(name_local(workers))
    with contextlib.suppress(OSError, DistlaunchError):  # the run has the same problem, and reports it
        folder = choose_folder(run_dir, run_id).absolute()
        return EarlyAgent(run_id, next(parent for parent in folder.parents if parent.is_dir()))
    return None


def _find_program(words: Sequence[str], *, module: bool) -> Program:
    from launcher.tasks import DEMO
    from worker_entry.protocol.values import Program

    if not words:
        return Program("module", DEMO)
    return Program("module" if module else "script", words[0], list(words[1:]))

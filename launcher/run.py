"""Puts a run together: its folder, its transports, its console; and runs it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.console import open_console
from launcher.errors import UsageError
from launcher.plan import LaunchPlan, NodeFacts, make_plan
from launcher.results import RunReport
from launcher.run_dir import RunDir, make_run_id, runs_directory
from launcher.spec import DEMO_MODULE, ClusterSpec, NodeSpec, ProgramSpec
from launcher.supervisor import Replan, Supervisor
from launcher.tasks import TaskId
from launcher.transports.local import LocalTransport


def run(spec: ClusterSpec, *, run_dir: Path | None, verbose: bool) -> RunReport:
    """Runs the cluster to its end.

    Args:
        spec: what to run.
        run_dir: where the run's files go; without it, a new folder in the user's state directory.
        verbose: whether the console shows TensorFlow's chatter.

    Raises:
        DistlaunchError: it could not be started; nothing is left running.
    """
    remote = [node.host for node in spec.nodes if not node.is_local]
    if remote:
        raise UsageError(
            f"this version starts tasks on this machine only, not on {', '.join(remote)}",
            cure="`distlaunch plan` shows the command that starts each task by hand on its node",
        )
    pythons = {node.host: _find_python(node) for node in spec.nodes}
    run_id = make_run_id(spec.name)
    files = RunDir.create(run_dir if run_dir is not None else runs_directory(os.environ) / run_id)
    if spec.program == ProgramSpec(module=DEMO_MODULE):  # the demo keeps its model beside its logs
        program = ProgramSpec(module=DEMO_MODULE, args=["--model-dir", str(files.root / "model")])
        spec = spec.model_copy(update={"program": program})
    files.write_text(files.spec, spec.model_dump_json(indent=2, exclude_defaults=True) + "\n")
    replan = make_replan(spec)
    tasks = [task for _, task in spec.placements()]
    console = open_console(tasks, verbose=verbose)
    try:
        where = "this machine" if len(spec.nodes) == 1 else f"{len(spec.nodes)} nodes"
        console.note(f"Starting {len(tasks)} task{'s'[: len(tasks) > 1]} on {where}; logs in {files.root}")
        supervisor = Supervisor(
            replan,
            spec.timeouts,
            (spec.ports.first, spec.ports.last),
            run_id,
            files,
            {host: LocalTransport(files.agent_errors, python) for host, python in pythons.items()},
            console,
        )
        return supervisor.run()
    finally:
        console.close()


def make_replan(spec: ClusterSpec) -> Replan:
    """`make_plan` with all that comes from this process filled in."""

    def replan(facts: Mapping[str, NodeFacts], ports: Mapping[TaskId, int] | None) -> LaunchPlan:
        return make_plan(
            spec,
            directory=str(Path.cwd()),
            environ=os.environ,
            python=sys.executable,
            facts=facts,
            ports=ports,
        )

    return replan


def _find_python(node: NodeSpec) -> str:
    name = node.python or sys.executable
    found = shutil.which(name)
    if found is None:
        raise UsageError(
            f"no Python interpreter at {name}" if os.sep in name else f"no {name} on PATH",
            cure="name one with --python (`python:` in a spec)",
        )
    return found

"""Puts a run together: its folder, its transports, its console; and runs it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.console import open_console
from launcher.errors import UsageError
from launcher.plan import LaunchPlan, NodeFacts, make_plan
from launcher.results import RunReport
from launcher.run_dir import RunDir, make_run_id, runs_directory
from launcher.spec import DEMO_MODULE, ClusterSpec, NodeSpec, ProgramSpec
from launcher.supervisor import Replan, Supervisor
from launcher.tasks import TaskId
from launcher.transports.base import LinkError, Transport
from launcher.transports.local import LocalTransport

if TYPE_CHECKING:
    from launcher.transports.ssh_config import SshTarget


def run(spec: ClusterSpec, *, run_dir: Path | None, verbose: bool) -> RunReport:
    """Runs the cluster to its end.

    Args:
        spec: what to run.
        run_dir: where the run's files go; without it, a new folder in the user's state directory.
        verbose: whether the console shows TensorFlow's chatter.

    Raises:
        DistlaunchError: it could not be started; nothing is left running.
    """
    pythons = {node.host: _find_python(node) for node in spec.nodes if node.is_local}
    targets = {node.host: _find_target(node) for node in spec.nodes if not node.is_local}
    spec = spec.model_copy(update={"nodes": [_with_address(node, targets.get(node.host)) for node in spec.nodes]})
    run_id = make_run_id(spec.name)
    files = RunDir.create(run_dir if run_dir is not None else runs_directory(os.environ) / run_id)
    spec = _place_demo(spec, files)
    files.write_text(files.spec, spec.model_dump_json(indent=2, exclude_defaults=True) + "\n")
    tasks = [task for _, task in spec.placements()]
    console = open_console(tasks, verbose=verbose)
    try:
        where = "this machine" if len(spec.nodes) == 1 and spec.nodes[0].is_local else f"{len(spec.nodes)} nodes"
        console.note(f"Starting {len(tasks)} task{'s'[: len(tasks) > 1]} on {where}; logs in {files.root}")
        supervisor = Supervisor(
            make_replan(spec),
            spec.timeouts,
            (spec.ports.first, spec.ports.last),
            run_id,
            files,
            {node.host: _make_transport(node, pythons, targets, files) for node in spec.nodes},
            console,
        )
        return supervisor.run()
    finally:
        console.close()


def _find_target(node: NodeSpec) -> SshTarget:
    from launcher.transports.ssh_config import load_target

    try:
        return load_target(node.host)
    except LinkError as error:
        raise UsageError(f"{node.host}: {error}") from None


def _with_address(node: NodeSpec, target: SshTarget | None) -> NodeSpec:
    """The node, with the address that it is reached by, where its spec names none."""
    if target is None or node.address is not None:
        return node
    return node.model_copy(update={"address": target.hostname})


def _make_transport(
    node: NodeSpec, pythons: Mapping[str, str], targets: Mapping[str, SshTarget], files: RunDir
) -> Transport:
    if node.is_local:
        return LocalTransport(files.agent_errors, pythons[node.host])
    from launcher.transports.ssh import SshTransport

    return SshTransport(targets[node.host], node.python or "python3")


def _place_demo(spec: ClusterSpec, files: RunDir) -> ClusterSpec:
    """The demo keeps its model beside its logs, on this machine; elsewhere it needs no working directory."""
    if spec.program != ProgramSpec(module=DEMO_MODULE):
        return spec
    if all(node.is_local for node in spec.nodes):
        program = ProgramSpec(module=DEMO_MODULE, args=["--model-dir", str(files.root / "model")])
        return spec.model_copy(update={"program": program})
    return spec.model_copy(update={"working_directory": spec.working_directory or "~"})


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

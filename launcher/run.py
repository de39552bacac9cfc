"""Puts a run together: its folder, its transports, its console; and runs it."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from launcher.casting import at_first, cast
from launcher.chaos import Fault
from launcher.check_report import make_check_report
from launcher.clean import clean_node
from launcher.console import Console, open_console
from launcher.errors import InterruptionError
from launcher.gang_loop import Cast, Replan, Stage
from launcher.node_links import NodeLinks
from launcher.plan import LaunchPlan, NodeFacts, make_plan
from launcher.preflight import Preflight
from launcher.results import CheckReport, RunReport
from launcher.run_dir import RunDir, make_run_id, runs_directory
from launcher.spec import DEMO_MODULE, ClusterSpec
from launcher.spec_parts import ProgramSpec
from launcher.supervisor import Supervisor
from launcher.sync import make_bundle
from launcher.tasks import TaskId
from launcher.ways import Ways, find_ways, make_transport


def run(
    spec: ClusterSpec, *, run_dir: Path | None, verbose: bool, checks: bool, faults: Sequence[Fault] = ()
) -> RunReport:
    """Runs the cluster to its end.

    Args:
        spec: what to run.
        run_dir: where the run's files go; without it, a new folder in the user's state directory.
        verbose: whether the console shows TensorFlow's chatter.
        checks: whether the nodes are checked before the start.
        faults: what is done to it on purpose.

    Raises:
        DistlaunchError: it could not be started; nothing is left running.
    """
    spec, ways = find_ways(spec)
    run_id = make_run_id(spec.name)
    files = RunDir.create(run_dir if run_dir is not None else runs_directory(os.environ) / run_id)
    files.hold(run_id)
    spec = _place_checkpoints(_place_logs(_place_demo(spec, files), files), files)
    files.write_text(files.spec, spec.model_dump_json(indent=2, exclude_defaults=True) + "\n")
    tasks = [task for _, task in spec.placements()]
    tasked = at_first(spec).nodes
    console = open_console(tasks, verbose=verbose)
    try:
        count = len(tasked)
        where = "this machine" if count == 1 and tasked[0].is_local else f"{count} node{'s'[: count > 1]}"
        console.note(f"Starting {len(tasks)} task{'s'[: len(tasks) > 1]} on {where}; logs in {files.root}")
        preflight = Preflight(at_first(spec), secrets.token_hex(8)) if checks else None
        return _make_supervisor(spec, run_id, files, ways, console, preflight, faults=faults).run()
    finally:
        console.close()


def check(spec: ClusterSpec) -> CheckReport:
    """Looks at the nodes as a run would before its start, and starts nothing.

    Raises:
        DistlaunchError: it could not be done, or was interrupted; nothing is left running.
    """
    spec, ways = find_ways(spec)
    with tempfile.TemporaryDirectory(prefix="distlaunch-") as folder:
        files = RunDir(Path(folder))
        preflight = Preflight(at_first(spec), secrets.token_hex(8))
        console = open_console([], verbose=False)
        try:
            run_id = make_run_id(spec.name)
            supervisor = _make_supervisor(
                _place_demo(spec, files), run_id, files, ways, console, preflight, only_checks=True
            )
            gang = supervisor.check()
        finally:
            console.close()
    if gang.signal is not None:
        raise InterruptionError(gang.signal)
    return make_check_report(at_first(spec), preflight, gang)


def _make_supervisor(
    spec: ClusterSpec,
    run_id: str,
    files: RunDir,
    ways: Ways,
    console: Console,
    preflight: Preflight | None,
    *,
    only_checks: bool = False,
    faults: Sequence[Fault] = (),
) -> Supervisor:
    """`preflight` is that of the first start."""
    first = [preflight]

    def recast(lost: Collection[str]) -> Cast | None:
        chosen = cast(spec, lost)
        if chosen is None:
            return None
        nodes, notes = chosen
        again = Preflight(nodes, secrets.token_hex(8)) if preflight is not None else None
        return Cast(make_replan(nodes), first.pop() if first else again, notes)

    def recover(host: str, meeting: str) -> bool:
        return clean_node(spec, next(node for node in spec.nodes if node.host == host), [run_id], meeting).good

    transports = {node.host: make_transport(spec, node, ways[node.host], files, run_id) for node in spec.nodes}
    stage = Stage(
        run_id,
        files,
        NodeLinks(transports, run_id, files, spec.timeouts.lease_s),
        console,
        spec.timeouts,
        (spec.ports.first, spec.ports.last),
        spec.restart.max_restarts > 0,
        spec.restart.max_worker_restarts,
        spec.tensorboard == "keep",
        make_bundle(spec.sync, Path.cwd()) if spec.sync is not None else None,
        only_checks,
    )
    return Supervisor(stage, recast, recover, spec.restart, faults)


def _place_demo(spec: ClusterSpec, files: RunDir) -> ClusterSpec:
    """The demo keeps its model beside its logs, on this machine; elsewhere it needs no working directory."""
    if spec.program != ProgramSpec(module=DEMO_MODULE):
        return spec
    if spec.is_local:
        args = ["--model-dir", str(files.root / "model")]
        if any(node.count("evaluator") for node in spec.nodes):
            args += ["--checkpoints", str(files.make_checkpoints())]
        program = ProgramSpec(module=DEMO_MODULE, args=args)
        return spec.model_copy(update={"program": program})
    if spec.sync is not None:
        return spec
    return spec.model_copy(update={"working_directory": spec.working_directory or "~"})


def _place_logs(spec: ClusterSpec, files: RunDir) -> ClusterSpec:
    """What TensorBoard shows, where all of it is on this machine."""
    if spec.logs is not None or not spec.is_local:
        return spec
    return spec.model_copy(update={"log_directory": str(files.root / "tensorboard")})


def _place_checkpoints(spec: ClusterSpec, files: RunDir) -> ClusterSpec:
    """On this machine all tasks share a folder anyway: one that is the same for all attempts."""
    if spec.checkpoint_directory is not None or not spec.is_local:
        return spec
    return spec.model_copy(update={"checkpoint_directory": str(files.make_checkpoints())})


def make_replan(spec: ClusterSpec) -> Replan:
    """`make_plan` with all that comes from this process filled in."""

    def replan(
        facts: Mapping[str, NodeFacts], ports: Mapping[TaskId, int] | None, dialled: Mapping[str, str] | None = None
    ) -> LaunchPlan:
        return make_plan(
            spec,
            directory=str(Path.cwd()),
            environ=os.environ,
            python=sys.executable,
            facts=facts,
            ports=ports,
            dialled=dialled,
        )

    return replan

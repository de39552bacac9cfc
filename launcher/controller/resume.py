"""Resumes a run whose controller is gone: takes over its running tasks, or starts them again."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.clock import SystemTiming, Timing
from launcher.console.writer import Console
from launcher.controller.context import AttemptSetup
from launcher.controller.detach import Detachment
from launcher.controller.launch import conduct, prepare_nothing
from launcher.errors import DistlaunchError, InterruptionError, RunDirectoryError, UsageError
from launcher.plan.planner import Planner
from launcher.plan.rendering import render_file
from launcher.plan.resources import NodeFacts
from launcher.report.models import RunReport
from launcher.rundir.directory import RunDir, RunStart
from launcher.rundir.history import History, read_history
from launcher.rundir.names import absolute, choose_folder, name_job, name_run
from launcher.rundir.record import RecordedPlan, RecordedRun, RunRecord, last_written, read_record
from launcher.rundir.select import verify_own
from launcher.signals import Interrupts
from launcher.slurm.allocation import find_job
from launcher.slurm.calls import JOB_ID
from launcher.sources.node_list import find_nodes_first
from launcher.sources.slurm import count_restarts
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import SLURM, NodeSpec
from launcher.spec.redaction import REDACTED
from launcher.transports.node_cleanup import CleanedNode, clean_node
from worker_entry.agent.connection.lease import MARGIN_S
from worker_entry.protocol.frozen import replace
from worker_entry.system import clock

NODES_AT_ONCE = 32
POLL_S = 0.1

Clean = Callable[[ClusterSpec, NodeSpec, list[str]], CleanedNode]
"""Stops the processes that these runs left on a node of the spec."""


class LeftoverError(DistlaunchError):
    """Processes of a run's last attempt may still be running."""

    reference = "leftover"


def resume(
    files: RunDir,
    spec: ClusterSpec | None,
    *,
    environ: Mapping[str, str],
    verbose: bool = False,
    live: bool = False,
    detachment: Detachment | None = None,
) -> RunReport:
    """Resumes a run: the attempt numbers continue, and the checkpoints stay in place.

    Args:
        files: the run's folder.
        spec: the spec from now on; None: the spec with which the run was started.
        environ: has the values of secret variables, which the run's files do not contain.
        verbose: whether the console shows TensorFlow's start-up messages.
        live: whether the console has the live view, on a terminal.
        detachment: leaves the terminal, if the run can.

    Raises:
        DistlaunchError: the run is still running, or cannot be resumed; nothing has changed.
        ShownError: an error ended the run; the report is written.
    """
    clock.share()
    record = read_record(files)
    if files.read_run()[1] is not None:
        raise UsageError(
            f"run {record.run_id} is still running", hint=f"follow it: `distlaunch attach {name_run(files.root)}`"
        )
    history = read_history(files)
    attended = max(history.attended, last_written(files) if history.is_attended else 0.0)
    recorded = _load_recorded(files, environ) if spec is None else spec
    changed = spec is not None
    job = ""
    if recorded.source == SLURM:
        job, known = find_job(environ), recorded.nodes
        recorded = find_nodes_first(recorded)
        changed = changed or recorded.nodes != known
    if not (job and job == record.job and count_restarts(environ)):
        history = replace(history, endings=())  # only a requeued job keeps the earlier endings
    has_begun = files.events.exists()  # otherwise, this is the first start of a submitted run
    start = RunStart(
        run_id=record.run_id,
        name=recorded.name,
        started=record.started if has_begun else clock.now(),
        cwd=_find_cwd(record),
        checks=record.checks,
        command=record.command,
        generation=record.generation + 1 if has_begun else 0,
        job=job,
    )
    return conduct(
        recorded,
        start,
        lambda: files,
        verbose=verbose,
        live=live,
        detachment=detachment,
        history=history,
        prepare=functools.partial(prepare, files, history, start.run_id, attended=attended, changed=changed)
        if has_begun
        else prepare_nothing,
    )


def find_requeued(run_dir: Path | None, environ: Mapping[str, str]) -> RunDir | None:
    """The folder of the run that this process's Slurm job ran before it was requeued; None if it ran none."""
    job = environ.get(JOB_ID, "")
    if not job or not count_restarts(environ):
        return None
    files = RunDir(absolute(choose_folder(run_dir, name_job(job))))
    try:
        return verify_own(files) if read_record(files).job == job else None
    except RunDirectoryError:
        return None


def _load_recorded(files: RunDir, environ: Mapping[str, str]) -> ClusterSpec:
    """The spec of the run, with the values of its secrets from this environment."""
    try:
        spec = RecordedRun(files).spec_fields
        missing = []
        nodes = spec["nodes"]
        listed = nodes if isinstance(nodes, dict) else {"known": nodes if isinstance(nodes, list) else []}
        for env in (spec.get("env", {}), *(node.get("env", {}) for node in listed.get("known", []))):
            hidden = [name for name, value in env.items() if REDACTED in value]
            missing += [name for name in hidden if name not in environ]
            env.update({name: environ[name] for name in hidden if name in environ})
        if missing:
            raise UsageError(
                f"the run's files contain no secrets; not set in this environment: {', '.join(sorted(set(missing)))}",
                hint="export them, or name the spec with --spec",
            )
        if hidden := [name for name, value in spec.items() if REDACTED in json.dumps(value)]:
            raise UsageError(
                f"`{'`, `'.join(hidden)}` of the spec has secrets, which the run's files do not contain",
                hint="name the spec with --spec",
            )
        return ClusterSpec.model_validate_json(json.dumps(spec))
    except RunDirectoryError as error:
        raise RunDirectoryError(error.message, hint="name the spec with --spec") from None
    except (ValueError, KeyError, AttributeError) as error:
        raise RunDirectoryError(f"cannot read {files.spec}: {error}", hint="name the spec with --spec") from None


def _find_cwd(record: RunRecord) -> str:
    cwd = record.cwd or str(Path.cwd())
    if not os.access(cwd, os.X_OK):
        raise UsageError(f"the run was started in {cwd}, which no longer exists")
    return cwd


def prepare(
    files: RunDir,
    history: History,
    run_id: str,
    planner: Planner,
    console: Console,
    interrupts: Interrupts,
    *,
    attended: float,
    changed: bool,
    clean: Clean = clean_node,
    timing: Timing | None = None,
) -> AttemptSetup | None:
    """Returns the running attempt; if there is none, stops leftover processes of the last attempt and returns None.

    Args:
        files: the run's folder.
        history: the history of the run.
        run_id: the run's ID.
        planner: plans for the nodes of the spec.
        console: gets the notes.
        interrupts: the user's signals.
        attended: when a controller was last in charge of the tasks, in Unix seconds.
        changed: whether the spec has changed.
        clean: cleans one node.
        timing: the clocks and waits; None: this machine's.

    Raises:
        LeftoverError: leftover processes may still run.
        InterruptionError: a signal asked to stop.
    """
    timing = timing or SystemTiming()
    taken_over = find_running_attempt(files, history, planner) if not changed else None
    if taken_over is not None:
        console.note(f"Taking over attempt {history.attempt} while its tasks continue")
        return taken_over
    last = history.attempts[-1] if history.attempts else None
    if history.ended is not None and not history.is_open and (last is None or last.processes_left == 0):
        return None
    console.note("Stopping leftover processes of the last attempt")
    spec = planner.spec

    def clean_all() -> list[CleanedNode]:
        return timing.map(lambda node: clean(spec, node, [run_id]), spec.nodes, NODES_AT_ONCE)

    # A later `resume` repeats work that a signal has ended the wait for.
    cleaned = timing.run_checked(clean_all, lambda: _check_asked(interrupts))
    if any(node.gone for node in cleaned):
        await_leases(attended, spec.timeouts.lease_s, console, interrupts, timing)
    left = [str(node) for node in cleaned if not node.ok]
    if left:
        raise LeftoverError(
            "tasks of the last attempt may still run",
            evidence=left,
            hint="make the nodes reachable and try again; without a controller, tasks stop when their lease expires",
        )
    return None


def await_leases(attended: float, lease_s: float, console: Console, interrupts: Interrupts, timing: Timing) -> None:
    """Waits until tasks that cannot be queried have certainly ended: containers of a deleted pod may still run."""
    wait_s = attended + lease_s + MARGIN_S - timing.now()
    if wait_s > 0:
        console.note(
            f"Pods of the last attempt are gone; waiting {wait_s:.0f} s until their tasks have certainly ended"
        )
    until = timing.monotonic() + wait_s
    while (left_s := until - timing.monotonic()) > 0:
        _check_asked(interrupts)
        timing.sleep(min(left_s, POLL_S))


def _check_asked(interrupts: Interrupts) -> None:
    if interrupts.asked is not None:
        raise InterruptionError(interrupts.asked)


def _find_addresses(plan: RecordedPlan) -> dict[str, str]:
    """The address at which the other nodes reach each node; TensorBoard's is not one of these."""
    return {task.node: task.address for task in plan.tasks if not task.task.is_auxiliary}


def _has_ports(history: History, plan: RecordedPlan) -> bool:
    """Whether the journal has the port of each planned task."""
    return {task.task for task in plan.tasks} <= history.ports.keys()


def find_running_attempt(files: RunDir, history: History, planner: Planner) -> AttemptSetup | None:
    """The last attempt, if its tasks may still run and a plan made now equals the plan that was started."""
    if history.ended is not None or not history.is_open or history.state != "running":
        return None
    started = RecordedRun(files).plan
    nodes = {task.node for task in started.tasks}
    addresses = _find_addresses(started)
    if not nodes or not all(node in history.ready and history.ready[node].reattach_folder for node in nodes):
        return None  # an agent on this machine ends with its controller
    if not _has_ports(history, started):
        return None  # a full disk has kept them out of the journal
    selected = planner.select_nodes([node.host for node in planner.spec.nodes if node.host not in nodes])
    if selected is None:
        return None
    facts = {node: NodeFacts.of(history.ready[node]) for node in nodes}
    setup = AttemptSetup(planner=selected[0], preflight=None, addresses=addresses, taken_over=history)
    plan = setup.planner.plan(facts, history.ports, addresses)
    now = json.loads(json.dumps(render_file(plan)))
    return setup if all(now[key] == started.content.get(key) for key in ("tasks", "cluster")) else None

"""`distlaunch profile`: profiles all tasks of a running cluster for TensorBoard."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import worker_entry
from launcher.errors import DistlaunchError, RunDirectoryError, UsageError
from launcher.plan.tf_config import format_address
from launcher.run.directory import RunDir
from launcher.spec.models import LOCAL, ClusterSpec
from launcher.tasks import find_leader, parse_task_id
from worker_entry.task.profiling import ATTEMPTS, GATHER_S

MARGIN_S = 30.0
"""Time for an interpreter to start and connect."""


class ProfileError(DistlaunchError):
    """The tasks could not be profiled, or recorded nothing."""

    reference = "profile"


@dataclass(frozen=True)
class Capture:
    """One capture; each file is on its task's node."""

    files: tuple[Path, ...]
    """One per task that recorded something."""
    silent: tuple[str, ...]
    """The tasks that recorded nothing."""


def profile(files: RunDir, duration_s: float) -> Capture:
    """Captures a profile of all tasks.

    Raises:
        DistlaunchError: the run has ended, or its tasks cannot be profiled from here.
    """
    if files.read_run()[1] is None:
        raise UsageError(f"the run {files.root} has ended", hint="profile a run while it is running")
    try:
        plan = json.loads(files.plan.read_text())
        spec = ClusterSpec.model_validate_json(files.spec.read_bytes())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"cannot read {files.plan}: {error}") from None
    if spec.logs is None:
        raise UsageError("the run has no log directory", hint="set `log_directory:` in the spec")
    tasks = _find_servers(spec, plan)
    if not tasks:
        raise UsageError("no task of this run has a profiler server", hint="run two workers or more")
    here = next((task["python"] for task in plan["tasks"] if task["node"] == LOCAL), sys.executable)
    answer = _ask(here, {"tasks": tasks, "directory": spec.logs, "duration_s": duration_s})
    if answer["failed"]:
        evidence = [f"{name}: {reason}" for name, reason in answer["failed"].items()]
        raise ProfileError("some tasks could not be profiled", evidence=evidence)
    found = [Path(answer["directory"], f"{name}.xplane.pb") for name in tasks if name not in answer["silent"]]
    if not found:
        raise ProfileError("no task recorded anything", hint="try a longer --duration")
    return Capture(tuple(found), tuple(answer["silent"]))


def _find_servers(spec: ClusterSpec, plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tasks with a profiler server, by file name: address, and whether TensorFlow's operations are recorded.

    They are recorded in every task except the workers that ask the leader to order their collectives. In those,
    TensorFlow (2.21) gathers its threads' records through pointers into a vector that grows meanwhile, and writes to
    freed memory (`TraceMeRecorder::Consume`, an activity that begins in one thread and ends in another): such a worker
    died of SIGSEGV or SIGABRT in one of 10 to 90 captures. Python functions and GPU work are recorded by other means,
    in all tasks.
    """
    servers = {
        parse_task_id(task["task"]): format_address(task["address"], task["port"])
        for task in plan["tasks"]
        if task["tf_config"] and task["tf_config"]["task"]["type"] != "evaluator"
    }
    leader = find_leader(servers)
    return {
        task.file_name: {"address": address, "operations": task == leader or not spec.rules.collective}
        for task, address in servers.items()
    }


def _ask(python: str, order: Mapping[str, Any]) -> dict[str, Any]:
    """Sends the order through an interpreter that has TensorFlow, and with it gRPC."""
    try:
        done = subprocess.run(
            [python, str(Path(worker_entry.__file__).parent), "profile"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=ATTEMPTS * (order["duration_s"] + GATHER_S) + MARGIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProfileError("the tasks do not answer") from None
    if done.returncode != 0:
        last = next(reversed(done.stderr.strip().splitlines()), "")
        raise ProfileError(f"the tasks could not be profiled: {last}", hint="install TensorFlow here, or grpcio alone")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer

"""`distlaunch profile`: what all workers of a running run do for some seconds, for TensorBoard's profiler."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import worker_entry
from launcher.errors import DistlaunchError, RunDirectoryError, UsageError
from launcher.run_dir import RunDir
from launcher.spec import LOCAL, ClusterSpec
from launcher.tf_config import format_address
from worker_entry.profiling import ATTEMPTS, captured

MARGIN_S = 120.0
"""Beyond its duration: to import TensorFlow, and to gather what all have seen."""


class ProfileError(DistlaunchError):
    """The workers could not be asked, or had nothing to say."""

    reference = "profile"


def profile(files: RunDir, duration_s: float) -> tuple[list[Path], int]:
    """Captures it; returns the new files, one for each worker that had something to show, and how many were asked.

    Raises:
        DistlaunchError: the run is over, or its workers cannot be profiled from here.
    """
    if files.read_run()[1] is None:
        raise UsageError(f"the run {files.root} is over", cure="profile it while it is under way")
    try:
        plan = json.loads(files.plan.read_text())
        spec = ClusterSpec.model_validate_json(files.spec.read_bytes())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"cannot read {files.plan}: {error}") from None
    if spec.logs is None:
        raise UsageError("the run has no log directory", cure="name a `log_directory:` in the spec")
    addresses = [format_address(task["address"], task["port"]) for task in plan["tasks"] if task["tf_config"]]
    if not addresses:
        raise UsageError("only tasks of a cluster have a server to ask", cure="run it with two workers or more")
    here = next((task["python"] for task in plan["tasks"] if task["node"] == LOCAL), sys.executable)
    before = set(captured(spec.logs))
    _ask(here, addresses, spec.logs, duration_s)
    new = [Path(path) for path in captured(spec.logs) if path not in before]
    last = max((path.parent.name for path in new), default="")
    found = sorted(path for path in new if path.parent.name == last)
    if not found:
        raise ProfileError("no worker said what it does", cure="try a longer --duration")
    return found, len(addresses)


def _ask(python: str, addresses: Sequence[str], logs: str, duration_s: float) -> None:
    """TensorFlow itself asks them, in an interpreter that has it."""
    order = {"addresses": addresses, "directory": logs, "duration_s": duration_s}
    try:
        done = subprocess.run(
            [python, str(Path(worker_entry.__file__).parent), "profile"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=ATTEMPTS * duration_s + MARGIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProfileError("the workers do not answer") from None
    if done.returncode != 0:
        last = next(reversed(done.stderr.strip().splitlines()), "")
        raise ProfileError(
            f"the workers could not be asked: {last}", cure="TensorFlow asks them, and must be installed here"
        )

"""`distlaunch profile`: profiles all tasks of a running cluster for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.commands.requests import ask_profile
from launcher.errors import DistlaunchError, UsageError
from launcher.rundir.directory import RunDir
from worker_entry.protocol.framing import parse
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.profiles import Profiled


class ProfileError(DistlaunchError):
    """The tasks could not be profiled, or recorded nothing."""

    reference = "profile"


@dataclass(frozen=True)
class Capture:
    """A capture; each file is on the node of its task."""

    files: tuple[Path, ...]
    """One per task that recorded something."""
    silent: tuple[str, ...]
    """The tasks that recorded nothing."""


def profile(files: RunDir, duration_s: float) -> Capture:
    """Captures a profile of all tasks.

    Raises:
        DistlaunchError: the run has ended, or its tasks cannot be profiled.
    """
    if files.read_run()[1] is None:
        raise UsageError(f"the run {files.root} has ended", hint="profile a run while it is running")
    said = json.loads(ask_profile(files, duration_s))
    answer = parse(Profiled, said["answer"], "answer")
    if answer.problem:
        raise ProfileError(f"the tasks could not be profiled: {answer.problem}")
    if answer.failed:
        evidence = [f"{name}: {reason}" for name, reason in answer.failed.items()]
        raise ProfileError("some tasks could not be profiled", evidence=evidence)
    found = [Path(answer.directory, f"{name}.xplane.pb") for name in said["tasks"] if name not in answer.silent]
    if not found:
        raise ProfileError("no task recorded anything", hint="try a longer --duration")
    return Capture(tuple(found), tuple(answer.silent))

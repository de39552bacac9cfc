"""Interprets the end of a task from the task's own data: the exit status of its pod, and a short message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from worker_entry.protocol import pod_statuses as statuses
from worker_entry.protocol.collateral import OUT_OF_STEP, has_collateral_line, is_collateral_crash, without_wrappers
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.values import CrashRecord, TaskExit

MESSAGE_LIMIT = 4096
"""Bytes that Kubernetes keeps of a container's last message."""
_HEAD, _TAIL = 800, 2000
"""Bytes kept of the beginning and the end of an exception's message: TensorFlow puts a traceback before the reason."""
_TAIL_LINES = 10
HOPELESS_EXCEPTIONS = ("SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError")
"""The program cannot be started: no restart changes that."""

_MEANINGS = {
    statuses.OK: "succeeded",
    statuses.FAILED: "the task failed",
    statuses.USAGE: "the program cannot be started; a restart would not help",
    statuses.INFRASTRUCTURE: "the cluster did not form in time",
    statuses.SAVED: "preempted, after a checkpoint was saved",
    statuses.COLLATERAL: "failed only because another task was gone",
    statuses.NO_PROGRESS: "a restart would get no further",
    statuses.TERMINATED: "preempted: asked to stop",
}


@dataclass(frozen=True)
class End:
    """How a task ended.

    `asked`: whether the pod was asked to stop before. `late`: seconds after which the cluster was given up; 0 if it
    was not. `finished`: whether the program had ended without a failure before its interpreter did. `step`: the last
    one that it reported. `saves`: whether the program has a PreemptionCheckpointHandler.
    """

    how: TaskExit
    crash: Optional[CrashRecord] = None
    tail: Sequence[str] = ()
    asked: bool = False
    late: float = 0.0
    finished: bool = False
    step: Optional[int] = None
    saves: bool = False


def find_status(end: End) -> int:
    """The exit status of the pod."""
    how, crash = end.how, end.crash
    if how.ok or end.finished:
        return statuses.OK
    if end.late:
        return statuses.INFRASTRUCTURE
    raised = crash is not None and crash.thread is None and crash.exit_status is None
    if end.saves and not raised and how.code in (statuses.SAVED, statuses.TERMINATED):
        return how.code
    if end.asked:
        return statuses.TERMINATED
    if crash is not None and OUT_OF_STEP.search(crash.message):
        return statuses.NO_PROGRESS
    if _is_collateral(end):
        return statuses.COLLATERAL
    if how.signal is not None:
        return 128 + how.signal
    if how.code in statuses.HOPELESS and not raised:
        return how.code
    if crash is not None and raised and crash.exception in HOPELESS_EXCEPTIONS:
        return statuses.USAGE
    # Any other status of the program's own would mean something else to Kubernetes.
    return statuses.FAILED


def _is_collateral(end: End) -> bool:
    if end.crash is not None and end.crash.thread is None:
        return is_collateral_crash(end.crash)
    # 6 is SIGABRT: TensorFlow aborts a process whose cluster is broken.
    return end.how.signal in (None, 6) and has_collateral_line(end.tail)


def render_message(task: str, end: End, status: int) -> bytes:
    """The message that `kubectl describe` shows for the ended container: the cause and its line."""
    first = f"{task}: {_MEANINGS.get(status, 'ended by a signal')} ({end.how})"
    lines = [first]
    if end.late:
        lines.append(f"no cluster within {end.late:g} s (timeouts.start_s)")
    if end.step is not None:
        lines.append(f"last step: {end.step}")
    crash = end.crash
    if crash is not None and status != statuses.OK:
        lines.append(f"{crash.file}:{crash.line}" if crash.file else "")
        text = without_wrappers(crash.message)
        lines.append(_shorten(text if crash.exception == "SystemExit" else f"{crash.exception}: {text}"))
    if status not in (statuses.OK, *statuses.PREEMPTED) and (crash is None or crash.exception == "SystemExit"):
        lines += end.tail[-_TAIL_LINES:]
    return "\n".join(filter(None, lines)).encode(errors="replace")[:MESSAGE_LIMIT] + b"\n"


def _shorten(text: str) -> str:
    data = text.encode(errors="replace")
    if len(data) <= _HEAD + _TAIL:
        return text
    return f"{data[:_HEAD].decode(errors='ignore')}\n…\n{data[-_TAIL:].decode(errors='ignore')}"

"""Which task broke an attempt, and how. Pure: from the gang's last state and the ends of logs to one cause.

The first death that is *seen* need not be the cause: an interpreter takes about a second to shut down, in which its
peers can fail and end before it. So the cause is the earliest failure by the moment of its exception, and failures
that show only that a peer went away come last.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.events import TaskExited
from launcher.gang import SAVED_STATUS
from launcher.gang_state import Gang
from launcher.tasks import TaskId
from worker_entry.values import TaskExit

COLLATERAL_EXCEPTIONS = (
    "UnavailableError",
    "AbortedError",
    "CancelledError",
    "InternalError",
    "DeadlineExceededError",
)
COLLATERAL_SIGNATURES = (
    "Socket closed",
    "Connection reset by peer",
    "failed to connect to all addresses",
    "stopped sending heartbeats",
    "different incarnation",
    "cluster check alive failed",
    "The tasks have crashed",
    "/replica:0/task:",
)
"""How TensorFlow says that a peer has gone; without a name for it of its own."""
_TORCH_EXCEPTIONS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_TORCH_SIGNATURES = (
    "Connection closed by peer",
    "gloo/transport/tcp",
    "a remote process exiting prematurely",
    "Did the remote server shutdown or crash",
)
"""How PyTorch does."""
_COLLATERAL: tuple[tuple[Sequence[str], Sequence[str]], ...] = (
    (COLLATERAL_EXCEPTIONS, COLLATERAL_SIGNATURES),
    (_TORCH_EXCEPTIONS, _TORCH_SIGNATURES),
)

_PREEMPTED_STATUSES = (SAVED_STATUS, 128 + signal.SIGTERM)
"""On some machines PreemptionCheckpointHandler ends with 143."""

_COLLATERAL_NAMES = (*COLLATERAL_EXCEPTIONS, "UNAVAILABLE", "ABORTED", "INTERNAL")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGKILL)
_TERM_STATUS = 128 + signal.SIGTERM
"""With what a program ends that handles TERM in the way of a shell."""


@dataclass(frozen=True)
class Cause:
    """What broke an attempt: the end of a task, its class by its stable name, and what is known beyond the end."""

    exited: TaskExited
    reference: str
    detail: str = ""
    cure: str = ""


@dataclass(frozen=True)
class _Known:
    """A failure that is recognised by what the exception or the end of the log says."""

    pattern: re.Pattern[str]
    reference: str
    cure: str


_KNOWN = tuple(
    _Known(re.compile(pattern), reference, cure)
    for pattern, reference, cure in (
        (
            r"Could not start gRPC server|Only one usage of each socket address|Address already in use",
            "port-taken",
            "somebody took the port meanwhile; leave `port:` out, so that free ones are held until they are used",
        ),
        (r"No space left on device", "disk-full", "free some space on that node"),
        (
            r"No module named '(tensorflow|keras)'",
            "task-failed",
            "install TensorFlow for this Python, or name the one that has it with --python (`python:` in a spec)",
        ),
        (
            r"^ModuleNotFoundError: ",
            "task-failed",
            "install the module for the Python that the tasks use, or set PYTHONPATH",
        ),
        (
            r"Attempt to convert a value \(PerReplica|Invalid reduction dimension 0 for input with 0 dimensions",
            "version-mismatch",
            "Keras 3 cannot fit with several workers by itself: let distlaunch mend it (without --no-keras-mend)",
        ),
        (
            r"need to pass this dataset to ClusterCoordinator\.create_per_worker_dataset",
            "task-failed",
            "let distlaunch mend Keras 3 (without --no-keras-mend), or use tf_keras (TF_USE_LEGACY_KERAS=1)",
        ),
        (
            r"Collective ops must be configured at program startup",
            "task-failed",
            "build MultiWorkerMirroredStrategy before anything else of TensorFlow is used",
        ),
        (
            r"compiled using NumPy 1\.x cannot be run in|multiarray failed to import|numpy\.dtype size changed",
            "version-mismatch",
            "this TensorFlow (or another module) was built for another NumPy: install `numpy<2`, or newer builds",
        ),
        (
            r"Descriptors cannot be created directly",
            "version-mismatch",
            "protobuf is too new for this TensorFlow: install the version that TensorFlow asks for",
        ),
        (
            r"Loaded runtime CuDNN library: \S+ but source was compiled with",
            "version-mismatch",
            "cuDNN is older than TensorFlow wants it: `pip install 'tensorflow[and-cuda]'` brings its own",
        ),
        (
            r"CUDA driver version is insufficient for CUDA runtime version",
            "version-mismatch",
            "the node's NVIDIA driver is too old for this CUDA: update the driver",
        ),
        (
            r"no kernel image is available for execution on the device|cudaErrorNoKernelImageForDevice",
            "version-mismatch",
            "this TensorFlow was not built for this GPU: use a build that is",
        ),
        (
            r"undefined symbol: |GLIBC(?:XX)?_[\d.]+' not found",
            "version-mismatch",
            "libraries of different builds meet: install TensorFlow and what extends it anew, of versions that fit",
        ),
        (
            r"was compiled to use \S+ instructions, but these aren't available",
            "version-mismatch",
            "this TensorFlow was built for a newer processor than this node's: use another build",
        ),
        (
            r"Keras 3 only supports V3 `\.keras` files",
            "version-mismatch",
            "the file was saved by Keras 2: load it with tf_keras (TF_USE_LEGACY_KERAS=1), or save it anew",
        ),
        (
            r"ResourceExhaustedError|OOM when allocating tensor|^MemoryError",
            "out-of-memory",
            "lower the batch size, or use a device with more memory",
        ),
    )
)
"""Looked for in this order."""


def find_cause(gang: Gang, tails: Mapping[TaskId, Sequence[str]]) -> Cause | None:
    """The failure that all others follow from, if a training task failed.

    Args:
        gang: the last state of the attempt.
        tails: the last lines of the logs of tasks that failed.
    """
    failures = [e for e in gang.exits.values() if gang.fails(e) and not was_stopped(gang, e)]
    if not failures:
        return None
    first = min(failures, key=lambda e: (is_collateral(e, tails), failure_time(e), e.task))
    if not is_collateral(first, tails):
        return classify(first, tails.get(first.task, ()))
    early = ended_before(gang, first)
    if early:
        return Cause(
            min(early, key=lambda e: (ended_time(e), e.task)),
            "ended-early",
            "before the others had finished",
            "a worker that ends before the others makes them fail: all have to take the same number of steps",
        )
    halted = [h for h in gang.halted.values() if h.task in gang.rules.trainers and h.time < failure_time(first)]
    if halted:
        halt = min(halted, key=lambda h: (h.time, h.task))
        exited = TaskExited(halt.task, TaskExit(signal=halt.signal), halt.time)
        return Cause(
            exited, "stalled", "and did not go on", "whoever stopped it can let it go on: `kill -CONT` its pid"
        )
    return classify(first, tails.get(first.task, ()))


def was_stopped(gang: Gang, event: TaskExited) -> bool:
    """Whether we ended the task: it was running when we began to stop, and did not fail by itself meanwhile."""
    if event.task not in gang.stopped:
        return False
    if event.crash is not None and event.crash.thread is None:  # what it raised before the stop is its own
        return event.crash.exception == "SystemExit" and event.exit.code == _TERM_STATUS
    return event.exit.code in (0, _TERM_STATUS) or event.exit.signal in _STOP_SIGNALS


def failure_time(event: TaskExited) -> float:
    """When the task failed, in Unix seconds: the raise, if it was one of the main thread's."""
    return event.crash.time if event.crash is not None and event.crash.thread is None else ended_time(event)


def is_collateral(event: TaskExited, tails: Mapping[TaskId, Sequence[str]]) -> bool:
    """Whether the failure shows only that a peer went away."""
    crash = event.crash
    if crash is not None and crash.thread is None:
        return any(
            crash.exception in exceptions and signature in crash.message
            for exceptions, signatures in _COLLATERAL
            for signature in signatures
        )
    # Not Python's word, but that of TensorFlow, which aborts, or of a program that we did not run in our interpreter.
    if event.exit.signal not in (None, signal.SIGABRT) or event.evidence is not None:
        return False
    return any(
        any(name in line for name in _COLLATERAL_NAMES)
        and any(signature in line for signature in COLLATERAL_SIGNATURES)
        for line in tails.get(event.task, ())
    )


def ended_before(gang: Gang, failed: TaskExited) -> list[TaskExited]:
    """The training tasks that had ended well by then."""
    ended = [event for event in gang.exits.values() if not event.failed and event.task in gang.rules.trainers]
    return [event for event in ended if ended_time(event) < failure_time(failed)]


def ended_time(event: TaskExited) -> float:
    """When the task's program came to its end; its interpreter takes longer."""
    return event.time if event.finished is None else event.finished


def _is_preemption(how: TaskExit) -> bool:
    return how.code in _PREEMPTED_STATUSES or how.signal == signal.SIGTERM


def classify(event: TaskExited, tail: Sequence[str]) -> Cause:
    """The class of a task's own failure, whatever became of the others."""
    if event.evidence is not None:
        return Cause(event, event.evidence.reference, event.evidence.message, event.evidence.cure)
    crash = event.crash
    raised = crash is not None and crash.thread is None and crash.exception != "SystemExit"
    if not raised and _is_preemption(event.exit):
        return Cause(event, "preempted")
    texts = [f"{crash.exception}: {crash.message}"] if crash is not None else list(tail)
    for known in _KNOWN:
        if any(known.pattern.search(text) for text in texts):
            return Cause(event, known.reference, cure=known.cure)
    if raised:  # whatever ended its interpreter afterwards: us, mostly
        return Cause(event, "task-failed")
    if event.exit.signal == signal.SIGKILL:
        cure = "SIGKILL from nobody is most often the kernel, out of memory: `dmesg` on that node tells"
        return Cause(event, "task-killed", cure=cure)
    return Cause(event, "task-killed" if event.exit.signal is not None else "task-failed")

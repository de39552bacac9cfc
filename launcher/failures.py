"""The table of failure classes: name, meaning, exit status, and whether restarts follow and count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from launcher.errors import EXIT_INFRASTRUCTURE, EXIT_TASK_FAILED
from worker_entry.protocol.frozen import dataclass

FailureName = Literal[
    "task-failed",
    "task-killed",
    "out-of-memory",
    "port-taken",
    "preempted",
    "ended-early",
    "out-of-step",
    "disk-full",
    "version-mismatch",
    "start-timeout",
    "drain-timeout",
    "stalled",
    "node-lost",
]
"""The classes after which a spec may ask for a restart."""


@dataclass(frozen=True, kw_only=True)
class FailureClass:
    """The meaning of a failure class, and its consequences.

    `restarted`: whether the cluster restarts by default. `counted`: whether such a restart counts against
    `restart.max_restarts`.
    """

    meaning: str
    exit_status: int
    restarted: bool = False
    counted: bool = True


FAILURES: Mapping[FailureName, FailureClass] = {
    "task-failed": FailureClass(
        meaning="a Python exception, or an exit status other than 0; not restarted before the first training step",
        exit_status=EXIT_TASK_FAILED,
        restarted=True,
    ),
    "task-killed": FailureClass(
        meaning="a signal from an unknown sender", exit_status=EXIT_TASK_FAILED, restarted=True
    ),
    "out-of-memory": FailureClass(
        meaning="the kernel's OOM killer ended a task, or a device has no memory left",
        exit_status=EXIT_TASK_FAILED,
        restarted=True,
    ),
    "port-taken": FailureClass(
        meaning="another process has a port of the cluster",
        exit_status=EXIT_INFRASTRUCTURE,
        restarted=True,
        counted=False,
    ),
    "preempted": FailureClass(
        meaning="Slurm or Kubernetes took a node; SIGTERM from elsewhere; exit status 143, or 42 if all workers saved",
        exit_status=EXIT_TASK_FAILED,
        restarted=True,
        counted=False,
    ),
    "ended-early": FailureClass(
        meaning="a worker ended with status 0 before its peers, whose next step fails", exit_status=EXIT_TASK_FAILED
    ),
    "out-of-step": FailureClass(
        meaning="the workers make different calls, or have different numbers of batches", exit_status=EXIT_TASK_FAILED
    ),
    "disk-full": FailureClass(meaning="a node's disk is full", exit_status=EXIT_INFRASTRUCTURE),
    "version-mismatch": FailureClass(
        meaning="installed versions do not fit together; the hint says which", exit_status=EXIT_TASK_FAILED
    ),
    "start-timeout": FailureClass(
        meaning="the cluster did not form within timeouts.start_s", exit_status=EXIT_INFRASTRUCTURE, restarted=True
    ),
    "drain-timeout": FailureClass(
        meaning="the last programs did not end within timeouts.drain_s after the first",
        exit_status=EXIT_INFRASTRUCTURE,
        restarted=True,
    ),
    "stalled": FailureClass(
        meaning="no step for too long, or a signal stopped a worker", exit_status=EXIT_INFRASTRUCTURE, restarted=True
    ),
    "node-lost": FailureClass(
        meaning="a node did not answer within its lease; restarted on a spare node, or once the node is back",
        exit_status=EXIT_INFRASTRUCTURE,
        restarted=True,
    ),
}
RESTARTED: tuple[FailureName, ...] = tuple(name for name, failure in FAILURES.items() if failure.restarted)
"""The classes after which the cluster restarts by default."""

USER_ERRORS: Mapping[str, str] = {
    "no-program": "the program is not on the node",
    "no-working-directory": "the working directory is not on the node",
    "syntax-error": "Python cannot parse the program",
    "not-executable": "the program is not executable",
    "no-tensorflow": "the node's Python has no TensorFlow",
    "no-jax": "the node's Python lacks JAX or Keras",
    "no-isolation": "the system gives the tasks no network of their own",
}
"""Reasons why a node refuses its tasks that only the user can correct: exit status 2."""


def find_exit_status(reference: str) -> int:
    """distlaunch's exit status for a failed attempt whose verdict has this reference."""
    failure = _find_failure(reference)
    return failure.exit_status if failure is not None else EXIT_INFRASTRUCTURE


def is_counted(reference: str) -> bool:
    """Whether a restart after such a failure counts."""
    failure = _find_failure(reference)
    return failure is None or failure.counted


def _find_failure(reference: str) -> FailureClass | None:
    """The class of a verdict's reference; None if the reference is not a class."""
    return next((failure for name, failure in FAILURES.items() if name == reference), None)


def render_failures() -> str:
    """Every class with its meaning, for the JSON Schema."""
    return "; ".join(f"`{name}`: {failure.meaning}" for name, failure in FAILURES.items())

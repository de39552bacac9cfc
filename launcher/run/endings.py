"""How an attempt ended, as the restart rule sees it."""

from __future__ import annotations

from launcher.gang.restarts import Ending
from launcher.report.run_report import Attempt


def make_ending(attempt: Attempt, *, saved: bool) -> Ending:
    """Returns the attempt's end for the restart rule; `saved`: whether the attempt saved a checkpoint."""
    reference = attempt.verdict.reference
    if reference == "node-unreachable" and attempt.number > 1:  # an earlier attempt reached the node
        reference = "node-lost"
    return Ending(reference, attempt.started, attempt.ended, _trained(attempt), saved, _step(attempt))


def _trained(attempt: Attempt) -> bool:
    """Whether training had begun, as far as is known."""
    progresses = [status.progress for status in attempt.state.status.values() if status.progress is not None]
    if progresses:
        return any(progress.first_step is not None for progress in progresses)
    # A program that reports no steps may train once the cluster is up; a command may train at any time.
    is_command = all(task.program.kind == "command" for task in attempt.plan.tasks)
    return is_command or attempt.state.policy.forming <= attempt.state.listening.keys()


def _step(attempt: Attempt) -> int:
    """The last step that is known to be done."""
    progresses = [status.progress for status in attempt.state.status.values() if status.progress is not None]
    return max(((progress.resumed or 0) + progress.step for progress in progresses), default=0)

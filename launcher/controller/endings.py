"""How an attempt ended, as the restart rule sees it."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.gang.restarts import Ending, price
from launcher.gang.state import Reason
from launcher.report.run_report import Attempt


def make_ending(attempt: Attempt, earlier: Sequence[Ending], *, saved: bool) -> Ending:
    """Returns the attempt's end for the restart rule.

    Args:
        attempt: the attempt.
        earlier: the ends of the attempts before it.
        saved: whether it saved a checkpoint.
    """
    reference = attempt.verdict.reference
    if reference == "node-unreachable" and attempt.number > 1:  # an earlier attempt reached the node
        reference = "node-lost"
    ending = Ending(reference, attempt.started, attempt.ended, _trained(attempt), saved, _step(attempt))
    announced = attempt.state.announced
    return price(
        ending,
        earlier,
        is_confirmed=announced is not None and announced.reference == reference,
        is_guess=reference == "port-taken" and attempt.state.reason is not Reason.REFUSED,
    )


def _trained(attempt: Attempt) -> bool:
    """Whether training had begun, as far as is known."""
    progresses = attempt.state.progresses
    if progresses:
        return any(progress.first_step is not None for progress in progresses)
    # A program that reports no steps may train once the cluster is up; a command may train at any time.
    is_command = all(task.program.kind == "command" for task in attempt.plan.tasks)
    return is_command or attempt.state.policy.forming <= attempt.state.listening.keys()


def _step(attempt: Attempt) -> int:
    """The last step that is known to be done."""
    return max(((progress.resumed or 0) + progress.step for progress in attempt.state.progresses), default=0)

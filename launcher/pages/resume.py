"""The curves of a test whether a program resumes exactly: the losses of each interrupted run, and of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.pages.charts import Chart
from launcher.pages.series import Series, make_series
from launcher.proof.models import FaultResult, Point, ResumeProof
from launcher.wording import count_of
from worker_entry.protocol.frozen import replace

STEP_MARKS: Mapping[str, str] = {
    "fault": "last step before the restart",
    "resume": "last step in the checkpoint",
    "difference": "first step that differs",
}
"""The vertical lines of the charts, and what they show."""


def make_loss_charts(proof: ResumeProof) -> list[Chart]:
    """One chart for each fault; none for a run without a loss after its restart."""
    whole = replace(_make_curve("without a fault", proof.losses), wide=True)
    charts = [
        Chart(
            key=f"fault-{number}",
            title=f"Fault {result.name}",
            unit="",
            series=[whole, _make_curve("after the fault", result.losses)],
            about=_describe(result),
            marks=_make_marks(result),
        )
        for number, result in enumerate(proof.results, 1)
    ]
    return [chart for chart in charts if all(each.values for each in chart.series)]


def find_last_step(proof: ResumeProof) -> int:
    """The last step of all runs; at least 1."""
    points = [proof.losses, *(result.losses for result in proof.results)]
    return max([proof.steps, 1, *(point.step for each in points for point in each)])


def _make_curve(label: str, points: Sequence[Point]) -> Series:
    return make_series(label, [[(point.step, point.loss) for point in points]])


def _make_marks(result: FaultResult) -> list[tuple[str, float]]:
    marks: list[tuple[str, float]] = []
    if result.resumed_after is not None:
        marks = [("fault", result.resumed_after + result.repeated), ("resume", result.resumed_after)]
    if result.first_difference is not None:
        marks.append(("difference", result.first_difference))
    return marks


def _describe(result: FaultResult) -> str:
    if result.resumed_after is None:
        return ""
    went = f"went on after step {result.resumed_after:,}" if result.resumed_after else "began again at step 1"
    again = f"; {count_of(result.repeated, 'step')} repeated" if result.repeated else ""
    return f"After step {result.resumed_after + result.repeated:,} the run was restarted, and training {went}{again}."

"""The table of the documents, which the benchmark writes itself."""

from __future__ import annotations

from tests.benchmarks.verdicts.score import Total

HEADING = "| launcher | faults | task right | cause right | class right | until said | until gone | processes left |"


def render_row(title: str, total: Total) -> str:
    shares = (f"{100 * right / total.faults:.0f} %" for right in (total.task, total.cause, total.reference))
    times = (f"{value:.1f} s" if value is not None else "never" for value in (total.said_s, total.gone_s))
    return f"| {' | '.join([title, str(total.faults), *shares, *times, str(total.left)])} |"

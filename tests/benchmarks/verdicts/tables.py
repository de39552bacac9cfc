"""The table of the documents, which the benchmark writes itself."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.verdicts.score import Total
from tests.harness.places import ROOT

PAGE = ROOT / "tests" / "README.md"
HEADING = "| launcher | faults | task right | cause right | class right | until said | until gone | processes left |"


def render_row(title: str, total: Total) -> str:
    shares = (f"{100 * right / total.faults:.0f} %" for right in (total.task, total.cause, total.reference))
    times = (f"{value:.1f} s" if value is not None else "never" for value in (total.said_s, total.gone_s))
    return f"| {' | '.join([title, str(total.faults), *shares, *times, str(total.left)])} |"


def put_row(page: str, row: str) -> str:
    """The page with this row in the table, in place of the row of the same launcher, or else as the last row."""
    before, heading, rest = page.partition(f"{HEADING}\n")
    if not heading:
        raise ValueError(f"the page has no table with the heading {HEADING}")
    lines = rest.split("\n")
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    name = row.split("|")[1]
    rows = [row if line.split("|")[1] == name else line for line in lines[:end]]
    return before + heading + "\n".join([*rows, *([] if row in rows else [row]), *lines[end:]])


def write_row(row: str, page: Path = PAGE) -> None:
    page.write_text(put_row(page.read_text(), row))

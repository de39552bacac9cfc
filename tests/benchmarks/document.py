"""The tables of tests/README.md that the benchmarks write."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness.places import ROOT

PAGE = ROOT / "tests" / "README.md"


def split_at_rows(page: str, heading: str) -> tuple[str, list[str], str]:
    """The page up to the rows of the table with this heading, the rows, and the rest; ValueError without the table."""
    found = re.search(rf"^{re.escape(heading)}\n[|-]+\n((?:\|.*\n)*)", page, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"the page has no table with the heading {heading}")
    return page[: found.start(1)], found[1].splitlines(), page[found.end(1) :]


def put_row(page: str, heading: str, row: str) -> str:
    """The page with this row in the table, in place of the row with the same first cell, or else as the last row."""
    before, rows, after = split_at_rows(page, heading)
    titles = [line.split("|")[1] for line in rows]
    title = row.split("|")[1]
    if title in titles:
        rows[titles.index(title)] = row
    else:
        rows.append(row)
    return before + "".join(f"{line}\n" for line in rows) + after


def write_row(heading: str, row: str, page: Path = PAGE) -> None:
    page.write_text(put_row(page.read_text(), heading, row))

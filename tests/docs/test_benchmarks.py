"""tests/README.md names the benchmarks, and has the rows that they write; they change nothing else there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.document import PAGE, put_row, split_at_rows, write_row
from tests.benchmarks.pairs import HEADING, Pair, Row
from tests.harness.documents import code, read, rows, section

ROW = Row("start, 2 workers", "`python train.py &` twice")
TEXT = f"""text
| | named | reason |
|---|---|---|
| b | nobody | |

{HEADING}
|---|---|---|---|
| a | 1.00 s | rival: 2.00 s | 0.50 |
| b | 3.00 s | rival: 4.00 s | 0.75 |

more
"""


def test_every_benchmark_is_documented() -> None:
    table = rows(section(PAGE, "benchmarks"))
    assert {code(cells[0])[0] for cells in table} == BENCHMARKS.keys()


def test_every_row_of_the_table_of_costs_is_one_that_a_benchmark_writes() -> None:
    known = []
    for measure in BENCHMARKS.values():
        for value in vars(sys.modules[measure.__module__]).values():
            values = value.values() if isinstance(value, dict) else [value]
            known += [(row.title, row.rival) for row in values if isinstance(row, Row)]
    shown = []
    for line in split_at_rows(read(PAGE), HEADING)[1]:
        title, _, rival, _ = (cell.strip() for cell in line.strip("|").split("|"))
        shown.append((title, rival.rpartition(": ")[0]))
    assert sorted(shown) == sorted(known)


def test_a_pair_shows_medians_spread_and_the_medians_of_ratios_and_differences() -> None:
    pair = Pair("2 workers", [1.0, 2.0, 6.0], [2.0, 5.0, 6.0])
    assert pair.render() == (
        "  2 workers                   2.000 (1.000 to 6.000) s   rival    5.000 (2.000 to 6.000) s   "
        "ratio 0.500   difference -1.00 s"
    )


def test_a_row_has_both_medians_with_their_unit_and_the_ratio() -> None:
    pair = Pair("2 workers", [1.0, 1.849, 6.0], [2.0, 2.9, 6.0], row=ROW)
    assert pair.render_row() == "| start, 2 workers | 1.85 s | `python train.py &` twice: 2.90 s | 0.64 |"
    assert Pair("2 workers", [1.0], [2.0]).render_row() is None


@pytest.mark.parametrize(
    ("ours", "rival", "cells"),
    [
        (0.0521, 0.036, ["0.0521 MB/s", "rival: 0.0360 MB/s", "1.45"]),
        (10.44, 99.96, ["10.4 MB/s", "rival: 100 MB/s", "0.10"]),
        (1386.4, 4218.0, ["1,386 MB/s", "rival: 4,218 MB/s", "0.33"]),
        (10.08, 10.0, ["10.1 MB/s", "rival: 10.0 MB/s", "1.008"]),
    ],
)
def test_a_row_has_three_digits_and_shows_a_difference_of_a_thousandth(
    ours: float, rival: float, cells: list[str]
) -> None:
    row = Pair("", [ours], [rival], "MB/s", Row("a", "rival")).render_row()
    assert row == f"| a | {' | '.join(cells)} |"


def test_a_row_replaces_the_one_with_the_same_first_cell_in_its_own_table_only() -> None:
    row = "| b | 5.00 s | rival: 4.00 s | 1.25 |"
    assert put_row(TEXT, HEADING, row) == TEXT.replace("| b | 3.00 s | rival: 4.00 s | 0.75 |", row)


def test_a_new_row_is_appended_to_its_table() -> None:
    row = "| c | 5.00 s | rival: 4.00 s | 1.25 |"
    assert put_row(TEXT, HEADING, row) == TEXT.replace("0.75 |\n", f"0.75 |\n{row}\n")


def test_a_page_without_the_table_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("text\n")
    with pytest.raises(ValueError, match="no table"):
        write_row(HEADING, "| a | 1 |", page)
    assert page.read_text() == "text\n"

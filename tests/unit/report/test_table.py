"""Tables fit into any width, and leave out whole columns, the least needed first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.table import Column, render_table

COLUMNS = (Column("NAME", 100, least=6), Column("STATE", 90), Column("NOTE", 20), Column("AGE", 70))
ROWS = [["a-long-name", "running", "x", "3 s"], ["b", "failed", "-", "12 min"]]


@pytest.mark.parametrize(
    ("room", "lines"),
    [
        (
            None,
            [
                "NAME         STATE    NOTE  AGE",
                "a-long-name  running  x     3 s",
                "b            failed   -     12 min",
            ],
        ),
        (33, ["NAME         STATE    AGE", "a-long-name  running  3 s", "b            failed   12 min"]),
        (24, ["NAME     STATE    AGE", "a-long…  running  3 s", "b        failed   12 min"]),
        (20, ["NAME         STATE", "a-long-name  running", "b            failed"]),
        (10, ["NAME", "a-long-na…", "b"]),
        (1, ["…", "…", "b"]),
    ],
)
def test_a_table_drops_and_shortens_columns_to_fit_the_width(room: int | None, lines: list[str]) -> None:
    assert render_table(COLUMNS, ROWS, room) == lines


def test_a_table_drops_columns_without_values_first() -> None:
    rows = [["a", "-", "x", "3 s"]]
    assert render_table(COLUMNS, rows, 14)[0].split() == ["NAME", "AGE"]
    assert render_table(COLUMNS, rows, 16)[0].split() == ["NAME", "NOTE", "AGE"]


def test_a_table_without_rows_shows_its_titles() -> None:
    assert render_table(COLUMNS, [], 12) == ["NAME  STATE"]


@given(
    st.lists(st.tuples(*[st.text(st.characters(min_codepoint=32), max_size=20)] * 4), max_size=4), st.integers(1, 60)
)
def test_no_table_line_is_wider_than_the_given_width(rows: list[tuple[str, ...]], room: int) -> None:
    narrow = [[cell.encode("ascii", "replace").decode() for cell in row] for row in rows]
    lines = render_table(COLUMNS, narrow, room)
    assert len(lines) == len(rows) + 1
    assert max(map(len, lines)) <= room


def test_wide_characters_count_as_two_columns_in_a_table() -> None:
    assert render_table((Column("RUN", 1),), [["分布式训练"]], 7) == ["RUN", "分布式…"]

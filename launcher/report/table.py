"""Tables of text that fit into the width of a terminal: columns without room are left out whole. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

from worker_entry.protocol.frozen import dataclass

GAP = "  "
SPARE = 50
"""Columns with a lower `keep` are left out before another column becomes narrower."""
EMPTY = "-"
"""A cell without a value; columns of nothing else are the first to be left out."""


@dataclass(frozen=True)
class Column:
    """A column of text.

    `keep`: if there is no room for all columns, those with the lowest `keep` are left out. `least`: how narrow the
    column may become if leaving out those below SPARE is not enough; 0: no narrower than its widest cell.
    """

    title: str
    keep: int
    least: int = 0


def render_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int | None = None) -> list[str]:
    """The lines of a table with a line of titles; `room`: the width of the terminal, None for a pipe."""
    # Not rich's tables: with 500 runs, they take ten times as long as the rest of `distlaunch ls`.
    cells = [[column.title for column in columns], *rows]
    widths = {place: max(_width(row[place]) for row in cells) for place in range(len(columns))}
    if room is not None:
        widths = fit_columns(
            widths,
            keep={
                place: -1 if rows and all(row[place] == EMPTY for row in rows) else column.keep
                for place, column in enumerate(columns)
            },
            least={place: column.least for place, column in enumerate(columns) if column.least},
            room=room,
            gap=len(GAP),
        )
    return [GAP.join(_fit(row[place], width) for place, width in widths.items()).rstrip() for row in cells]


def fit_columns(
    widths: Mapping[int, int], *, keep: Mapping[int, int], least: Mapping[int, int], room: int, gap: int
) -> dict[int, int]:
    """The columns that fit, in their order, with their widths; at least one.

    Args:
        widths: the width that each column needs.
        keep: the importance of each column.
        least: the least width of each column that may be narrower.
        room: the width of the table.
        gap: the width between two columns.
    """
    used = dict(widths)

    def left() -> int:
        return room - sum(used.values()) - gap * (len(used) - 1)

    while left() < 0 and len(used) > 1 and min(keep[place] for place in used) < SPARE:
        del used[min(used, key=lambda place: keep[place])]
    if left() < 0:
        used = {place: min(width, least.get(place, width)) for place, width in used.items()}
    while left() < 0 and len(used) > 1:
        del used[min(used, key=lambda place: keep[place])]
    for place in used:
        used[place] += max(min(left(), widths[place] - used[place]), 0)
    return {place: min(width, room) for place, width in used.items()}


def _fit(text: str, width: int) -> str:
    spare = width - _width(text)
    if spare >= 0:
        return text + " " * spare
    shown = ""
    for char in text:
        if _width(shown + char) > width - 1:
            break
        shown += char
    return f"{shown}…" + " " * (width - 1 - _width(shown))


def _width(text: str) -> int:
    """Columns on a terminal."""
    return len(text) if text.isascii() else sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)

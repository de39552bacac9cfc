"""Renders styled lines as text, one terminal row each."""

from __future__ import annotations

from functools import lru_cache

from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

TAB = 8


def paint(line: Text, columns: int, *, colour: bool) -> str:
    """The line, cut to the width of the terminal; without any style unless `colour`."""
    line = line.copy()
    line.stylize_before(line.style)
    line.expand_tabs(TAB)
    line.truncate(columns, overflow="ellipsis")
    if not colour:
        return line.plain
    return "".join(
        # Colours come from the program or are one of our 16, so the terminal shows no others than in log lines.
        segment.style.render(segment.text, color_system=ColorSystem.TRUECOLOR) if segment.style else segment.text
        for segment in line.render(_console(), end="")
    )


def parse_line(line: bytes) -> Text:
    """A line of a program, with colours and no other control characters."""
    return Text.from_ansi(line.decode("utf-8", "replace").replace("\n", " "))


def paint_plain(line: str, columns: int) -> str:
    """The line without style, cut to the width of the terminal."""
    return paint(Text(line), columns, colour=False)


@lru_cache(1)
def _console() -> Console:
    return Console(width=80, color_system=None)

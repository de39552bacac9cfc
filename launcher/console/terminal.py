"""Where the console's thread writes: a pipe, or a terminal with live lines at its bottom."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.live import Live


class Sink(Protocol):
    """Takes text; raises OSError when the reader has gone."""

    has_live_lines: bool

    def write(self, text: bytes) -> None:
        """Writes whole lines of task output."""

    def note(self, text: str) -> None:
        """Writes a message of our own."""

    def show_live(self, lines: Sequence[str]) -> None:
        """Shows lines that are rewritten in place, below everything else."""

    def close(self) -> None:
        """Restores the terminal."""


class NowhereSink:
    """Drops everything: the reader of our output has gone."""

    has_live_lines = False

    def write(self, text: bytes) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def show_live(self, lines: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass


class PlainSink(NowhereSink):
    """Pipes and files; also a terminal that is only one of stdout and stderr."""

    def __init__(self, stdout: IO[bytes], stderr: IO[str]) -> None:
        self._stdout = stdout
        self._stderr = stderr

    def write(self, text: bytes) -> None:
        rest = memoryview(text)
        while rest:
            written = self._stdout.write(rest)
            if written is None:  # another program made the pipe or terminal non-blocking
                select.select([], [self._stdout], [])
            else:
                rest = rest[written:]
        self._stdout.flush()

    def note(self, text: str) -> None:
        self._stderr.write(f"{text}\n")
        self._stderr.flush()


class TerminalSink(PlainSink):
    """stdout and stderr are one terminal: live lines are erased before anything else is written."""

    has_live_lines = True

    def __init__(self, stdout: IO[bytes], stderr: IO[str]) -> None:
        # Imported here: a pipe needs no rich.
        from rich.console import Console

        super().__init__(stdout, stderr)
        self._console = Console(file=stderr)
        self._live: Live | None = None
        self._lines: list[str] = []

    def write(self, text: bytes) -> None:
        self._erase()
        super().write(text)

    def note(self, text: str) -> None:
        self._erase()
        super().note(text)

    def show_live(self, lines: Sequence[str]) -> None:
        from rich.live import Live
        from rich.text import Text

        if not lines:
            self._erase()
            return
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        elif self._lines == lines:
            return
        self._lines = list(lines)
        text = Text("\n", no_wrap=True, overflow="ellipsis").join(Text.from_ansi(line) for line in lines)
        self._live.update(text, refresh=True)

    def close(self) -> None:
        self._erase()

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def render_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows in columns as wide as they need to be, without colour."""
    import io

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False, header_style=None)
    for row in rows:
        table.add_row(*map(Text, row))
    written = io.StringIO()
    Console(file=written, width=10_000, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in written.getvalue().rstrip().splitlines())

"""From a task's raw log bytes, in pieces of any size, to the lines that a console shows. Pure."""

from __future__ import annotations

import re

LINE_LIMIT = 8192
"""Bytes of one line on the console; the log has all of it."""
PARTIAL_LIMIT = 256 << 10
"""Bytes of an unfinished line that are kept; a longer line is shown cut before it ends."""

_CHATTER = re.compile(
    rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IW] "  # TensorFlow's own C++ log: information and warnings
    rb"|[IW]\d{4} \d\d:\d\d:\d+\.\d+ "  # absl's C++ log: the same
    # Errors that a machine without GPUs, or with them, reports at each start.
    rb"|(?:E\d{4} \d\d:\d\d:\d+\.\d+|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: E) .*"
    rb"(?:Unable to register cu|failed call to cuInit|CUDA_ERROR_NO_DEVICE)"
    rb"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|To enable the following instructions: .*rebuild TensorFlow"
    rb"|/job:\w+/replica:\d+/task:\d+$"  # who is still missing, below "Waiting for 1/2 tasks to connect"
)
"""What TensorFlow says at every start whatever happens. Errors are not among it, but for the known false ones."""

_CONTROL = re.compile(
    rb"(\x1b\[[0-9;]*m)"  # colour
    rb"|\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.|[\x00-\x08\x0b-\x1f\x7f]"
)
"""Control sequences; all but colours would move the cursor into other tasks' lines."""


class LogLines:
    """The lines of one log. `keep_colours`: colours pass through; `fold`: TensorFlow's chatter is left out."""

    def __init__(self, *, keep_colours: bool = False, fold: bool = True) -> None:
        self.folded = 0
        """Lines left out so far."""
        self._keep_colours = keep_colours
        self._fold = fold
        self._partial = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that the data completes, as they are to be shown."""
        lines = (self._partial + data).split(b"\n")
        self._partial = lines.pop()
        if self._skipping:
            if not lines:
                self._partial = b""
                return []
            del lines[0]
            self._skipping = False
        shown = [text for line in lines if (text := self._finished(line)) is not None]
        # Of a line that is rewritten in place, only what it shows now counts.
        self._partial = self._partial[self._partial.rfind(b"\r", 0, -1) + 1 :]
        if len(self._partial) > PARTIAL_LIMIT:
            shown.append(self._clean(self._partial))
            self._partial, self._skipping = b"", True
        return shown

    def close(self) -> list[bytes]:
        """The last line, if the log does not end with a line break."""
        rest, self._partial = self._partial, b""
        line = self._finished(rest) if rest else None
        return [] if line is None else [line]

    @property
    def unfinished(self) -> bytes:
        """What the line that has not ended shows now; empty if there is none."""
        return self._clean(_last_rewrite(self._partial))

    def _finished(self, line: bytes) -> bytes | None:
        if self._fold and _CHATTER.match(line):
            self.folded += 1
            return None
        return self._clean(_last_rewrite(line))

    def _clean(self, line: bytes) -> bytes:
        if len(line) > LINE_LIMIT:
            line = line[:LINE_LIMIT] + b"... (cut here; the log has all of it)"
        text = line.decode("utf-8", "replace")
        if text.isprintable():
            return line if line.isascii() else text.encode()
        coloured = self._keep_colours and b"\x1b[" in line
        clean = _CONTROL.sub(lambda match: match[1] or b"" if self._keep_colours else b"", line)
        return clean.decode("utf-8", "replace").encode() + (b"\x1b[0m" if coloured else b"")


def _last_rewrite(line: bytes) -> bytes:
    """What a line shows after its carriage returns and backspaces: the last piece that is not blank."""
    if b"\r" not in line and b"\b" not in line:
        return line
    pieces = [piece for piece in re.split(rb"[\r\b]+", line) if piece.strip()]
    return pieces[-1] if pieces else b""

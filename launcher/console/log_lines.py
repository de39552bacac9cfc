"""Turns a task's raw log bytes, in pieces of any size, into the lines that the console shows. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from launcher.printable import UNSEEN, stand_in

LINE_LIMIT = 8192
"""Bytes of one line on the console; the log has the whole line."""
PARTIAL_LIMIT = 256 << 10
"""Bytes of an unfinished line that are kept; a longer line is shown cut before it ends."""

_CHATTER = re.compile(
    # TensorFlow's C++ log and absl's: information and warnings, except those that report a problem.
    rb"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IW]|[IW]\d{4} \d\d:\d\d:\d+\.\d+ +\d+) SOURCE(?!TROUBLE)"
    # Errors that machines with and without GPUs log at each start. Errors about machine features that are only
    # settings of the compiler that made a cached program. Errors about a peer that is gone, for example because it
    # ended: a program that still needs the peer gets an exception with the same message.
    rb"|(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: E|E\d{4} \d\d:\d\d:\d+\.\d+ +\d+) SOURCE"
    rb"(?:Unable to register cu|Loading XLA:CPU AOT result\. Target machine feature \+prefer-no-"
    rb"|failed call to cuInit: .*(?:\(303\)|CUDA_ERROR_NO_DEVICE)"
    rb"|(?:BaseCollectiveExecutor|Aborting \w+ with|Coordination agent is set to error).*?"
    rb"\b(?:UNAVAILABLE|CANCELLED|ABORTED): )"
    # Which Keras functions were patched or not; distlaunch itself reports this, once.
    rb"|distlaunch: (?:patched Keras |Keras \S+ (?:needs no patch|no longer has the faults|has changed this code))"
    rb"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$".replace(
        # Python programs that log through absl name a .py file here.
        b"SOURCE",
        rb"[\w./+-]+\.(?:cc|cpp|cu|h|hpp):\d+\] ",
    ).replace(
        b"TROUBLE",
        rb".*(?:ran out of memory|[Oo]ut of memory|No space left|Cannot dlopen some GPU libraries)",
    )
)
"""Messages that TensorFlow logs at every start. No errors, except known false ones."""
_CONTINUED = re.compile(
    rb"To enable the following instructions: .*rebuild TensorFlow"
    rb"|/job:\w+/replica:\d+/task:\d+$"  # the missing tasks, below "Waiting for 1/2 tasks to connect"
    rb"|The tasks have crashed\. Check the task logs "
    rb"|Additional GRPC error information from remote target |:UNKNOWN:Error received from peer "
    rb"|The error could be from a previous operation\. Restart your program to reset\."
    rb"|\t \[\[\{\{(?:function_)?node "
)
"""Continuation lines of such messages: chatter only below chatter."""
_CONFIGURATION = re.compile(rb' *(?:[a-z_]+(?: \{|: (?:"[^"]*"|[\w.+-]+))|\})$|$')
"""Lines of a message that dumps a configuration: chatter only below the line that begins the dump."""
_BEGINS_CONFIGURATION = b"goo.gle/debug"  # then proto, str or only: protocol buffers vary it
_SOURCES = (b".cc:", b".cpp:", b".cu:", b".h:", b".hpp:")
_HINTS = (b"absl::InitializeLog", b"distlaunch: ")
"""Every line of chatter contains one of these, or a source and `] `, except continuation lines."""
_PLAIN = bytes(range(0x20, 0x7F)) + b"\n\t"
"""Bytes that are shown unchanged; most text contains nothing else."""

_CONTROL = re.compile(
    r"(\x1b\[[0-9;:]{0,64}m)"  # colour
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # a window's title, for example
    r"|\x1b[ -/]*[0-~]"
    rf"|[\x00-\x08\x0b-\x1f{UNSEEN}]"
)
"""Control sequences. All except colours could move the cursor into other tasks' lines, or do worse. Matched in text,
because a replacement in bytes could join its neighbours into a new sequence."""


_TRACEBACK = b"Traceback (most recent call last):"
_CHAIN = (b"During handling of the above exception", b"The above exception was the direct cause")


class Tracebacks:
    """Selects the task whose tracebacks are shown: the one that prints the first. Those of the others follow from it.

    `clock`: seconds. A traceback that comes KEPT_S after the last is a first one again.
    """

    KEPT_S = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owner: object = None
        self._last = 0.0

    def is_shown(self, log: object) -> bool:
        """Whether a traceback that begins in this log now is shown."""
        now = self._clock()
        if self._owner is None or now - self._last > self.KEPT_S:
            self._owner = log
        self._last = now
        return self._owner is log


class LogLines:
    """The lines of one log.

    `keep_colours`: colours pass through; all other control characters are replaced. `fold`: TensorFlow's chatter is
    left out. `tracebacks`: the choice of tracebacks for all logs; None to show all of them.
    """

    def __init__(self, *, keep_colours: bool = False, fold: bool = True, tracebacks: Tracebacks | None = None) -> None:
        self.folded = 0
        """Lines left out so far."""
        self.folded_traceback = 0
        """Lines of tracebacks among them."""
        self._keep_colours = keep_colours
        self._fold = fold
        self._tracebacks = tracebacks if fold else None
        self._in_traceback = False
        """Whether the lines of a traceback that is left out continue until its exception."""
        self._may_chain = False
        """Whether such an exception may be followed by the traceback of the next one."""
        self._below_chatter = False
        self._continued = _CONTINUED
        """Matches lines that continue the chatter above."""
        self._partial = b""
        self._skipping = False

    def feed(self, data: bytes) -> bytes:
        """The shown form of the lines that the data completes; the size of the pieces does not matter."""
        text = self._partial + data
        end = text.rfind(b"\n") + 1
        lines, self._partial = text[:end], text[end:]
        if self._skipping:
            if not lines:
                self._partial = b""
                return b""
            lines = lines[lines.index(b"\n") + 1 :]
            self._skipping = False
        shown = lines if self._is_plain(lines) else b"".join(map(self._finished, lines.split(b"\n")[:-1]))
        if _too_long(self._partial) is not None:
            shown += self._finished(self._partial)
            self._partial, self._skipping = b"", True
        self._partial = _compact(self._partial)
        return shown

    def close(self) -> bytes:
        """The shown form of the last line, with a line break, if the log ends without a line break."""
        rest, self._partial = self._partial, b""
        return self._finished(rest) if rest else b""

    @property
    def unfinished(self) -> bytes:
        """The shown form of the unfinished line; empty if there is none."""
        return self._clean(_visible(self._partial)) if self._partial else b""

    def _is_plain(self, lines: bytes) -> bool:
        """Whether all lines can be shown unchanged; one check for all, because most text can."""
        if self._fold and (self._below_chatter or _may_have_chatter(lines)):
            return False
        if self._tracebacks is not None and (self._in_traceback or self._may_chain or _TRACEBACK in lines):
            return False
        if _has_long_line(lines):
            return False
        if not lines.translate(None, _PLAIN):
            return True
        try:
            return lines.decode().replace("\n", "").replace("\t", "").isprintable()
        except UnicodeDecodeError:
            return False

    def _finished(self, line: bytes) -> bytes:
        """The shown form of the line, with a line break; empty if the line is left out."""
        shown = _visible(line)
        if self._is_left_out(shown):
            self.folded += 1
            self.folded_traceback += 1
            return b""
        if self._fold:
            begins = _CHATTER.match(shown)
            chatter = begins or (self._below_chatter and self._continued.match(shown))
            if begins:
                self._continued = _CONFIGURATION if _BEGINS_CONFIGURATION in shown else _CONTINUED
            self._below_chatter = bool(chatter)
            if chatter:
                self.folded += 1
                return b""
        return self._clean(shown) + b"\n"

    def _is_left_out(self, line: bytes) -> bool:
        """Whether the line belongs to a traceback that is left out."""
        if self._tracebacks is None:
            return False
        if _TRACEBACK in line:
            self._in_traceback = not self._tracebacks.is_shown(self)
            return self._in_traceback
        if not self._in_traceback:
            self._may_chain = self._may_chain and (not line or line.startswith(_CHAIN))
            return self._may_chain
        if line and not line[:1].isspace():  # the exception
            self._in_traceback, self._may_chain = False, True
            self._below_chatter, self._continued = True, _CONTINUED  # its message may have more lines
        return True

    def _clean(self, line: bytes) -> bytes:
        if len(line) > LINE_LIMIT:
            return self._clean(_cut(line)) + b"... (cut here; the log has the whole line)"
        text = line.decode("utf-8", "replace")
        if text.isprintable():
            return line if line.isascii() else text.encode()
        clean = _CONTROL.sub(self._shown_instead, text)
        return clean.encode() + (b"\x1b[0m" if "\x1b" in clean else b"")

    def _shown_instead(self, match: re.Match[str]) -> str:
        if match[1]:
            return match[1] if self._keep_colours else ""
        return stand_in(match[0][0])


def _may_have_chatter(text: bytes) -> bool:
    """Whether a line of the text can be chatter; the shortest searches decide about most text."""
    if b":" not in text:
        return False
    return any(hint in text for hint in _HINTS) or (b"] " in text and any(source in text for source in _SOURCES))


def _has_long_line(lines: bytes) -> bool:
    """Whether a line is longer than `LINE_LIMIT`; looks at one line break per `LINE_LIMIT` bytes."""
    place = 0
    while len(lines) - place > LINE_LIMIT:
        place = lines.rfind(b"\n", place, place + LINE_LIMIT + 1) + 1
        if not place:
            return True
    return False


def _pieces(line: bytes) -> list[bytes]:
    """The successive contents of a line: carriage returns and backspaces restart it."""
    return re.split(rb"[\r\b]+", line) if b"\r" in line or b"\b" in line else [line]


def _too_long(line: bytes) -> bytes | None:
    """The first piece that is too long to wait for the line's end."""
    if len(line) <= PARTIAL_LIMIT:
        return None
    return next((piece for piece in _pieces(line) if len(piece) > PARTIAL_LIMIT), None)


def _visible(line: bytes) -> bytes:
    """The final content of a line: the last piece that is not blank."""
    long = _too_long(line)
    if long is not None:
        return long[: LINE_LIMIT + 1]
    pieces = _pieces(line)
    if len(pieces) == 1:
        return line
    return next((piece for piece in reversed(pieces) if piece.strip()), b"")


def _compact(partial: bytes) -> bytes:
    """The part of an unfinished line that can still be visible when it ends."""
    *before, last = _pieces(partial)
    if last.strip() or not before:
        return last
    return next((piece for piece in reversed(before) if piece.strip()), b"") + b"\r" + last


def _cut(line: bytes) -> bytes:
    """The beginning of a long line, cut between characters."""
    end = LINE_LIMIT
    while end > LINE_LIMIT - 3 and line[end] & 0xC0 == 0x80:
        end -= 1
    return line[:end]

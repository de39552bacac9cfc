"""Connects through a program of this machine, which runs a command on the node and passes its stdin and stdout."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from launcher import helpers
from launcher.spec.redaction import hide_text
from launcher.transports.base import GoneError, LinkBroken, LinkError
from launcher.transports.connector import Opening
from launcher.transports.payload import Payload
from launcher.transports.streams import await_readable
from worker_entry.protocol.frozen import dataclass

HOST, COMMAND = "{host}", "{command}"
PIPE = 256 << 10
"""Bytes that the pipe of a program's stdout should hold, and that one read takes: with Linux's default of 64 KiB, `ssh`
and we wait for each other four times as often, and logs arrive at 0.8 × the speed."""
WORDS_S, WORDS_TRIES = 0.5, 20
"""How long to wait for another line of a program that has ended, and how often."""
STATUS_S = 15.0
"""How long a program may take to end once its stdout has ended."""
LINE = 4096
"""Bytes of a line on stderr that are kept."""
SAID_LINES = 20
"""Lines of a program's stderr that are kept to show; an error shows only the last one."""


@dataclass(frozen=True)
class ProgramConnector:
    """`words` is the program with its arguments, before `expand`; `address`: see Connector.

    `note`: a message for the user. `environ`: the program's environment, by default ours. `heard` gets each line of
    the program's stderr, and returns whether the user may see it. `gone` matches its error for a machine that no longer
    exists; the group `ended`, for one on which nothing runs. `hides_breaks`: it ends with status 0 even when its
    connection breaks. `hints`: what to do about an error, by a part of its text.
    """

    words: tuple[str, ...]
    host: str
    address: str | None = None
    note: str = ""
    environ: Mapping[str, str] | None = None
    heard: Callable[[str], bool] = lambda _: True
    gone: re.Pattern[str] | None = None
    hides_breaks: bool = False
    hints: tuple[tuple[str, str], ...] = ()

    def open(self, payload: Payload, python: str, opening: Opening) -> ProgramStream:
        words = expand(self.words, self.host, payload)
        opening.begin()
        if self.note:
            opening.note(self.note)
        try:
            process = helpers.start(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self.environ,
                bufsize=0,
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise LinkError(f"{words[0]} cannot be started: {reason}") from None
        name = os.path.basename(words[0])  # noqa: PTH119 - a word, not a path
        stream = ProgramStream(
            process,
            name,
            opening.note,
            self.heard,
            self.gone,
            hides_breaks=self.hides_breaks,
            hints=self.hints,
            archive=payload.archive,
        )
        stream.begin(payload.opening(python))
        return stream


def expand(words: Sequence[str], host: str, payload: Payload) -> list[str]:
    """The words with the node and the payload's command in place of `{host}` and `{command}`.

    A word with `{command}` is for a program that gives it to a shell on the node. Without one, the command follows as
    words of its own, for a program that runs them as they are.
    """
    filled = [word.replace(HOST, host).replace(COMMAND, payload.command) for word in words]
    return filled if any(COMMAND in word for word in words) else [*filled, *payload.words]


class ProgramStream:
    """The running program. `note` gets its stderr before its first output; for the rest, see ProgramConnector."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        name: str,
        note: Callable[[str], None],
        heard: Callable[[str], bool] = lambda _: True,
        gone: re.Pattern[str] | None = None,
        *,
        hides_breaks: bool = False,
        hints: Sequence[tuple[str, str]] = (),
        archive: bytes = b"",
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.archive = archive
        self._process = process
        self._name = name
        self._note = note
        self._hear = heard
        self._gone = gone
        self._hides_breaks = hides_breaks
        self._hints = hints
        self._finished = False
        self._input, self._output = process.stdin, process.stdout
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # this user has too many large pipes
                fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, PIPE)
        self._answered = False
        self._first: threading.Thread | None = None
        self._lines = 0
        """The number of lines on stderr so far."""
        self._said: deque[str] = deque(maxlen=SAID_LINES)
        self._heard = threading.Thread(target=self._listen, name=f"{name}-stderr", daemon=True)
        self._heard.start()

    def read(self, size: int, timeout_s: float) -> bytes:
        if not await_readable(self._output, timeout_s):
            raise LinkBroken(f"no data for {timeout_s:.0f} s{self._last_words}")
        data = os.read(self._output.fileno(), min(size, PIPE))
        while data and not self._answered and self._said:
            self._note(f"{self._name}: {self._said.popleft()}")
        self._answered = self._answered or bool(data)
        # Programs have many reasons to end. Only 0 is certainly the agent's own status; a new connection shows whether
        # the agent continues.
        if not data and (status := self._wait()) != 0:
            words = self._last_words
            if self._gone is not None and (found := self._gone.search(words)):
                raise GoneError(words.removeprefix(": "), proven=found.lastgroup == "ended")
            hint = next((f"; {hint}" for part, hint in self._hints if part in words), "")
            raise LinkBroken(f"{self._name} {_render_status(status)}{words}{hint}")
        if not data and self._hides_breaks and not self._finished:
            raise LinkBroken(f"{self._name} ended{self._last_words}")
        return data

    def begin(self, first: bytes) -> None:
        """Writes in a separate thread: if the program stops reading, its output says why, or the reader gives up."""

        def write() -> None:
            with contextlib.suppress(OSError):  # the program has ended, and its output says why
                self._write(first)

        self._first = threading.Thread(target=write, name=f"{self._name}-stdin", daemon=True)
        self._first.start()

    def write(self, data: bytes) -> None:
        if self._first is not None:
            self._first.join()
        self._write(data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._input.fileno(), view) :]

    def finish(self) -> None:
        self._finished = True
        self._input.close()

    def abandon(self) -> None:
        helpers.kill(self._process)  # also wakes a writer
        self._process.wait()

    def how_ended(self) -> str:
        return "the agent ended"

    def exit_status(self) -> int | None:
        return self._wait()

    @property
    def _last_words(self) -> str:
        """The last line on stderr; waits while lines come, but not for ever: other processes may share the stderr."""
        for _ in range(WORDS_TRIES):
            before = self._lines
            self._heard.join(WORDS_S)
            if not self._heard.is_alive() or self._lines == before:
                break
        return f": {self._said[-1]}" if self._said else ""

    def _wait(self) -> int | None:
        try:
            return self._process.wait(STATUS_S)
        except subprocess.TimeoutExpired:
            return None

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in _read_lines(stream.fileno()):
                self._lines += 1
                if (text := hide_text(line.decode("utf-8", "replace").strip())) and self._hear(text):
                    self._said.append(text)


def _read_lines(descriptor: int) -> Iterator[bytes]:
    """Yields the lines up to the end, each cut to LINE bytes, because the node may send anything."""
    rest = b""
    while data := os.read(descriptor, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        yield from (line[:LINE] for line in lines)
        rest = rest[:LINE]
    yield rest


def _render_status(status: int | None) -> str:
    if status is None:
        return "is still running, but has closed its stdout"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"

"""An agent that a test controls over pipes."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import psutil

import worker_entry
from tests.harness.hosts import loopback
from tests.harness.places import PROGRAMS
from tests.harness.polling import HANG_S, eventually
from tests.harness.rules.second_chance import NoSecondChanceError
from tests.harness.witness import await_none_left, make_mark, marked
from worker_entry.protocol.framing import MARKER, Decoder, encode
from worker_entry.protocol.messages import (
    Log,
    Message,
    Prepared,
    Ready,
    Started,
)
from worker_entry.protocol.orders import VERSION, Beat, Hello, Prepare, Start
from worker_entry.protocol.values import Program, TaskRequest, TaskStart

ENTRY = str(Path(worker_entry.__file__).parent)
FAMILY = str(PROGRAMS / "tree_family.py")
PORTS = (loopback.ports()[0], loopback.ports()[-1])
M = TypeVar("M")


class Client:
    """A minimal controller of one agent: it reads only when told to."""

    def __init__(self, directory: Path, *, python: str = sys.executable, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.cwd = directory.parent
        self.mark = make_mark()
        self.logs: dict[str, bytearray] = {}
        self.logs_may_restart = False
        self._decoder = Decoder()
        self._raw = b""
        self._received: list[Message] = []
        self._errors: str | None = None
        self.process = subprocess.Popen(
            [python, ENTRY, "agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.mark, **(env or {})},
            start_new_session=True,
            umask=0,
        )

    # --- sending ---

    def send(self, *messages: Message) -> None:
        self.send_raw(b"".join(encode(message) for message in messages))

    def beat(self) -> None:
        """Sends a beat with the stamp of the last answer received, as a controller does."""
        stamps = [answer.stamp for answer in self.received(Beat)]
        self.send(Beat(time.time(), 0, stamp=stamps[-1] if stamps else None))

    def send_raw(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def hello(self, *, lease_s: float = 60.0, stream_logs: bool = False, version: int = VERSION) -> Hello:
        return Hello(version, "test-run", str(self.directory), str(self.cwd), lease_s, stream_logs)

    def greet(self, *, lease_s: float = 60.0, stream_logs: bool = False) -> Ready:
        self.send(self.hello(lease_s=lease_s, stream_logs=stream_logs))
        return self.expect(Ready)

    def start(self, *tasks: TaskStart, attempt: int = 1) -> dict[str, int]:
        """Prepares and starts the tasks; returns their pids."""
        self.send(Prepare(attempt, [TaskRequest(task.task, task.program) for task in tasks], *PORTS))
        self.expect(Prepared)
        self.send(Start(attempt, list(tasks)))
        return {started.task: started.pid for started in (self.expect(Started) for _ in tasks)}

    def start_family(self, *members: str) -> dict[str, int]:
        """Starts a `tree_family.py`; returns its own pid and those of its members once all are started."""
        pids = self.start(command("worker:0", sys.executable, FAMILY, *members))
        log = self.directory / "attempt-1" / "worker-0.log"

        def standing() -> list[str]:
            lines = log.read_text().splitlines()
            assert lines[-1:] == ["stands"]
            return lines[:-1]

        found = {name: int(pid) for name, _, pid in (line.partition(" ") for line in eventually(standing))}
        return {"leader": pids["worker:0"], **found}

    # --- receiving ---

    def expect(self, kind: type[M], timeout_s: float = HANG_S) -> M:
        """Returns the next message of this type; collects log bytes, and keeps other messages for later."""
        deadline = time.monotonic() + timeout_s
        while True:
            for position, message in enumerate(self._received):
                if isinstance(message, kind):
                    del self._received[position]
                    return message
            assert self.receive(deadline - time.monotonic()), f"no {kind.__name__}: the stream has ended"

    def expect_marker(self) -> None:
        """Waits until the agent is up; before it is greeted, it sends only the marker."""
        while len(self._raw) < len(MARKER):
            assert self.receive(HANG_S)

    def received(self, kind: type[M]) -> list[M]:
        """The messages of this type that were received but not yet taken."""
        return [message for message in self._received if isinstance(message, kind)]

    def in_order(self) -> list[Message]:
        """All messages that were received but not yet taken."""
        return [*self._received]

    def receive(self, timeout_s: float) -> bool:
        """Reads once; returns False at the end of the stream."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        assert select.select([descriptor], [], [], max(timeout_s, 0.0))[0], "nothing was received in time"
        data = os.read(descriptor, 1 << 16)
        ended = not data
        if len(self._raw) < len(MARKER):  # the marker comes first, whole or in pieces
            self._raw += data
            assert MARKER.startswith(self._raw[: len(MARKER)])
            data = self._raw[len(MARKER) :]
        for message, body in self._decoder.feed(data):
            if isinstance(message, Log):
                log = self.logs.setdefault(message.task, bytearray())
                if message.offset != len(log) and not self.logs_may_restart:
                    raise NoSecondChanceError("a gap or a repetition in the log")
                assert message.length == len(body)
                log += body
            else:
                self._received.append(message)
        return not ended

    def read_to_the_end(self) -> None:
        while self.receive(HANG_S):
            pass

    # --- the end ---

    def wait(self) -> int:
        return self.process.wait(20.0)

    def expect_nothing_left(self) -> None:
        """Waits until the agent, its guardian and everything they started are gone."""
        await_none_left(self.mark, 15.0)

    def close(self) -> str:
        """Ends everything, by force if necessary; returns the agent's stderr."""
        if self._errors is not None:
            return self._errors
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        left = ""
        try:
            self.expect_nothing_left()
        except NoSecondChanceError as error:
            left = str(error)
            for process in marked(self.mark):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdout, self.process.stderr:
            self._errors = self.process.stderr.read().decode(errors="replace")
        if left:
            raise NoSecondChanceError(f"{left}\n{self._errors}")
        return self._errors


def command(task: str, *argv: str, **options: Any) -> TaskStart:
    return TaskStart(task, Program("command", argv[0], list(argv[1:])), **options)

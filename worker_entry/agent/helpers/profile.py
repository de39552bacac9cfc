"""Has a cluster's tasks profiled by a child process, because gRPC may crash, and a capture takes a long time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import sys
from collections.abc import Callable
from typing import Optional

from worker_entry.protocol.file_names import PACKAGE
from worker_entry.protocol.framing import ProtocolError, parse
from worker_entry.protocol.profiles import Profile, Profiled
from worker_entry.system import processes

ANSWER_LIMIT = 4 << 20


class ProfileChild:
    """One capture at a time. `pids` contains the child, which belongs to no task."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Profiled], None]) -> None:
        self.pids: set[int] = set()
        self._selector = selector
        self._send = send
        self._pipe: Optional[int] = None
        self._said = b""

    def begin(self, order: Profile) -> None:
        """Starts a capture; its answer is sent."""
        if self._pipe is not None:
            self._send(Profiled(problem="another profile is being captured"))
            return
        tasks = {task.name: {"address": task.address, "operations": task.operations} for task in order.targets}
        wanted = {"tasks": tasks, "directory": order.directory, "duration_s": order.duration_s}
        reader, writer = os.pipe()
        theirs, ours = os.pipe()
        self._pipe, self._said = reader, b""
        self._selector.register(reader, selectors.EVENT_READ, self._read)
        try:
            command = [sys.executable, PACKAGE, "profile"]
            self.pids.add(processes.spawn(command, env=dict(os.environ), cwd=os.sep, output=writer, stdin=theirs))
        except OSError as error:
            self._end(Profiled(problem=str(error.strerror)))
        finally:
            os.close(writer)
            os.close(theirs)
        with contextlib.suppress(OSError), open(ours, "wb") as stream:  # the child has ended
            stream.write(json.dumps(wanted).encode())

    def end(self) -> None:
        """Ends a capture; its answer says so."""
        if self._pipe is not None:
            self._end(Profiled(problem="the tasks are being stopped"))

    def _read(self) -> None:
        assert self._pipe is not None
        data = os.read(self._pipe, 1 << 16)
        self._said += data
        if not data or len(self._said) > ANSWER_LIMIT:
            self._end(_find_answer(self._said))

    def _end(self, answer: Profiled) -> None:
        assert self._pipe is not None
        processes.end_children(self.pids)
        self._selector.unregister(self._pipe)
        os.close(self._pipe)
        self._pipe = None
        self._send(answer)


def _find_answer(said: bytes) -> Profiled:
    """The answer, which is the last line; any other last line says why the child died."""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), b"").decode("utf-8", "replace")
    answer = Profiled(problem=last or "it said nothing")
    with contextlib.suppress(ValueError, ProtocolError):
        answer = parse(Profiled, json.loads(last), "answer")
    return answer

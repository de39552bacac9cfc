"""The process that measures how fast a node computes: it has the environment of a task, and imports what tasks do."""

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
from worker_entry.protocol.speed import MeasureNode, NodeMeasured
from worker_entry.system import processes

SAID_LIMIT = 1 << 16


class SpeedChild:
    """One process, which stays until `end`; `pids` contains it."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[NodeMeasured], None]) -> None:
        self.pids: set[int] = set()
        self._selector = selector
        self._send = send
        self._pipe: Optional[int] = None
        self._asking = -1
        self._said = b""

    def measure(self, order: MeasureNode) -> None:
        """Starts the process, or asks it for another measurement; its answer is sent."""
        if order.only_starts:
            self.end()
            self._start(order)
        elif self._pipe is None:
            self._send(NodeMeasured(problem="the measuring process has ended"))
        else:
            with contextlib.suppress(OSError):  # it has ended, as its pipe shows too
                os.write(self._asking, b"\n")

    def end(self) -> None:
        """Ends the process; no more answers are sent."""
        if self._pipe is None:
            return
        processes.end_children(self.pids)
        self._selector.unregister(self._pipe)
        os.close(self._pipe)
        os.close(self._asking)
        self._pipe, self._said = None, b""

    def _start(self, order: MeasureNode) -> None:
        reader, writer = os.pipe()
        theirs, self._asking = os.pipe()
        self._pipe = reader
        self._selector.register(reader, selectors.EVENT_READ, self._read)
        env = {name: value for name, value in os.environ.items() if name not in order.unset}
        env.update({name: value for name, value in order.env.items() if name not in order.unset})
        command = [sys.executable, PACKAGE, "speed", order.method]
        try:
            self.pids.add(processes.spawn(command, env=env, cwd=os.sep, output=writer, stdin=theirs))
        except (OSError, ValueError) as error:
            self.end()
            self._send(NodeMeasured(problem=f"the measuring process could not be started: {error}"))
        finally:
            os.close(writer)
            os.close(theirs)

    def _read(self) -> None:
        assert self._pipe is not None
        data = os.read(self._pipe, 1 << 16)
        self._said = (self._said + data)[-SAID_LIMIT:]
        if not data:
            last = self._said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            self.end()
            self._send(NodeMeasured(problem=last or "the measuring process has died, or took too long"))
            return
        *lines, rest = self._said.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, ProtocolError):  # what libraries print is not an answer
                self._send(parse(NodeMeasured, json.loads(line), "answer"))
                self._said = rest

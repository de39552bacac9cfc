"""The process that measures how fast a node computes: it has a task's environment and imports the tasks' library."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
from collections.abc import Callable

from worker_entry.agent.helpers.helper import HelperProcess
from worker_entry.protocol.framing import ProtocolError, parse
from worker_entry.protocol.speed import MeasureNode, NodeMeasured


class SpeedChild:
    """One process, which stays until `end`; `pids` contains it."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[NodeMeasured], None]) -> None:
        self._helper = HelperProcess(selector, self._take, self._note_end)
        self.pids = self._helper.pids
        self._send = send

    def measure(self, order: MeasureNode) -> None:
        """Starts the process, or asks it for another measurement; its answer is sent."""
        if order.only_starts:
            self.end()
            self._start(order)
        elif not self._helper.is_running:
            self._send(NodeMeasured(problem="the measuring process has ended"))
        else:
            self._helper.write(b"\n")

    def end(self) -> None:
        """Ends the process; no more answers are sent."""
        if self._helper.is_running:
            self._helper.end()

    def _start(self, order: MeasureNode) -> None:
        env = {name: value for name, value in os.environ.items() if name not in order.unset}
        env.update({name: value for name, value in order.env.items() if name not in order.unset})
        try:
            self._helper.start(["speed", order.method], env)
        except (OSError, ValueError) as error:
            self._send(NodeMeasured(problem=f"the measuring process could not be started: {error}"))

    def _take(self, line: bytes) -> None:
        with contextlib.suppress(ValueError, ProtocolError):  # what libraries print is not an answer
            self._send(parse(NodeMeasured, json.loads(line), "answer"))

    def _note_end(self, last: bytes) -> None:
        self._helper.end()
        problem = last.decode("utf-8", "replace").strip()
        self._send(NodeMeasured(problem=problem or "the measuring process has died, or took too long"))

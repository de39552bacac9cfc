"""Profiles a cluster's tasks in a child process, because gRPC may crash, and a capture takes a long time."""

from __future__ import annotations

import contextlib
import json
import selectors
from collections.abc import Callable

from worker_entry.agent.helpers.helper import HelperProcess
from worker_entry.protocol.framing import ProtocolError, parse
from worker_entry.protocol.profiles import Profile, Profiled


class ProfileChild:
    """One capture at a time. `pids` contains the child, which belongs to no task."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Profiled], None]) -> None:
        self._helper = HelperProcess(selector, lambda _: None, self._answer)
        self.pids = self._helper.pids
        self._send = send

    def begin(self, order: Profile) -> None:
        """Starts a capture; its answer is sent."""
        if self._helper.is_running:
            self._send(Profiled(problem="another profile is being captured"))
            return
        tasks = {task.name: {"address": task.address, "operations": task.operations} for task in order.targets}
        wanted = {"tasks": tasks, "directory": order.directory, "duration_s": order.duration_s}
        try:
            self._helper.start(["profile"])
        except OSError as error:
            self._send(Profiled(problem=str(error.strerror)))
        self._helper.write(json.dumps(wanted).encode(), last=True)

    def end(self) -> None:
        """Ends a capture; its answer says so."""
        if self._helper.is_running:
            self._helper.end()
            self._send(Profiled(problem="the tasks are being stopped"))

    def _answer(self, last: bytes) -> None:
        """Sends the answer, which is the last line; any other last line says why the child died."""
        self._helper.end()
        answer = Profiled(problem=last.decode("utf-8", "replace") or "it said nothing")
        with contextlib.suppress(ValueError, ProtocolError):
            answer = parse(Profiled, json.loads(last), "answer")
        self._send(answer)

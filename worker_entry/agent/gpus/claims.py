"""Reserves unused GPUs for a run: all that it needs, or none."""

from __future__ import annotations

import functools
import json
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Optional

from worker_entry.agent.helpers.child_work import ChildWork
from worker_entry.agent.helpers.works import FIND_GPUS
from worker_entry.agent.network.outer import OuterNetwork
from worker_entry.protocol.framing import ProtocolError, parse
from worker_entry.protocol.gpus import UNKNOWN_RUN, BusyGpu, ClaimGpus, GpuHolder, GpusClaimed
from worker_entry.protocol.messages import Message
from worker_entry.system.gpu_holders import FoundGpu, FoundGpus, keep, tell_run
from worker_entry.system.network import HERE


class GpuClaims:
    """The GPUs that are reserved for one run. `pids` contains the child processes that inspect the GPUs."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Message], None]) -> None:
        self.outer: Optional[OuterNetwork] = None
        """The network in which all runs of the machine see each other; None for this process's network."""
        self._selector = selector
        self._send = send
        self._work = ChildWork(selector)
        self.pids = self._work.pids
        self._kept: dict[str, socket.socket] = {}
        """The sockets that reserve GPUs, by the GPUs' keys."""

    def claim(self, order: ClaimGpus, run: str) -> None:
        """Reserves GPUs for the run, if enough of them are free; sends the answer."""
        self._work.cancel()

        def take(answer: bytes) -> None:
            try:
                found = parse(FoundGpus, json.loads(answer), "gpus")
            except (ValueError, ProtocolError):  # the child has crashed with the driver
                found = FoundGpus([], "the driver does not answer")
            if found.problem:
                self._send(GpusClaimed(order.attempt, [], problem=found.problem))
            else:
                self._send(self._keep(order, found.gpus, run))

        self._work.begin(FIND_GPUS, json.dumps([order.gpus, [*self._kept]]).encode(), take, self.outer)

    def release(self) -> None:
        """Releases all GPUs."""
        self._work.cancel()
        for key in [*self._kept]:
            self._drop(key)

    def _keep(self, order: ClaimGpus, found: Sequence[FoundGpu], run: str) -> GpusClaimed:
        kept: dict[str, str] = {}
        busy: list[BusyGpu] = []
        for gpu in found:
            holders = gpu.holders
            if not holders and len(kept) < order.count and not self._bind(gpu.key, run):
                holders = [GpuHolder(run=UNKNOWN_RUN)]  # another run was faster
            if holders:
                busy.append(BusyGpu(gpu.gpu, holders))
            elif len(kept) < order.count:
                kept[gpu.key] = gpu.gpu
        is_enough = len(kept) == order.count
        for key in self._kept.keys() - (kept.keys() if is_enough else ()):
            self._drop(key)
        if is_enough:
            return GpusClaimed(order.attempt, [*kept.values()])
        problem = "" if busy else f"{', '.join(order.gpus)} are only {len(kept)} GPUs"  # some have two names
        return GpusClaimed(order.attempt, [], busy, problem)

    def _bind(self, key: str, run: str) -> bool:
        """Reserves a GPU; returns False if another run has reserved it."""
        if key in self._kept:
            return True
        place = (self.outer or HERE).make_socket(socket.AF_UNIX)
        try:
            keep(place, key)
        except OSError:
            place.close()
            return False
        self._kept[key] = place
        self._selector.register(place, selectors.EVENT_READ, functools.partial(tell_run, place, run))
        return True

    def _drop(self, key: str) -> None:
        place = self._kept.pop(key)
        self._selector.unregister(place)
        place.close()

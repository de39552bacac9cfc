"""Waits for lost nodes to come back: a machine that starts again, a container that is made anew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

LOOK_S = 2.0

Recover = Callable[[str, str], bool]
"""Whether a node can be reached again, and its last agent, which had this meeting place, and all below it have ended.
May take a minute."""


class ReturnWatch:
    """Looks after some nodes, given with the meeting places of their last agents, each in a thread, until `close`."""

    def __init__(self, nodes: Mapping[str, str], recover: Recover) -> None:
        self._recover = recover
        self._closed = threading.Event()
        self._back: set[str] = set()
        for node, reattach_folder in nodes.items():
            threading.Thread(target=self._look_after, args=(node, reattach_folder), daemon=True).start()

    @property
    def back(self) -> frozenset[str]:
        """The nodes that have come back so far."""
        return frozenset(self._back)

    def close(self) -> None:
        self._closed.set()

    def _look_after(self, node: str, reattach_folder: str) -> None:
        while not self._closed.is_set():
            if self._recover(node, reattach_folder):
                self._back.add(node)
                return
            self._closed.wait(LOOK_S)

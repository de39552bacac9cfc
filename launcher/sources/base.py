"""The engine that allocates a run's nodes and may take them away: a Slurm job or Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from launcher.gang.events import EndAnnounced


class Engine(Protocol):
    """The interface of an engine."""

    def watch(self, put: Callable[[EndAnnounced], None]) -> None:
        """Starts to announce nodes that are taken away."""

    def close(self) -> None:
        """Stops the announcements."""

    def ask(self, answer: Callable[[EndAnnounced | None], None]) -> None:
        """Asks why the engine sent a signal to this process or to a node; the answer may come on another thread."""

    def forget(self) -> None:
        """Forgets the state of earlier attempts."""

    def find_end(self, lost: Collection[str]) -> EndAnnounced | None:
        """Why nodes of the last attempt were taken away; None if none were. `lost`: the nodes that it lost."""

    def release(self) -> int | None:
        """Removes the pods made for the run; returns how many are left, None if unknown or none were made."""

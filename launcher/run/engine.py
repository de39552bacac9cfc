"""What has given a run its nodes, and takes them away: a job of Slurm, or Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from launcher.gang.events import EndAnnounced


class Engine(Protocol):
    """What a run asks of its engine."""

    def watch(self, put: Callable[[EndAnnounced], None]) -> None:
        """From now on, announces that nodes are taken away."""

    def close(self) -> None:
        """Ends that."""

    def ask(self, answer: Callable[[EndAnnounced | None], None]) -> None:
        """Asks why it has sent a signal, to us or to a node; the answer may come in another thread."""

    def forget(self) -> None:
        """Forgets what belongs to earlier attempts."""

    def find_end(self, lost: Collection[str]) -> EndAnnounced | None:
        """Why the nodes of the last attempt, of which these were lost, were taken away; None if they were not."""

    def release(self) -> int | None:
        """Gives back what was made for the run; returns how many pods are left, None if unknown or none were made."""

"""Where the time of a run goes: each second of it is counted once."""

from __future__ import annotations

from launcher.result import Result


class Goodput(Result):
    """Seconds of a run by what they went into; their sum is the duration of the run."""

    connecting_s: float = 0.0
    """Connecting to the nodes, sending the program, checking; before the first start of the tasks."""
    forming_s: float = 0.0
    """From the start of the tasks to the first step: imports, the cluster's formation, the first trace."""
    training_s: float = 0.0
    """Training that counts; of a program that reports no steps, all the time in which the cluster is up."""
    lost_s: float = 0.0
    """Training since the last checkpoint before a restart, which was done again."""
    restarting_s: float = 0.0
    """From a failure to the next start of the tasks."""
    stalled_s: float = 0.0
    """Without a step, until the cluster was found to be stalled."""
    waiting_s: float = 0.0
    """Waiting for a lost node, to come back or to have ended for certain."""
    ending_s: float = 0.0
    """From the end of the program, or the failure after which nothing starts again, to the end of the run."""
    share: float = 0.0
    """Of all this, the share of `training_s`."""

    def by_kind(self) -> dict[str, float]:
        """The seconds of `connecting`, `forming`, …"""
        return {name.removesuffix("_s"): value for name, value in self if name != "share"}

"""Where the time of a run goes: each second of it is counted once."""

from __future__ import annotations

from launcher.result import Result


class Goodput(Result):
    """Seconds of a run by what they went into; their sum is the duration of the run."""

    connecting_s: float = 0.0
    """Connecting to the nodes, sending the program, checking; before the first start of the tasks."""
    forming_s: float = 0.0
    """From each start of the tasks to the first step: imports, the cluster's formation, the first trace."""
    training_s: float = 0.0
    """Training that counts; of a program that reports no steps, all the time in which the cluster is up."""
    lost_s: float = 0.0
    """Training since the last checkpoint before a restart, which is done again. A failure that no step follows loses
    nothing; a program that reports no steps does not either, as far as is known."""
    restarting_s: float = 0.0
    """From a failure to the next start of the tasks, and between two controllers while nothing trains."""
    stalled_s: float = 0.0
    """Since the last step, until the cluster was found to be stalled."""
    waiting_s: float = 0.0
    """Since the last step, until a node was found to be lost; then for the node to come back, or to have ended its
    tasks for certain."""
    ending_s: float = 0.0
    """From the end of the program, or the failure after which nothing starts again, to the end of the run."""
    share: float = 0.0
    """Of all this, the share of `training_s`."""


KINDS = tuple(name for name in Goodput.model_fields if name != "share")


def make_goodput(seconds: dict[str, float]) -> Goodput:
    """The goodput from the seconds of each of KINDS."""
    whole_s = sum(seconds.values())
    return Goodput(**seconds, share=seconds["training_s"] / whole_s if whole_s else 0.0)

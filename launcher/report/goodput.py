"""Goodput: where the time of a run goes. Each second is counted once."""

from __future__ import annotations

from launcher.result import Result
from launcher.wording import render_duration


class Goodput(Result):
    """Seconds of a run by kind; their sum is the duration of the run."""

    connecting_s: float = 0.0
    """Before the first start of the tasks: connecting to the nodes, sending the program, checking."""
    forming_s: float = 0.0
    """From each start of the tasks to the first step: imports, the cluster's formation, the first trace."""
    training_s: float = 0.0
    """Training that counts; for a program that reports no steps, all the time during which the cluster is up."""
    lost_s: float = 0.0
    """Training since the last checkpoint before a restart, which is repeated after it. A failure that no step follows
    loses nothing; the losses of a program that reports no steps are unknown and not counted."""
    restarting_s: float = 0.0
    """From a failure to the next start of the tasks, and between two controllers while nothing trains."""
    stalled_s: float = 0.0
    """From the last step until the cluster was found to be stalled."""
    waiting_s: float = 0.0
    """From the last step until a node was found to be lost; then the wait until the node is back, or has certainly
    ended its tasks."""
    ending_s: float = 0.0
    """From the end of the program, or the failure after which nothing starts again, to the end of the run."""
    share: float = 0.0
    """The share of `training_s` in the duration of the run."""

    def by_kind(self) -> dict[str, float]:
        """The seconds of `connecting`, `forming`, …"""
        return {kind.removesuffix("_s"): getattr(self, kind) for kind in KINDS}


LEAST_S = 0.05
"""A shorter time is shown as 0.0 s."""
SHORT_S = 10.0
"""In a shorter run, most of the time is its start, so its goodput says nothing."""
SHOWN = 4
LEAST_SHARE = 0.01
"""Besides training, the text names at most SHOWN kinds, each with at least LEAST_SHARE of the time."""
KINDS = tuple(name for name in Goodput.model_fields if name != "share")


def make_goodput(seconds: dict[str, float]) -> Goodput:
    """The goodput from the seconds of each of KINDS."""
    whole_s = sum(seconds.values())
    return Goodput(**seconds, share=seconds["training_s"] / whole_s if whole_s else 0.0)


def render_goodput(goodput: Goodput) -> str:
    """`Goodput 83 %: 41.2 s of 49.6 s trained; 3.1 s forming, 2.0 s restarting`, with the largest of the rest."""
    spent = {kind: seconds for kind, seconds in goodput.by_kind().items() if seconds >= LEAST_S}
    whole_s = sum(spent.values())
    rest = sorted((kind for kind in spent if kind != "training"), key=lambda kind: -spent[kind])
    shown = [f"{render_duration(spent[kind])} {kind}" for kind in rest[:SHOWN] if spent[kind] >= LEAST_SHARE * whole_s]
    trained = f"{render_duration(goodput.training_s)} of {render_duration(whole_s)} trained"
    return f"Goodput {100 * goodput.share:.0f} %: {'; '.join([trained, ', '.join(shown)] if shown else [trained])}"

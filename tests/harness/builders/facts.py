"""The facts of an attempt's state, which a later controller has to know as well."""

from __future__ import annotations

from typing import Any

from launcher.gang.state import AttemptState
from worker_entry.protocol.frozen import replace

NOT_FACTS = (
    *("last_progress", "suspicion", "stalled_s", "stacks", "activity", "busy", "worked", "waited", "next_look"),
    *("deadline", "raised_due", "interrupt_due", "detached", "unheard", "phase", "reason", "stopped"),
)
"""Fields with a controller's conclusions and clocks."""


def facts(state: AttemptState) -> dict[str, Any]:
    """The facts that a controller knows, without steps and models, because tasks report these again."""
    known = {name: value for name, value in vars(state).items() if name not in NOT_FACTS and name != "policy"}
    known["status"] = {
        task: (replace(status, model=None, progress=None), status.progress is not None and status.progress.training)
        for task, status in state.status.items()
    }
    return known

"""What messages may cost: the length of each header, and how many messages of each kind a node may send."""

from __future__ import annotations

from typing import Any, Optional

from worker_entry.protocol.collection import FilesFound, FindFiles
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.gpus import ClaimGpus, GpusClaimed
from worker_entry.protocol.messages import (
    AskInput,
    CacheUsed,
    Cleaned,
    ConnectionsRejected,
    Dialled,
    Exited,
    Fetch,
    Halted,
    InterruptTaken,
    Listening,
    Noted,
    Prepared,
    Ready,
    Refused,
    Returned,
    Sampled,
    Saved,
    Signalled,
    Stacks,
    Started,
    Status,
    Unguarded,
)
from worker_entry.protocol.orders import Attach, Clean, Dial, Early, Inspect, Offer, Preload, Prepare, Start
from worker_entry.protocol.profiles import Profile, Profiled
from worker_entry.protocol.speed import MeasureNode

FRAME_LIMIT = 64 << 10
"""Maximum length of most headers in bytes."""
_LINES, _FILES = 1 << 20, 16 << 20
"""Of headers with a line for each task, GPU or address; and of those with tasks' environments or a folder's files."""


@dataclass(frozen=True)
class Cost:
    """What messages of one kind may cost.

    `header`: the maximum length of a header in bytes.
    `at_once`: how many a node may send in an attempt at any time, and `per_minute` more; the controller drops all
    others. None: the kind can have an effect only once in an attempt, or answers an order; an answer that no order
    asked for is dropped.
    `for_each_task`: both numbers are multiplied by the number of the node's tasks.
    """

    header: int = FRAME_LIMIT
    at_once: Optional[int] = None
    per_minute: float = 0.0
    for_each_task: bool = False


_CHANGE = Cost(at_once=20, per_minute=6, for_each_task=True)
COSTS: dict[type[Any], Cost] = {
    # orders
    **dict.fromkeys(
        (Offer, Preload, Early, Prepare, Inspect, Dial, MeasureNode, Start, Profile, FindFiles), Cost(_FILES)
    ),
    **dict.fromkeys((Attach, Clean, ClaimGpus), Cost(_LINES)),
    # messages about the node
    Ready: Cost(at_once=4, per_minute=1),
    Noted: Cost(at_once=100),
    Refused: Cost(_LINES),
    Cleaned: Cost(_LINES),
    GpusClaimed: Cost(_LINES),
    Prepared: Cost(_LINES),
    Dialled: Cost(8 << 20),
    Profiled: Cost(_LINES),
    Fetch: Cost(at_once=100_000, per_minute=600),
    FilesFound: Cost(_FILES, at_once=1000, per_minute=60),
    Saved: Cost(at_once=120, per_minute=60),
    CacheUsed: Cost(at_once=100, per_minute=20),
    Sampled: Cost(_LINES, at_once=60, per_minute=600),
    # messages about a task; long ones have text from the user's program: its status file, an exception or stacks
    Started: _CHANGE,
    Listening: _CHANGE,
    InterruptTaken: _CHANGE,
    Signalled: _CHANGE,
    Returned: Cost(1 << 20, _CHANGE.at_once, _CHANGE.per_minute, for_each_task=True),
    Exited: Cost(1 << 20, _CHANGE.at_once, _CHANGE.per_minute, for_each_task=True),
    Halted: Cost(at_once=100, per_minute=60, for_each_task=True),
    Unguarded: Cost(at_once=4, per_minute=1, for_each_task=True),
    ConnectionsRejected: Cost(at_once=128, per_minute=10, for_each_task=True),
    AskInput: Cost(at_once=100_000, per_minute=6000, for_each_task=True),
    # An agent looks at a task's status file twenty times a second.
    Status: Cost(256 << 10, at_once=2000, per_minute=3000, for_each_task=True),
    Stacks: Cost(2 << 20),
}
_DEFAULT = Cost()


def cost_of(kind: type[Any]) -> Cost:
    """What messages of this kind may cost."""
    return COSTS.get(kind, _DEFAULT)

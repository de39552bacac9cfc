"""Limits of what a node may send: the length of each header, and how many messages of each kind."""

from __future__ import annotations

from typing import Any

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
from worker_entry.protocol.orders import Attach, Clean, Dial, Inspect, Offer, Preload, Prepare, Start
from worker_entry.protocol.profiles import Profile, Profiled
from worker_entry.protocol.speed import MeasureNode

FRAME_LIMIT = 64 << 10
"""Maximum length of a header in bytes, except for the types below."""
FRAME_LIMITS: dict[type[Any], int] = {
    # They hold the environment of each task of a node, each file of a folder, or each address of a cluster.
    **dict.fromkeys(
        (Offer, Preload, Prepare, Inspect, Dial, MeasureNode, Start, Profile, FindFiles, FilesFound), 16 << 20
    ),
    **dict.fromkeys((Attach, Clean), 1 << 20),
    # They hold a line for each task or GPU of a node, or each address of the cluster.
    **dict.fromkeys((Prepared, Refused, Cleaned, Sampled, Profiled, ClaimGpus, GpusClaimed), 1 << 20),
    Dialled: 8 << 20,
    # Their length depends on a user's program: on its status file, exception or stacks.
    Status: 256 << 10,
    Exited: 1 << 20,
    Returned: 1 << 20,
    Stacks: 2 << 20,
}


@dataclass(frozen=True)
class Allowance:
    """How many messages of a kind a node may send in an attempt; the controller drops all others.

    Up to `at_once` messages may come in a burst, and the allowance refills by `per_minute`. Both apply to the node or,
    with `for_each_task`, are multiplied by the number of its tasks.
    """

    at_once: int
    per_minute: float
    for_each_task: bool = False


ALLOWANCES: dict[type[Any], Allowance] = {
    # Each costs a line of the journal, a line on the console, memory, or an answer.
    Ready: Allowance(4, 1),
    Noted: Allowance(100, 0),
    Saved: Allowance(120, 60),
    FilesFound: Allowance(1000, 60),
    Sampled: Allowance(60, 600),
    CacheUsed: Allowance(100, 20),
    Fetch: Allowance(100_000, 600),
    ConnectionsRejected: Allowance(128, 10, for_each_task=True),
    Unguarded: Allowance(4, 1, for_each_task=True),
    Started: Allowance(20, 6, for_each_task=True),
    Listening: Allowance(20, 6, for_each_task=True),
    AskInput: Allowance(100_000, 6000, for_each_task=True),
    InterruptTaken: Allowance(20, 6, for_each_task=True),
    Returned: Allowance(20, 6, for_each_task=True),
    Exited: Allowance(20, 6, for_each_task=True),
    Halted: Allowance(100, 60, for_each_task=True),
    Signalled: Allowance(20, 6, for_each_task=True),
    # An agent looks at a task's status file twenty times a second.
    Status: Allowance(2000, 3000, for_each_task=True),
}
"""All other kinds can have an effect only once in an attempt, or answer an order.

An answer that no order asked for is dropped.
"""

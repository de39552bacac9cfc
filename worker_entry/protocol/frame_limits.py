"""Maximum lengths of frame headers."""

from __future__ import annotations

from typing import Any

from worker_entry.protocol.messages import Cleaned, Dialled, Exited, Prepared, Refused, Sampled, Stacks, Status
from worker_entry.protocol.orders import Attach, Clean, Dial, Inspect, Offer, Preload, Prepare, Start
from worker_entry.protocol.profiles import Profile, Profiled
from worker_entry.protocol.speed import MeasureNode

FRAME_LIMIT = 64 << 10
"""Maximum length of a header in bytes, except for the types below."""
FRAME_LIMITS: dict[type[Any], int] = {
    # They hold the environment of each task of a node, each file of a folder, or each address of a cluster.
    **dict.fromkeys((Offer, Preload, Prepare, Inspect, Dial, MeasureNode, Start, Profile), 16 << 20),
    **dict.fromkeys((Attach, Clean), 1 << 20),
    # They hold a line for each task of a node or each address of the cluster.
    **dict.fromkeys((Prepared, Refused, Cleaned, Sampled, Profiled), 1 << 20),
    Dialled: 8 << 20,
    # Their length depends on a user's program: on its status file, exception or stacks.
    Status: 256 << 10,
    Exited: 1 << 20,
    Stacks: 2 << 20,
}

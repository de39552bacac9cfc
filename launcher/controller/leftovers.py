"""What a run leaves on nodes: processes by accident, and agents that stay warm for the next run.

psutil counts the processes on this machine, independent of the agent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from launcher.console.writer import Console
from launcher.controller.context import RunContext
from launcher.errors import RunDirectoryError
from launcher.report.models import WarmNode
from launcher.rundir.owner import find_left_processes
from launcher.rundir.warm_nodes import KnownWarmNode, remember
from launcher.tasks import LOCAL
from launcher.wording import count_of
from worker_entry.protocol.messages import KeptWarm


def confirm_left(
    left: Mapping[str, int | None],
    run_id: str,
    console: Console,
    find: Callable[[str], Sequence[int]] = find_left_processes,
) -> dict[str, int | None]:
    """Checks this machine's count against that of `find`; if they differ, warns and returns the larger one."""
    counted = left.get(LOCAL)
    if counted is None:
        return dict(left)
    found = find(run_id)
    if len(found) != counted:
        pids = f": {', '.join(map(str, found))}" if found else ""
        agents = count_of(counted, "process", "processes")
        console.warn(f"the agent on this machine counts {agents} left, but psutil counts {len(found)}{pids}")
    return {**left, LOCAL: max(counted, len(found))}


def note_kept(kept: Mapping[str, KeptWarm], context: RunContext, now: float) -> list[WarmNode]:
    """Records which nodes stay warm, and notes on the console which could not; `now` is in Unix seconds."""
    found = []
    for node, each in kept.items():
        if each.problem:
            context.console.note(f"{node}: TensorFlow is not kept warm: {each.problem}")
            continue
        found.append(WarmNode(node=node, pids=each.pids, bytes=each.bytes, until=now + each.seconds))
        if node != LOCAL:
            with contextlib.suppress(OSError, RunDirectoryError):  # the agent ends by itself, even without a record
                remember(KnownWarmNode(node, each.bytes, now + each.seconds, str(context.files.root)))
    return found

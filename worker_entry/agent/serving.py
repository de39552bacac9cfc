"""An agent process: it serves a run, and then further runs, as long as each run keeps it warm."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Optional

from worker_entry.agent.agent import Agent
from worker_entry.agent.connection.connection import Opening
from worker_entry.agent.connection.lease import LoopCounter
from worker_entry.agent.connection.reattach_folder import ReattachFolder
from worker_entry.agent.warm.keep import KeepWarm
from worker_entry.system.agent_kernel import SystemKernel

if TYPE_CHECKING:
    from worker_entry.agent.tasks.warm_forkserver import WarmForkserver


def serve(
    opening: Optional[Opening],
    reattach_folder: Optional[ReattachFolder],
    loop_counter: LoopCounter,
    fingerprint: dict[str, str],
    *,
    news: str = "",
) -> int:
    """Serves the run of this connection and the runs that follow; returns the exit status of the last run.

    Args:
        opening: the first connection.
        reattach_folder: the agent's reattach folder; None if it could not be made, or is not needed.
        loop_counter: shared with the guardian.
        fingerprint: this process's fingerprint at its start; empty if it must not stay after its run.
        news: why no waiting agent serves the first run.
    """
    status, until = 0, 0.0
    kept: Optional[WarmForkserver] = None
    if opening is not None and reattach_folder is not None:
        opening.accept(reattach_folder.path)
    while opening is not None:
        stay = KeepWarm(until=until, allowed=bool(fingerprint) and reattach_folder is not None)
        agent = Agent(opening, reattach_folder, loop_counter, SystemKernel(), forkserver=kept, news=news, stay=stay)
        status = agent.run()
        kept, until, opening, news = stay.kept, stay.until, None, ""
        if kept is None or stay.waiting is None or reattach_folder is None:
            break
        from worker_entry.agent.warm.wait import Waiting

        with contextlib.suppress(OSError):  # the reattach folder was removed: no controller could find the agent
            reattach_folder.renew()
            opening = Waiting(kept, until, stay.waiting, reattach_folder, fingerprint).wait(loop_counter)
        if opening is None:
            kept.end()
    return status

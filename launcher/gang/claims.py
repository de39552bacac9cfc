"""How a run waits for free GPUs: all nodes are asked, and if one has too few, all release theirs and are asked again.

So two runs that need the same nodes never wait for each other while each holds a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.gang.events import ClaimNodes, NodeBusy, ReleaseNodes
from launcher.gang.state import AttemptState, Phase
from launcher.tasks import LOCAL
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.gpus import UNKNOWN_RUN, BusyGpu, GpuHolder

SHOWN = 8


def ask_all(state: AttemptState, now: float) -> tuple[AttemptState, tuple[ClaimNodes]]:
    """Asks every node to keep the GPUs that the attempt needs there."""
    limit_s, due = state.policy.start_s, state.claims_due
    if state.phase is not Phase.CLAIMING and state.policy.wait_gpus_s:
        due = now + state.policy.wait_gpus_s
    deadline = now + limit_s if limit_s else None
    return replace(
        state,
        phase=Phase.CLAIMING,
        asked=state.awaited,
        claimed={},
        lacking={},
        claims_again=None,
        claims_due=due,
        deadline=deadline,
    ), (ClaimNodes(),)


def go_on(state: AttemptState, now: float) -> tuple[AttemptState, tuple[ClaimNodes | ReleaseNodes, ...]]:
    """The next state and actions once all nodes have answered, and some of them lack free GPUs."""
    if state.claims_again is None:
        again = now + state.policy.claim_pause_s
        if state.claims_due is not None:
            again = max(min(again, state.claims_due), now)
        waiting = replace(state, claimed={}, lacked=state.lacking, claims_again=again, deadline=again)
        return waiting, (ReleaseNodes(),)
    if now >= state.claims_again:
        return ask_all(state, now)
    return state, ()


def render_busy_gpus(lacking: Mapping[str, NodeBusy]) -> str:
    """`GPU 0 of gpu-a is used by pid 4242 (python) of alice; GPUs 1, 2 of gpu-a are kept for run digits-7 of bob`."""
    lines = [line for node in sorted(lacking) for line in _render_node(lacking[node])]
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


def _render_node(event: NodeBusy) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for gpu in event.gpus:
        alike.setdefault(_render_holders(gpu), []).append(gpu.gpu)
    where = "" if event.node == LOCAL else f" of {event.node}"
    for how, gpus in alike.items():
        yield f"GPU{'s' * (len(gpus) > 1)} {', '.join(gpus)}{where} {'are' if len(gpus) > 1 else 'is'} {how}"


def _render_holders(gpu: BusyGpu) -> str:
    used = [_render_process(holder) for holder in gpu.holders if not holder.run]
    kept = [_render_run(holder) for holder in gpu.holders if holder.run]
    if used:
        return f"used by {', '.join(used[:SHOWN])}"
    return f"kept for {', '.join(kept)}"


def _render_process(holder: GpuHolder) -> str:
    command = f" ({holder.command})" if holder.command else ""
    return f"pid {holder.pid}{command}{f' of {holder.user}' if holder.user else ''}"


def _render_run(holder: GpuHolder) -> str:
    run = "another run" if holder.run == UNKNOWN_RUN else f"run {holder.run}"
    return f"{run}{f' of {holder.user}' if holder.user else ''}"

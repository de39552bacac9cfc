"""Decides what follows an attempt: whether a failed cluster restarts, and when.

A gang restarts as a whole: the same tasks, fresh ports. A budget keeps it from restarting for ever: a number of
restarts within a period. Failures that the program does not cause, a preemption or a taken port, do not count, unless
they repeat and the training does not advance.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.failures import FAILURES, is_counted
from launcher.gang.events import EndAnnounced
from launcher.wording import count_of
from worker_entry.protocol.frozen import dataclass, replace

if TYPE_CHECKING:  # `status` needs none of the spec's models
    from launcher.spec.parts import RestartSpec

LONGEST_PAUSE_S = 60.0
LONG_S = 600.0
"""An attempt this long was not part of a crash loop: after it, pauses start from zero again."""

UNCOUNTED = 3
"""A failure that does not count by its class counts after this many in a row that did not advance the training, …"""
UNCOUNTED_UNTRAINED = 1
"""… after this many if the attempt did no step, …"""
UNCOUNTED_CONFIRMED = 20
"""… and after this many if Slurm or Kubernetes has confirmed the preemption."""
FRUITLESS = 3
"""A run ends after this many attempts in a row whose last checkpoint did not advance, even if restarts are left."""
REMEMBERED = 64
"""Attempts that are remembered; more than this in quick succession do not make the pause longer."""


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended: its verdict's reference, its times in seconds, and whether training had begun.

    `saved`: whether the attempt is known to have saved a checkpoint. `step`: the last known step, counted on from a
    restored one. `is_free`: whether a restart after the attempt does not count.
    """

    reference: str
    started: float
    ended: float
    trained: bool
    saved: bool = False
    step: int = 0
    is_free: bool = False


@dataclass(frozen=True)
class Restart:
    """Restart after a pause; `count` is its number among the restarts that are counted."""

    pause_s: float
    count: int
    free: bool


@dataclass(frozen=True)
class GiveUp:
    """Do not restart; `reason` is for the user, and empty if no restart was expected.

    `fruitless`: whether the run has stopped making progress, and should not be started again as it is.
    """

    reason: str = ""
    fruitless: bool = False


@dataclass(frozen=True)
class Again:
    """Another attempt follows. `reuses_nodes`: on the same nodes, although the last attempt lost them."""

    restart: Restart
    reuses_nodes: bool = False


@dataclass(frozen=True)
class WaitForNodes:
    """Too few nodes are left: wait for lost ones to come back."""

    limit_s: float


@dataclass(frozen=True)
class Requeue:
    """The run ends for now, and continues when the engine provides nodes again; `reason` is for the user."""

    reason: str = ""


@dataclass(frozen=True)
class End:
    """The run ends; `reason` is for the user, and empty if the verdict explains the end.

    `signal`: the signal that has ended the run between two attempts. `fruitless`: as for GiveUp.
    """

    reason: str = ""
    signal: int | None = None
    fruitless: bool = False


Next = Again | WaitForNodes | Requeue | End


@dataclass(frozen=True)
class Situation:
    """The known facts after an attempt; `asked` and `announced` may come at any time, also during a wait."""

    failed: bool
    """Whether the attempt has failed."""
    is_taken_away: bool = False
    """Whether the attempt has failed because the engine takes the nodes away."""
    is_lost_earlier: bool = False
    """Whether an earlier controller began the attempt, and not all of its agents could be taken over."""
    asked: int | None = None
    """The signal by which the user has asked the run to stop."""
    announced: EndAnnounced | None = None
    """The end of all nodes, announced after the attempt."""
    has_nodes: bool = True
    """Whether enough nodes are known to be left."""
    has_waited: bool = False
    """Whether lost nodes had time to come back."""


def decide_next(spec: RestartSpec, endings: Sequence[AttemptOutcome], known: Situation) -> Next:
    """Decides what follows the last of these attempts.

    Args:
        spec: what the user allows.
        endings: the outcomes of all attempts so far, in order.
        known: the facts known now; call this function again whenever more facts are known.
    """
    if not known.failed:
        return End()
    decision = decide_restart(spec, endings)
    if known.is_taken_away:
        if known.asked is not None:  # the user does not want it to continue
            return End(signal=known.asked)
        return Requeue() if isinstance(decision, Restart) else End(decision.reason, fruitless=decision.fruitless)
    if known.is_lost_earlier and known.asked is None:
        decision = Restart(pause_s=0.0, count=0, free=True)
    if known.announced is not None and known.asked is None:
        reason = f"not started again now: {known.announced.message}"
        is_cancelled = known.announced.reference == "interrupted"
        return End(reason, signal=signal.SIGTERM) if is_cancelled else Requeue(reason)
    if isinstance(decision, GiveUp):
        return End(decision.reason, fruitless=decision.fruitless)
    if known.asked is not None:  # may have come while the last attempt stopped: its state does not show that
        return End(signal=known.asked)
    if known.has_nodes:
        return Again(decision, reuses_nodes=known.is_lost_earlier)
    if spec.return_s and not known.has_waited:
        return WaitForNodes(spec.return_s)
    return End("not started again: no spare node fits, and too few nodes are left")


def decide_restart(spec: RestartSpec, endings: Sequence[AttemptOutcome]) -> Restart | GiveUp:
    """Decides what follows the last of these attempts, which have all failed.

    Args:
        spec: what the user allows.
        endings: the outcomes of all attempts so far, in order.
    """
    last = endings[-1]
    if not spec.max_restarts or last.reference not in FAILURES:
        return GiveUp()
    if last.reference not in spec.on:
        return GiveUp(f"not started again: `restart.on` does not name {last.reference}")
    if last.reference == "task-failed" and not last.trained:
        return GiveUp("not started again: the program failed before its first training step, and would fail again")
    if _is_fruitless(endings):
        reason = f"not started again: the last {FRUITLESS} attempts saved no checkpoint and got no further"
        return GiveUp(reason, fruitless=True)
    since = last.ended - spec.period_s if spec.period_s else float("-inf")
    spent = sum(not ending.is_free and ending.ended > since for ending in endings[:-1])
    if not last.is_free and spent >= spec.max_restarts:
        within = f" within {spec.period_s:g} s" if spec.period_s else ""
        return GiveUp(f"not started again: {count_of(spent, 'restart')}{within} did not help")
    return Restart(_pause(spec, endings), spent + (not last.is_free), last.is_free)


def price(
    ending: AttemptOutcome, earlier: Sequence[AttemptOutcome], *, is_confirmed: bool, is_guess: bool
) -> AttemptOutcome:
    """Returns the ending, with `is_free` set.

    Args:
        ending: an attempt that has just failed.
        earlier: the attempts before it.
        is_confirmed: whether the engine that allocated the nodes confirms that it takes them away.
        is_guess: whether the class is known only from the program's own output.
    """
    if is_guess or is_counted(ending.reference):
        return replace(ending, is_free=False)
    limit = UNCOUNTED_CONFIRMED if is_confirmed else UNCOUNTED if ending.trained else UNCOUNTED_UNTRAINED
    in_a_row = 0
    for number in range(len(earlier) - 1, -1, -1):
        if is_counted(earlier[number].reference) or _has_advanced(earlier[number], earlier[:number]):
            break
        in_a_row += 1
    return replace(ending, is_free=in_a_row < limit or _has_advanced(ending, earlier))


def _has_advanced(ending: AttemptOutcome, earlier: Sequence[AttemptOutcome]) -> bool:
    return ending.saved or ending.step > max((before.step for before in earlier), default=0)


def _is_fruitless(endings: Sequence[AttemptOutcome]) -> bool:
    """Whether checkpoints were saved once, but the last attempts that trained saved none and got no further."""
    trained = [ending for ending in endings if ending.trained]
    before, last = trained[:-FRUITLESS], trained[-FRUITLESS:]
    if not any(ending.saved for ending in before):
        return False
    furthest = max(ending.step for ending in before)
    return not any(ending.saved or ending.step > furthest for ending in last)


def _pause(spec: RestartSpec, endings: Sequence[AttemptOutcome]) -> float:
    """No pause before the first restart; then twice as long after each attempt that failed soon."""
    in_a_row = 0
    for ending in reversed(endings):
        if ending.ended - ending.started >= LONG_S:
            break
        in_a_row += 1
    if in_a_row < 2:
        return 0.0
    # Preemptions are not bounded, so the exponent is: 2.0 ** 1024 overflows a float.
    return min(spec.pause_s * 2.0 ** min(in_a_row - 2, REMEMBERED), max(LONGEST_PAUSE_S, spec.pause_s))


def remember(endings: Sequence[AttemptOutcome]) -> list[AttemptOutcome]:
    """The endings on which decisions can still depend; they stay few, even if a run is preempted for ever."""
    recent = len(endings) - REMEMBERED
    return [ending for number, ending in enumerate(endings) if number >= recent or not ending.is_free]

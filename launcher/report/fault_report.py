"""Reports what happened after each fault that was injected on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from launcher.gang.faults import DONE, Fault, find_beginning, find_status_before_restart, render_place, was_done
from launcher.gang.state import AttemptState
from launcher.report.models import FaultReport


def report_faults(faults: Iterable[Fault], states: Mapping[int, AttemptState]) -> list[FaultReport]:
    """A report on each fault.

    Args:
        faults: all faults that the user asked for.
        states: the last states of the attempts, by number.
    """
    return [_report(fault, states) for fault in faults]


def _report(fault: Fault, states: Mapping[int, AttemptState]) -> FaultReport:
    number = next((number for number, state in states.items() if was_done(fault, state)), None)
    if number is None:
        reached = render_place(states[max(states)], fault.task)
        return FaultReport(fault=str(fault), message=f"{fault} was not injected: {fault.task} reached {reached}")
    began = find_beginning(states[number])
    did = (
        f"{fault.task} {DONE[fault.injection.what]} in attempt {number}, at {render_place(states[number], fault.task)}"
    )
    if find_status_before_restart(states[number], fault) is not None:
        alone = f"{fault.task} {DONE[fault.injection.what]} in attempt {number}; it was restarted individually"
        return FaultReport(fault=str(fault), attempt=number, message=alone)
    after = {later: find_beginning(state) for later, state in states.items() if later > number}
    trained = {later: beginning for later, beginning in after.items() if beginning is not None}
    if not trained:
        rest = "it was not started again" if not after else "no later attempt did a step"
        return FaultReport(fault=str(fault), attempt=number, message=f"{did}; {rest}")
    later, beginning = min(trained.items())
    first = find_beginning(states[min(states)]) or began
    resumed = first is not None and beginning > first
    place = f"epoch {beginning[0]}" if beginning[0] else f"step {beginning[1]}"
    how = f"resumed in {place}" if resumed else f"started over in {place}: nothing was resumed"
    return FaultReport(fault=str(fault), attempt=number, resumed=resumed, message=f"{did}; attempt {later} {how}")

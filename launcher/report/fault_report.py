"""What came of the faults that were done on purpose. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from launcher.gang.faults import DONE, Fault, find_beginning, render_place, told_before, was_done
from launcher.gang.state import AttemptState
from launcher.report.models import FaultReport


def report_faults(faults: Iterable[Fault], states: Mapping[int, AttemptState]) -> list[FaultReport]:
    """What became of each.

    Args:
        faults: all that were asked for.
        gangs: the last states of all attempts, by their numbers.
    """
    return [_report(fault, states) for fault in faults]


def _report(fault: Fault, states: Mapping[int, AttemptState]) -> FaultReport:
    number = next((number for number, state in states.items() if was_done(fault, state)), None)
    if number is None:
        reached = render_place(states[max(states)], fault.task)
        return FaultReport(fault=str(fault), message=f"{fault} was not done: {fault.task} came to {reached}")
    began = find_beginning(states[number])
    did = (
        f"{fault.task} {DONE[fault.injection.what]} in attempt {number}, at {render_place(states[number], fault.task)}"
    )
    if told_before(states[number], fault) is not None:
        alone = f"{fault.task} {DONE[fault.injection.what]} in attempt {number}; it was started again alone"
        return FaultReport(fault=str(fault), attempt=number, message=alone)
    after = {later: find_beginning(state) for later, state in states.items() if later > number}
    trained = {later: beginning for later, beginning in after.items() if beginning is not None}
    if not trained:
        rest = "it was not started again" if not after else "no attempt after it did a step"
        return FaultReport(fault=str(fault), attempt=number, message=f"{did}; {rest}")
    later, beginning = min(trained.items())
    first = find_beginning(states[min(states)]) or began
    resumed = first is not None and beginning > first
    place = f"epoch {beginning[0]}" if beginning[0] else f"step {beginning[1]}"
    how = f"went on in {place}" if resumed else f"began anew, in {place}: nothing was resumed"
    return FaultReport(fault=str(fault), attempt=number, resumed=resumed, message=f"{did}; attempt {later} {how}")

"""What the patches find in a version of Keras: faults, places where a fault is fixed, and code that they do not know.

A fault counts as fixed only if its fix is found. Otherwise, Keras may have moved the faulty code to another place.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple


class State(enum.IntEnum):
    """The state of a place in Keras; if several patches share a place, the highest counts."""

    FIXED = 0
    PATCHED = 1
    CHANGED = 2


class Finding(NamedTuple):
    """`place`: the function, class or feature of Keras."""

    place: str
    state: State


def patched(place: str) -> Finding:
    return Finding(place, State.PATCHED)


def unpatched(place: str, *, fixed: bool) -> Finding:
    """A place in which the faulty code was not found. `fixed`: whether its fix was found there."""
    return Finding(place, State.FIXED if fixed else State.CHANGED)


def group(findings: Iterable[Finding]) -> dict[State, list[str]]:
    """The places in each state, in the order in which they were found."""
    states: dict[str, State] = {}
    for place, state in findings:
        states[place] = max(state, states.get(place, state))
    return {state: [place for place, its in states.items() if its == state] for state in State}

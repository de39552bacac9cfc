"""The keys of the live view."""

from __future__ import annotations

import re
from collections.abc import Callable

from launcher.console.live_view import Asked, LiveRegion
from worker_entry.protocol.frozen import dataclass, replace

HINT = "? keys"
ENTER, ESCAPE, BACKSPACE = ("\r", "\n"), "\x1b", ("\x7f", "\b")
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.)")
"""The sequences that arrows and other named keys send."""


@dataclass(frozen=True, kw_only=True)
class KeyActions:
    """The actions of keys on the run, or on the command that shows it, with texts that explain them.

    `q` calls `stop`, after the user has confirmed `stop_question` if there is one. `detach` is None if the command
    cannot leave the terminal. `show_only` gets the only task whose log is shown, or an empty string for all tasks.
    """

    stop: Callable[[], None]
    stop_text: str
    stop_question: str = ""
    detach: Callable[[], None] | None = None
    detach_text: str = "detach; the run continues"
    stacks: Callable[[], None]
    show_only: Callable[[str], None]


class Keys:
    """Handles keys; shows questions and help in the region."""

    def __init__(self, region: LiveRegion, actions: KeyActions, *, has_keys: bool = True) -> None:
        self._region = region
        self._actions = actions
        self._typed: str | None = None
        """The number or name that is being typed after `l`; None otherwise."""
        self._asks = False
        region.asked = Asked(hint=HINT if has_keys else "")

    def press(self, data: bytes) -> None:
        """Performs the actions of the keys."""
        for key in _SEQUENCE.sub("", data.decode("utf-8", "replace")):
            self._press(key)

    def _press(self, key: str) -> None:
        asked = self._region.asked
        if self._asks:
            self._asks = False
            self._ask("")
            if key in "yY":
                self._actions.stop()
        elif self._typed is not None:
            self._type(key)
        elif asked.help:
            self._region.asked = replace(asked, help=())
            if key in "qQ":
                self._do(key)
        else:
            self._do(key)

    def _do(self, key: str) -> None:
        match key:
            case "?" | "h":
                self._region.asked = replace(self._region.asked, help=self._help())
            case "q" | "Q" if self._actions.stop_question:
                self._asks = True
                self._ask(self._actions.stop_question)
            case "q" | "Q":
                self._actions.stop()
            case "d" | "D" if self._actions.detach is not None:
                self._actions.detach()
            case "s":
                self._actions.stacks()
            case "a":
                self._select("")
            case "l":
                self._type("")
            case _ if key in "123456789":
                self._choose(key)

    def _type(self, key: str) -> None:
        typed = self._typed or ""
        if key in ENTER:
            self._typed = None
            self._ask("")
            self._choose(typed)
            return
        if key == ESCAPE:
            self._typed = None
            self._ask("")
            return
        typed = typed[:-1] if key in BACKSPACE else (typed + key)[:40] if key.isprintable() else typed
        self._typed = typed
        self._ask(f"Only the log of task {typed}_   (number or name, Enter; Esc: as before)")

    def _choose(self, typed: str) -> None:
        tasks = self._region.tasks
        if typed.isdecimal() and 1 <= int(typed) <= len(tasks):
            self._select(tasks[int(typed) - 1])
        elif typed in tasks:
            self._select(typed)

    def _select(self, task: str) -> None:
        self._region.asked = replace(self._region.asked, selected=task)
        self._actions.show_only(task)

    def _ask(self, prompt: str) -> None:
        self._region.asked = replace(self._region.asked, prompt=prompt)

    def _help(self) -> list[str]:
        lines = ["1 to 9   only the log of that task", "l        only the log of a task by its number or name"]
        lines += ["a        the logs of all tasks", "s        the Python stacks of all tasks"]
        if self._actions.detach is not None:
            lines.append(f"d        {self._actions.detach_text}")
        return [*lines, f"q        {self._actions.stop_text}", "any other key closes this help"]

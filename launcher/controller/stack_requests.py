"""Collects the Python stacks of all tasks of an attempt."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.controller.context import RunContext
from launcher.gang.events import StacksReceived
from launcher.gang.state import AttemptState
from launcher.gang.watch.stacks import StackCollector, render_stacks
from launcher.tasks import parse_task_id
from worker_entry.protocol.messages import Stacks
from worker_entry.protocol.orders import ShowStacks


class StackRequests:
    """The stack requests of an attempt, at most one at a time."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._collector: StackCollector | None = None
        self._shows = self._tells = False
        self.text = ""
        """The last answers, as text."""
        self.count = 0
        """How often all tasks have been shown."""

    def ask(self, state: AttemptState, *, show: bool = False, tell: bool = False) -> None:
        """Asks all running tasks, unless a request is pending.

        Args:
            state: the attempt.
            show: whether the terminal shows the answers.
            tell: whether a message names the file of the answers.
        """
        self._shows, self._tells = self._shows or show, self._tells or tell
        if self._collector is None:
            self._collector = StackCollector(
                state.started.keys() - state.exits.keys(), self._context.timing.monotonic()
            )
            for node in state.occupied:
                self._context.links.send(node, ShowStacks())

    def note(self, message: Stacks) -> None:
        """Adds one task's answer.

        Raises:
            ValueError: the message names no task.
        """
        if self._collector is not None:
            self._collector.note(parse_task_id(message.task), message.text, message.activity)

    def take(self) -> Iterator[StacksReceived]:
        """Yields the answers once all tasks have answered or the time limit has passed."""
        texts = self._collector.texts(self._context.timing.monotonic()) if self._collector is not None else None
        if self._collector is None or texts is None:
            return
        activity, self._collector = self._collector.activity, None
        self.text = render_stacks(texts)
        self.count += 1
        problem = self._context.files.write_stacks(f"{self.text}\n")
        if problem:
            self._context.console.warn(problem)
        line = f"The stacks of all tasks are in {self._context.files.stacks}" if self.text else "No task is running"
        if self._shows:
            self._context.console.note(self.text or line, record=problem or line)
        elif self._tells and not problem:
            self._context.console.note(line)
        self._shows = self._tells = False
        yield StacksReceived(texts, activity)

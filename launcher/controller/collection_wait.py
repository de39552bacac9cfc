"""Waits until the files of a run's nodes have arrived."""

from __future__ import annotations

import functools
from collections.abc import Callable

from launcher.controller.attempt import IDLE_S
from launcher.controller.collect.collector import Collector
from launcher.controller.context import RunContext
from launcher.controller.inbox import tell_link
from launcher.controller.links import NodeLinks
from launcher.signals import STACKS_SIGNAL, Interrupts
from launcher.transports.base import LinkDropped, LinkNote, LinkResumed

SHOW_S = 10.0
"""How often the progress is shown."""
PATIENCE_S = 300.0
"""How long to wait without progress: a large folder takes long to list, and the disk of a node may hang."""


class Progress:
    """Shows the progress every `every_s` seconds of the clock."""

    def __init__(self, show: Callable[[str], None], every_s: float, monotonic: Callable[[], float]) -> None:
        self._show = show
        self._every_s = every_s
        self._monotonic = monotonic
        self._due = monotonic() + every_s

    def note(self, progress: str) -> None:
        """Shows the current progress if it is due."""
        if progress and self._monotonic() >= self._due:
            self._due = self._monotonic() + self._every_s
            self._show(progress)


def collect_at_end(context: RunContext, interrupts: Interrupts, *, is_urgent: bool) -> None:
    """Fetches the files of all nodes; a signal stops the transfer.

    Args:
        context: the context of the run, whose attempts are over.
        interrupts: the user's signals.
        is_urgent: whether there is no time to fetch files.
    """
    collector, console = context.collector, context.console
    if is_urgent:
        collector.skip("the run had to end at once")
        return
    collector.begin()
    if not collector.is_busy:
        return
    console.note(f"Collecting files in {context.files.collected}; Ctrl-C stops that")
    signals: list[int] = []
    interrupts.deliver_to(lambda signum, _: None if signum == STACKS_SIGNAL else signals.append(signum))
    progress = Progress(lambda text: console.note(f"Collecting files: {text}"), SHOW_S, context.timing.monotonic)

    def goes_on() -> bool:
        context.journal.touch()
        progress.note(collector.render_progress())
        return not signals

    if not await_files(collector, context.links, goes_on, functools.partial(tell_link, context, has_tasks=False)):
        collector.stop("stopped by the user")
    collector.close()


Tell = Callable[[str, LinkDropped | LinkResumed | LinkNote], None]


def await_files(
    collector: Collector, links: NodeLinks, goes_on: Callable[[], bool], tell: Tell = lambda _node, _news: None
) -> bool:
    """Reads the links until all files have arrived, or no more arrive; returns False once `goes_on` returns False."""
    due = links.timing.monotonic() + PATIENCE_S
    while collector.is_busy:
        if not goes_on():
            return False
        if links.timing.monotonic() > due:
            collector.stop(f"nothing has come for {PATIENCE_S:g} s")
        incoming = links.next(IDLE_S)
        if not isinstance(incoming, tuple):
            continue
        node, message = incoming
        if isinstance(message, (LinkDropped, LinkResumed, LinkNote)):
            tell(node, message)
        if collector.note(node, message):
            due = links.timing.monotonic() + PATIENCE_S
    return True

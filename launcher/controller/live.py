"""The live view of a run in its own terminal: the source of its status, and the actions of its keys."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from launcher.console.keyboard import Keyboard, single_keys, suspending
from launcher.console.writer import Console
from launcher.controller.detach import Detachment
from launcher.report.status_report import RunStatus
from launcher.signals import STACKS_SIGNAL, Interrupts
from launcher.tasks import parse_task_id

LOOK_S = 0.5
"""How often a background job checks whether it is in the foreground."""

END_S = 1.0
"""How long the thread may take to end."""


def show_run(console: Console, make_status: Callable[[], RunStatus]) -> None:
    """Shows the run in the console's live view, if it has one; `make_status` is called on the console's thread."""
    if console.region is not None:
        from launcher.console.live_view import Seen

        console.region.look = lambda: Seen(make_status())


@contextlib.contextmanager
def keys_taken(
    console: Console, interrupts: Interrupts, directory: Path, detachment: Detachment | None
) -> Iterator[None]:
    """With the live view: reads keys, gives the terminal back while suspended, and watches the waiting process."""
    parent = detachment.parent if detachment is not None else -1
    if console.region is None:
        yield
        return
    from launcher.console.keys import KeyActions, Keys

    def leave() -> None:
        assert detachment is not None
        interrupts.ignore_hangup()
        keyboard.give_back()
        detachment.leave(console, directory)

    def show_only(task: str) -> None:
        console.show_only(parse_task_id(task) if task else None)

    actions = KeyActions(
        stop=partial(interrupts.ask, signal.SIGINT),
        stop_text="stop the run after confirmation; Ctrl-C stops it at once",
        stop_question="Stop the run? y/n",
        detach=leave if parent >= 0 else None,
        detach_text="detach; the run continues in the background",
        stacks=partial(interrupts.ask, STACKS_SIGNAL),
        show_only=show_only,
    )
    with single_keys() as keyboard:
        keys = Keys(console.region, actions, has_keys=keyboard.exists)

        def press(data: bytes) -> None:
            keys.press(data)
            console.redraw()

        def pause() -> None:
            console.pause()
            keyboard.give_back()

        def resume() -> None:
            keyboard.allow()
            watch.wake()
            console.resume()

        with (
            _Watch(keyboard, press, parent, partial(interrupts.ask, signal.SIGHUP)) as watch,
            suspending(pause, resume),
        ):
            yield


class _Watch:
    """A thread that waits for keys, and for the end of the waiting process.

    Args:
        keyboard: the source of keys; a shell's `fg` may make it ours without a signal.
        press: called with the keys.
        parent: the pipe that ends with the waiting process; -1 if there is none.
        orphaned: called when the waiting process has ended.
    """

    def __init__(
        self,
        keyboard: Keyboard,
        press: Callable[[bytes], None],
        parent: int,
        orphaned: Callable[[], None],
    ) -> None:
        self._keyboard = keyboard
        self._press = press
        self._parent = parent
        self._orphaned = orphaned
        self._wakes, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="keys", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._wake)
        self._thread.join(END_S)  # the thread hangs if another program reads the keys that it waits to read

    def wake(self) -> None:
        """Makes the thread check the keyboard again."""
        os.write(self._wake, b"\0")

    def _run(self) -> None:
        # A background job that reads the terminal gets an error instead of being stopped.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN, signal.SIGTTOU})
        dead = -1
        while True:
            self._keyboard.take()
            keys = [descriptor for descriptor in self._keyboard.readable if descriptor != dead]
            may_come = not keys and self._keyboard.exists
            parent = [self._parent] if self._parent >= 0 else []
            ready, _, _ = select.select([self._wakes, *keys, *parent], [], [], LOOK_S if may_come else None)
            if self._wakes in ready:
                dead = -1
                if not os.read(self._wakes, 64):
                    os.close(self._wakes)
                    return
            if self._parent in ready:
                self._parent = -1
                self._orphaned()
            for descriptor in keys:
                if descriptor in ready and not self._take(descriptor):
                    dead = descriptor  # until we are in the foreground again

    def _take(self, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, 64)
        except OSError:
            return False
        if data:
            self._press(data)
        return bool(data)

"""Output of a notebook's cell that changes while a cluster runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

EVERY_S = 1.0
"""The interval between two updates."""


class LiveOutput:
    """The output of the current cell; a thread updates it until the run is over.

    Args:
        render: returns the HTML to show; None leaves the output as it is.
        over: set when the run is over; the output is then updated once more.
    """

    def __init__(self, render: Callable[[], str | None], over: threading.Event) -> None:
        from IPython.display import HTML, display

        self._render = render
        self._over = over
        self._make = HTML
        self._handle = display(HTML(render() or ""), display_id=True)
        self._thread = threading.Thread(target=self._run, name="distlaunch-notebook", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when the output shows the end of the run; call it once the run is over."""
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._update()
        self._update()

    def _update(self) -> None:
        html = self._render()
        if html is not None:
            self._handle.update(self._make(html))


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None

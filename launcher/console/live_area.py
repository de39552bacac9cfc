"""Draws the area below the log lines of a terminal; runs on the console's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from launcher.console.followed_log import FollowedLog
from launcher.console.terminal import Sink

if TYPE_CHECKING:
    from launcher.console.live_region import LiveRegion


class LiveArea:
    """The live view, or only the unfinished lines of tasks.

    Args:
        region: the live view; None without one.
        colour: whether unfinished lines keep their colours.
        is_ours: whether we may draw on the terminal; False while we are a background job of a shell.
    """

    def __init__(self, region: LiveRegion | None, *, colour: bool, is_ours: Callable[[], bool]) -> None:
        self.region = region
        self.is_hidden = False
        """Whether nothing is drawn, because this process is about to be suspended."""
        self._colour = colour
        self._is_ours = is_ours

    def draw(self, sink: Sink, logs: Iterable[FollowedLog]) -> None:
        """Shows the lines if the next picture is due; `logs`: the logs whose unfinished lines are shown."""
        if not sink.has_live_lines or not sink.is_due():
            return
        is_ours = self._is_ours()
        if not is_ours:
            sink.forget()
        sink.show_live(self._make_lines(sink, logs) if is_ours and not self.is_hidden else [])

    def _make_lines(self, sink: Sink, logs: Iterable[FollowedLog]) -> list[str]:
        # Imported here: a pipe needs no rich.
        from launcher.console.live_region import Unfinished, render_unfinished

        unfinished = [Unfinished(log.task, log.label, text) for log in logs if (text := log.lines.unfinished)]
        if self.region is not None:
            try:
                return self.region.lines(sink.size, unfinished)
            except Exception as error:  # noqa: BLE001 - a failed picture must not cost log lines or the run's verdict
                return [f"the live view has failed: {error!r}".partition("\n")[0]]
        return render_unfinished(unfinished, sink.size, colour=self._colour)

"""The training that counts, as a line over all attempts: how many seconds of training it took to reach each place.

An attempt that resumes from a checkpoint continues at an earlier place of the line. The training after that place is
lost.
"""

from __future__ import annotations

from worker_entry.protocol.frozen import dataclass

LIMIT = 4096
"""The most points; beyond that, every second point is removed. Times between two points are interpolated."""


@dataclass(frozen=True)
class Place:
    """How far a training is: `total` steps since its very beginning, if known.

    `epoch` (0 if the program reports none) and `step` are the program's own numbers; either may start again.
    """

    step: int
    epoch: int = 0
    total: int | None = None


class TrainingLine:
    """Seconds of training against places."""

    def __init__(self) -> None:
        self.trained_s = 0.0
        """Seconds of all training that counts, up to the end of the last finished attempt."""
        self._points: list[tuple[float, Place]] = []

    def go_on_from(self, place: Place) -> float:
        """Notes that an attempt begins at this place; returns the seconds of training that are lost."""
        begins_s = self._find(place)
        lost_s, self.trained_s = self.trained_s - begins_s, begins_s
        self._points = [point for point in self._points if point[0] <= begins_s and not _is_after(point[1], place)]
        self._points.append((begins_s, place))
        return lost_s

    def add(self, seconds: float, place: Place) -> None:
        """Notes that the attempt has reached this place; ignores calls out of order."""
        if self._points and (seconds < self._points[-1][0] or (seconds, place) == self._points[-1]):
            return
        self._points.append((seconds, place))
        if len(self._points) > LIMIT:
            del self._points[1:-1:2]

    def end(self, seconds: float) -> None:
        """Notes that the attempt is over, `seconds` of training after the line's beginning."""
        self.trained_s = seconds
        self._points = [(min(at, seconds), place) for at, place in self._points]

    def _find(self, place: Place) -> float:
        """The seconds of training that it took to reach the place."""
        points = self._points
        if place.total is not None and any(point.total is None for _, point in points):
            place = Place(place.step, place.epoch)  # an earlier attempt reported no totals
        after = next((index for index, (_, point) in enumerate(points) if _is_after(point, place)), len(points))
        if after == 0:
            return 0.0
        (since_s, before), (until_s, beyond) = points[after - 1], points[min(after, len(points) - 1)]
        if after == len(points):  # the place is after the last report
            return self._find_beyond(place)
        first, last, here = _number(before, place), _number(beyond, place), _number(place, place)
        if not first <= here < last:  # the program's steps start again with each epoch or attempt
            return (since_s + until_s) / 2
        return since_s + (until_s - since_s) * (here - first) / (last - first)

    def _find_beyond(self, place: Place) -> float:
        """The seconds for a place after the last point, at the pace of the last two points."""
        (before_s, before), (last_s, last) = self._points[-2:] if len(self._points) > 1 else self._points * 2
        steps, more = (
            _number(last, place) - _number(before, place),
            _number(place, place) - _number(last, place),
        )
        if more < 0 or (more and steps <= 0) or (place.total is None and place.epoch != last.epoch):
            return self.trained_s
        return min(last_s + ((last_s - before_s) * more / steps if more else 0.0), self.trained_s)


def _is_after(point: Place, place: Place) -> bool:
    if point.total is not None and place.total is not None:
        return point.total > place.total
    return (point.epoch, point.step) > (place.epoch, place.step)


def _number(point: Place, place: Place) -> int:
    """The number by which the point is compared with the place."""
    return point.total if point.total is not None and place.total is not None else point.step

"""Curves: a bounded number of points with all extremes, and their short form in the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from worker_entry.protocol.frozen import dataclass

LARGEST = 1e300
"""Values from here on cannot be rounded."""

Point = tuple[float, float | None]
"""Time and value; None is a gap in the curve."""


@dataclass(frozen=True)
class Series:
    """One curve.

    `points` are in the order of their times. `fills`: whether the area to the curve before is filled. `wide`: whether
    the line is so wide that it shows on both sides of an equal curve.
    """

    label: str
    points: Sequence[Point]
    fills: bool = False
    wide: bool = False

    @property
    def values(self) -> list[float]:
        """The values that are numbers."""
        return [value for _, value in self.points if value is not None]


@dataclass(frozen=True)
class Summary:
    """The summary of a curve in numbers."""

    label: str
    least: float
    middle: float
    most: float
    last: float


def summarize(series: Series) -> Summary | None:
    """The curve's numbers; None if it has no value."""
    values = series.values
    if not values:
        return None
    return Summary(series.label, min(values), median(values), max(values), values[-1])


def make_series(label: str, pieces: Iterable[Sequence[tuple[float, float | None]]]) -> Series:
    """A curve of several pieces, with a gap between consecutive pieces; without values that cannot be shown."""
    points: list[Point] = []
    for piece in pieces:
        finite = [(time, value) for time, value in piece if value is not None and abs(value) < LARGEST]
        if finite and points:
            points.append(((points[-1][0] + finite[0][0]) / 2, None))
        points += finite
    return Series(label, points)


def downsample(points: Sequence[Point], limit: int) -> list[Point]:
    """At most about `limit` of the points: the least and the greatest value of each stretch of time.

    Keeps the first and the last point, and the gaps between pieces. Each stretch, or part of it between gaps, keeps at
    most two points, so only gaps can make the result exceed `limit`.
    """
    if len(points) <= limit:
        return list(points)
    first, last = points[0][0], points[-1][0]
    stretches = max((limit - 2) // 2, 1)
    width = (last - first) / stretches or 1.0
    kept: list[Point] = [points[0]]
    bucket: list[Point] = []
    number = 0
    for point in points[1:-1]:
        which = min(int((point[0] - first) / width), stretches - 1)
        if which != number or point[1] is None:
            kept += _extremes(bucket)
            bucket, number = [], which
        if point[1] is None:
            if kept[-1][1] is not None:
                kept.append(point)
        else:
            bucket.append(point)
    kept += _extremes(bucket)
    kept.append(points[-1])
    return kept


def _extremes(bucket: Sequence[Point]) -> list[Point]:
    """The points with the least and the greatest value, in order."""
    if len(bucket) <= 2:
        return list(bucket)
    numbers = [(value, index) for index, (_, value) in enumerate(bucket) if value is not None]
    return [bucket[index] for index in sorted({min(numbers)[1], max(numbers)[1]})]


def pack(points: Sequence[Point], *, start: float) -> dict[str, list[float | int | None]]:
    """The points for the page's script: each `x` is the difference from the previous point, in milliseconds."""
    xs: list[float | int | None] = []
    before = 0
    for time, _ in points:
        now = round((time - start) * 1000)
        xs.append(now - before)
        before = now
    return {"x": xs, "y": [None if value is None else shorten(value) for _, value in points]}


def shorten(value: float) -> float | int:
    """The value with five significant digits."""
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share of the ordered values lies."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

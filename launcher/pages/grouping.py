"""Many curves as a few: their median, the band in which most of them lie, and by name those that differ."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from launcher.pages.series import Point, Series, quantile

MOST_CURVES = 12
"""More curves cannot be told apart."""
WINDOWS = 200
"""How many windows of time the values are grouped into."""
BAND = (0.1, 0.9)
"""The shares of the curves below the band's edges."""
ODD = 6
"""The most curves that are shown by name."""
FAR, LEAST_SHARE = 5.0, 0.1
"""A curve differs if its median is further from the middle than FAR times the usual distance, and than LEAST_SHARE."""


def group_curves(curves: Sequence[Series]) -> list[Series]:
    """The curves, if there are few of them; otherwise the median, the edges of the band, and the curves that differ."""
    if len(curves) <= MOST_CURVES:
        return list(curves)
    windows = _group_by_time(curves)
    below, above = ([(at, quantile(values, share)) for at, values in windows] for share in BAND)
    middle: list[Point] = [(at, median(values)) for at, values in windows]
    return [
        Series(f"median of {len(curves)}", middle),
        Series(f"{BAND[0]:.0%} are below", below),
        Series(f"{BAND[1]:.0%} are below", above, fills=True),
        *find_odd(curves),
    ]


def find_odd(curves: Sequence[Series]) -> list[Series]:
    """The curves that differ from most of the others, in their order; at most ODD, the furthest."""
    typical = [median(each.values) for each in curves]
    centre = median(typical)
    usual = median(abs(value - centre) for value in typical)
    limit = max(FAR * usual, LEAST_SHARE * abs(centre))
    away = {index: abs(value - centre) for index, value in enumerate(typical) if abs(value - centre) > limit}
    furthest = sorted(away, key=lambda index: -away[index])[:ODD]
    return [curves[index] for index in sorted(furthest)]


def _group_by_time(curves: Sequence[Series]) -> list[tuple[float, list[float]]]:
    """The middle of each window of time that has values, and the ordered values of the curves in it, one for each."""
    times = [time for each in curves for time, value in each.points if value is not None]
    first, width = min(times), (max(times) - min(times)) / WINDOWS or 1.0
    windows: dict[int, dict[int, list[float]]] = {}
    for index, each in enumerate(curves):
        for time, value in each.points:
            if value is not None:
                windows.setdefault(int((time - first) / width), {}).setdefault(index, []).append(value)
    return [
        (first + (number + 0.5) * width, sorted(map(fmean, windows[number].values()))) for number in sorted(windows)
    ]

"""The format of times, durations, sizes and rates in a page."""

from __future__ import annotations

import math
from datetime import datetime, timezone

from launcher.wording import render_age


def render_moment(time: float) -> str:
    """`2026-11-22 10:16:40 UTC`; empty for a time outside the calendar."""
    try:
        return f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return ""


def render_times(begin: float, end: float) -> str:
    """`2026-11-22 10:16:40 to 10:18:05 UTC`; with both dates if they differ."""
    first, last = render_moment(begin), render_moment(end)
    return f"{first[:-4]} to {last[11:] if first[:10] == last[:10] else last}"


def render_duration(seconds: float) -> str:
    """`0.32 s`, `10.4 s`, `3 min 20 s`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds >= 60:
        return render_age(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms" if seconds > 0 else "0 s"


def render_offset(seconds: float) -> str:
    """The time since the start: `0:05`, `1:02:03`, `2 d 1:02:03`."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(round(seconds), 0)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    clock = f"{hours}:{minutes:02}:{whole % 60:02}" if whole >= 3600 else f"{minutes}:{whole % 60:02}"
    return f"{days} d {clock}" if days else clock


def render_rate(value: float) -> str:
    """`25.1`, `1,240`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def render_value(value: float, unit: str) -> str:
    """A value with its unit, as in the curves: `B` and `B/s` in powers of 1024, `s` in ms if it is short."""
    if unit in ("B", "B/s"):
        for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
            if abs(value) < 1024 or prefix == "Ti":
                return f"{value:.3g} {prefix}{unit}" if abs(value) < 1000 else f"{value:.0f} {prefix}{unit}"
            value /= 1024
    if unit == "s":
        return f"{value * 1000:.4g} ms" if abs(value) < 1 else f"{value:.4g} s"
    if unit == "%":
        return f"{value:.1f} %"
    return f"{value:.4g}{f' {unit}' if unit else ''}"

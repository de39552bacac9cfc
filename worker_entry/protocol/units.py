"""The one format of sizes."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def render_size(size: float) -> str:
    """`0 B`, `80 KiB`, `1.21 GiB`; `size`: bytes."""
    for unit in UNITS:
        if abs(size) < 1023.5 or unit == UNITS[-1]:
            break
        size /= 1024
    return f"{size:.3g} {unit}" if abs(size) < 999.5 else f"{size:,.0f} {unit}"

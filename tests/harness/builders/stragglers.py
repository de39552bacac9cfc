"""Workers' reports of their steps."""

from __future__ import annotations

from launcher.gang.watch.stragglers import (
    WINDOW_S,
    WINDOWS,
)

ENOUGH_S = round(WINDOW_S * (WINDOWS + 2))
"""Seconds after which a slow task has been named."""

"""Specs of runs that restart."""

from __future__ import annotations

from typing import Any


def restarting(limit: int = 1, **fields: Any) -> dict[str, Any]:
    return {"restart": {"max_restarts": limit, **fields}}

"""Reports of the Keras patches while a program trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from worker_entry.protocol.values import ModelDigest


class News(NamedTuple):
    """`say` logs a line; `report_model` passes a digest on."""

    say: Callable[[str], None]
    report_model: Callable[[ModelDigest], None]

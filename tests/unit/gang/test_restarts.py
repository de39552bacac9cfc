"""Whether a failed cluster is started again, and when, depending on what failed."""

from __future__ import annotations

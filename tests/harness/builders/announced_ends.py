"""Ends of nodes that an engine has announced."""

from __future__ import annotations

from launcher.gang.events import EndAnnounced

PREEMPTED = EndAnnounced("preempted", "Slurm preempted job 7", ("its words",), 20.0)
CANCELLED = EndAnnounced("interrupted", "job 7 was cancelled", (), 20.0)
MEMORY = EndAnnounced("out-of-memory", "job 7 exceeded its memory limit", ("its words",), stays=True)

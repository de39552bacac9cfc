"""The order of the folders of both packages."""

from __future__ import annotations

LAUNCHER = [
    "spec",
    "plan",
    "gang",
    "verdict",
    "report",
    "pages",
    "console",
    "slurm",
    "kubernetes",
    "transports",
    "rundir",
    "sources",
    "exporters",
    "controller",
    "commands",
    "python",
    "cli",
]
"""Folders in the order of a run. Each may import the folders before it, and BASICS."""
WORKER_ENTRY: dict[str, set[str]] = {
    "protocol": set(),
    "system": {"protocol"},
    "program": {"protocol", "system"},
    "bootstrap": {"system"},
    "agent": {"protocol", "system", "program", "bootstrap"},
    "hooks": {"protocol", "system"},
    "keras_patches": {"protocol", "system", "hooks"},
    "task": {"protocol", "system", "program", "hooks", "keras_patches"},
    "progress": {"task"},
    "strategies": {"protocol"},
    "demo": {"progress", "strategies"},
    "children": {"task"},
    "pod": {"protocol", "program", "agent"},
    "__main__": {"agent", "pod", "task"},
}
"""Folders and modules, each with the folders and modules that it may import."""

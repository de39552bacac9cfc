"""Programs that are at work."""

from __future__ import annotations

import textwrap
from pathlib import Path

LOOP = """
    import os, sys, threading, time
    from worker_entry import progress
    mine = os.environ["DISTLAUNCH_TASK"] == "worker:1"
    began = time.monotonic()
"""


def write(folder: Path, source: str) -> str:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(LOOP) + textwrap.dedent(source))
    return str(program)

"""Folders of runs, written by hand: logs with their indexes, and distlaunch's messages."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.rundir.owner import this_process
from worker_entry.protocol.log_index import SUFFIX, LogIndex

Lines = Sequence[tuple[float, str | bytes]]
"""Lines with their times; bytes get no line break, so bytes without one are the beginning of the next line."""


class RunFolder:
    """A run in a folder; `running`: its controller is this process; otherwise it has ended."""

    def __init__(self, root: Path, *, running: bool = False) -> None:
        self.root = root
        root.mkdir(parents=True)
        self.note(ended=not running)

    def note(self, *, ended: bool, pid: int | None = None, **facts: Any) -> None:
        """Writes run.json; `pid`: of its controller."""
        controller = asdict(this_process()) | ({"pid": pid} if pid is not None else {})
        text = json.dumps({"run_id": self.root.name, "controller": controller, "ended": ended, **facts})
        temporary = self.root / ".run"
        temporary.write_text(text)
        temporary.replace(self.root / "run.json")

    def log(self, task: str, attempt: int = 1) -> Path:
        return self.root / f"attempt-{attempt}" / f"{task.replace(':', '-')}.log"

    def write(self, task: str, lines: Lines, *, attempt: int = 1, indexed: bool = True) -> bytes:
        """Appends lines to a log; returns the whole log."""
        path = self.log(task, attempt)
        path.parent.mkdir(exist_ok=True)
        index = LogIndex(f"{path}{SUFFIX}") if indexed else None
        with path.open("ab", buffering=0) as file:
            for moment, line in lines:
                file.write(line if isinstance(line, bytes) else f"{line}\n".encode())
                if index is not None:
                    index.note(os.fstat(file.fileno()).st_size, moment)
        if index is not None:
            index.close()
        return path.read_bytes()

    def say(self, moment: float, text: str, *, level: str = "note", attempt: int = 1) -> None:
        self.append({"time": moment, "attempt": attempt, "event": "said", "level": level, "text": text})

    def append(self, entry: Mapping[str, Any]) -> None:
        """Adds a line to events.jsonl."""
        with (self.root / "events.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

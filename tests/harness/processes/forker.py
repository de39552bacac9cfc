"""A forkserver, as an agent uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.harness.places import PROGRAMS
from tests.harness.processes.task_runs import Ended, readable
from worker_entry.protocol.values import TaskExit


class Forker:
    """A forkserver with the test's own TensorFlow, and the process that asks it for tasks."""

    def __init__(
        self,
        folder: Path,
        tensorflow: str | None = "",
        modules: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        framework: str = "tensorflow",
        files: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        for name, source in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(source)
        folder.mkdir(exist_ok=True)
        if tensorflow is not None:  # else the real one
            (folder / "tensorflow.py").write_text(tensorflow)
        self.env = {"PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1", **(env or {})}
        preload = json.dumps({"env": self.env, "modules": modules, "cwd": str(cwd or folder), "framework": framework})
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "fork_tasks.py"), preload, str(folder / "forkserver.log")],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self._hear()
        self.problem: str = said["problem"]
        self.forkserver = psutil.Process(said["pids"][0]) if said["pids"] else None

    @property
    def order_file(self) -> Path:
        """Exists if the last program has started again as plain Python."""
        return self.folder / "task.log.order"

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        heard: dict[str, Any] = json.loads(self._process.stdout.readline())
        return heard

    def ask(self, cwd: Path, arguments: list[str], *, expected: bool = False, **env: str) -> tuple[dict[str, Any], str]:
        """Runs a program; returns its end and its output. `expected` means that its source was read before."""
        is_module = arguments[0] == "-m"
        target, *rest = arguments[is_module:]
        log = self.folder / "task.log"
        log.write_bytes(b"")
        self.order_file.unlink(missing_ok=True)
        program = {"kind": "module" if is_module else "script", "target": target, "args": rest}
        assert self._process.stdin is not None
        order = {"program": program, "env": env, "cwd": str(cwd), "log": str(log), "expected": expected}
        print(json.dumps(order), file=self._process.stdin)
        self._process.stdin.flush()
        return self._hear(), readable(log.read_bytes())

    def run(self, cwd: Path, arguments: list[str], *, expected: bool = False, **env: str) -> Ended:
        said, text = self.ask(cwd, arguments, expected=expected, **env)
        assert "problem" not in said, said
        how = TaskExit.from_wait_status(said["status"])
        return Ended(how.code if how.code is not None else -(how.signal or 0), text, "")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0

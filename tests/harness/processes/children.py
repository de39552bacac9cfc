"""Python processes that a task starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from worker_entry.protocol.child_order import make_child_env
from worker_entry.protocol.environment import CHILDREN as VARIABLE
from worker_entry.protocol.values import Program, TaskOrder


def run_python(*arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[str, str]:
    """Runs Python and returns its stdout and stderr."""
    clean = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "PYTHONPATH", "TF_CONFIG")}
    done = subprocess.run(
        [sys.executable, *arguments], env={**clean, **(env or {})}, cwd=cwd, capture_output=True, text=True, check=False
    )
    return done.stdout, done.stderr


def told(env: dict[str, str] | None = None, **order: Any) -> dict[str, str]:
    return make_child_env(TaskOrder(Program("script", "train.py"), **order), env or {})

"""`distlaunch doctor`, and what it reports."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from tests.harness.processes.commands import distlaunch_command


def run(*words: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    command, environ = distlaunch_command("doctor", "--json", *words), {**os.environ, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environ)
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report

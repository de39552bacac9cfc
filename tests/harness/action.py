"""The GitHub Action `.github/actions/test-resume`, and its shell step, run here as a runner runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.harness.places import ROOT

ACTION = ROOT / ".github" / "actions" / "test-resume" / "action.yml"
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")
"""What `shell: bash` means."""


def load_action() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    return loaded


def shell_steps() -> list[dict[str, Any]]:
    return [step for step in load_action()["runs"]["steps"] if "run" in step]


def run_test_step(folder: Path, inputs: dict[str, str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs the step that tests a program, in a folder with the files and variables of a runner.

    Args:
        folder: the user's repository; `runner/` is made beside it.
        inputs: the action's inputs; the others have their defaults.
        timeout: after this many seconds, the step hangs.
    """
    [step] = [step for step in shell_steps() if step.get("id") == "test"]
    known = {name: str(each.get("default", "")) for name, each in load_action()["inputs"].items()}
    runner = folder.with_name("runner")
    runner.mkdir()
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(runner),
        "GITHUB_OUTPUT": str(runner / "output"),
        "GITHUB_STEP_SUMMARY": str(runner / "summary"),
        **{name: {**known, **inputs}[value.split()[1].removeprefix("inputs.")] for name, value in step["env"].items()},
    }
    return subprocess.run(
        [*BASH, "-c", step["run"]],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )

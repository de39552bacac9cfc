"""How often `distlaunch test-resume` raises a false alarm about programs that resume exactly."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.harness.processes.commands import distlaunch_command
from tests.harness.processes.resume_programs import EXACT, FOLDER


def measure(runs: int) -> None:
    print("test-resume --quick of programs that resume exactly (goal: no false alarm)")
    alarms = 0
    for program in EXACT:
        said = [flaw for _ in range(runs) for flaw in _find_flaws(program.script)]
        alarms += len(said)
        print(f"  {program.script:<24} {len(said):>3} in {runs} tests  {', '.join(said)}", flush=True)
    print(f"  {'all':<24} {alarms:>3} in {runs * len(EXACT)} tests, of three faults each")


def _find_flaws(script: str) -> list[str]:
    """The flaws that the program is said to have."""
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(FOLDER, Path(place) / "programs")
        command = distlaunch_command("test-resume", "--quick", "--json", "-o", "out", script)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            return [done.stderr.splitlines()[-1]]
        return [flaw["reference"] for result in json.loads(done.stdout)["results"] for flaw in result["flaws"]]

"""`distlaunch ls` and a Tab with 500 runs, against `ls -l` and a Python that reads each run.json."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.pairs import Pair, time_command, time_pairs
from tests.harness.builders.runs_on_disk import GONE, append_events, write_run

COMMAND = str(Path(sys.executable).with_name("distlaunch"))
RUNS = 500
RIVAL = """
import json, subprocess, sys
from pathlib import Path
subprocess.run(["ls", "-l", sys.argv[1]], stdout=subprocess.DEVNULL, check=True)
for path in Path(sys.argv[1]).iterdir():
    facts = json.loads((path / "run.json").read_bytes())
    print(path.name, facts["ended"], facts["started"])
"""


def measure(runs: int) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as state:
        folder = Path(state, "distlaunch", "runs")
        _write_runs(folder)
        env = {"XDG_STATE_HOME": state}
        tab = {**env, "_DISTLAUNCH_COMPLETE": "bash_complete", "COMP_WORDS": "distlaunch\nwait\n2", "COMP_CWORD": "2"}
        listed = subprocess.run(
            [COMMAND, "ls", "-a", "--json"], env={**os.environ, **env}, capture_output=True, check=True
        )
        assert len(json.loads(listed.stdout)) == RUNS
        print(f"{RUNS} runs; rival: ls -l, and a Python that reads each run.json")
        for title, command, variables in (
            ("ls -a (goal: 0.5 s)", [COMMAND, "ls", "-a"], env),
            ("ls", [COMMAND, "ls"], env),
            ("a Tab (goal: 0.4 s)", [COMMAND], tab),
        ):
            yield Pair(
                title, *time_pairs(partial(time_command, command, variables), partial(_time_rival, folder), runs * 2)
            )


def _time_rival(folder: Path) -> float:
    return time_command([sys.executable, "-c", RIVAL, str(folder)])


def _write_runs(folder: Path) -> None:
    """Writes runs of which most have ended, some have lost their controller, and five are running."""
    said = {"time": 1.0, "attempt": 1, "event": "said", "level": "note", "text": "x" * 200}
    for number in range(RUNS):
        name = f"20261122-{number:06}-train-0000"
        if number % 100 == 99:
            files = write_run(folder / name, tasks=64)
        elif number % 10 == 9:
            files = write_run(folder / name, controller=GONE)
        else:
            files = write_run(folder / name, outcome="failed", reference="task-failed", exit_status=1)
        append_events(files, *[said] * 1000, {**said, "event": "state", "state": "running"})

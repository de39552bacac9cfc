"""`distlaunch logs` of a run that has ended, against `cat` of the same files; both through a pipe."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.pairs import Pair, time_pairs
from worker_entry.protocol.log_index import LogIndex

MEGABYTES = 1000
LINE = b"Epoch 1/5 " + b"x" * 69 + b"\n"
TASKS = 4


def measure(runs: int) -> Iterator[Pair]:
    print(f"logs of {MEGABYTES} MB in lines of {len(LINE)} bytes, from start to the last byte; rival: cat")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "run.json").write_text('{"run_id": "r", "ended": true}')
        _write(run, "one", 1)
        _write(run, "many", TASKS)
        cases = {
            "-f, one task, no prefix": ("one", ["worker:0", "-f", "--no-prefix"]),
            "one task": ("one", []),
            "one task, -t": ("one", ["-t"]),
            f"{TASKS} tasks": ("many", []),
            f"{TASKS} tasks, no prefix": ("many", ["--no-prefix"]),
            f"{TASKS} tasks, JSON": ("many", ["--json"]),
        }
        for title, (name, options) in cases.items():
            logs = sorted(map(str, (run / name / "attempt-1").glob("*.log")))
            ours, rival = time_pairs(
                lambda n=name, o=options: _drain([sys.executable, "-m", "launcher", "logs", str(run / n), *o]),  # type: ignore[misc]
                lambda paths=logs: _drain(["cat", *paths]),  # type: ignore[misc]
                runs,
            )
            yield Pair(title, [MEGABYTES / s for s in ours], [MEGABYTES / s for s in rival], "MB/s")


def _write(root: Path, name: str, tasks: int) -> None:
    """Writes a run's logs, each with an index that has a record every 64 kB."""
    folder = root / name / "attempt-1"
    folder.mkdir(parents=True)
    (root / name / "run.json").write_text('{"run_id": "r", "ended": true}')
    piece = LINE * (65_536 // len(LINE))
    for task in range(tasks):
        path = folder / f"worker-{task}.log"
        index = LogIndex(f"{path}.index")
        with path.open("wb") as log:
            for number in range(MEGABYTES * 1_000_000 // tasks // len(piece)):
                log.write(piece)
                index.note(log.tell(), 1.7e9 + number + task / tasks)
        index.close()


def _drain(command: Sequence[str]) -> float:
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        while process.stdout.read(1 << 20):
            pass
    assert process.returncode == 0
    return time.perf_counter() - started

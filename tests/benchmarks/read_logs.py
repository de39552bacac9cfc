"""`distlaunch logs` of a run that has ended, against `cat` of the same files; both through a pipe.

With prefixes, the rival is `sed`, which has the same to do.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.pairs import Pair, Row, time_pairs
from tests.harness.builders.runs_on_disk import write_run
from worker_entry.protocol.log_index import LogIndex

MEGABYTES = 1000
LINE = b"Epoch 1/5 " + b"x" * 69 + b"\n"
TASKS = 4
CAT, SED = ("cat",), ("sed", "s/^/worker:0 │ /")
ROWS = {
    "-f, one task": Row("`distlaunch logs -f` of one task, with prefixes", "`cat`"),
    "-f, one task; rival: sed": Row(
        "`distlaunch logs -f` of one task, with prefixes as sed adds them", "`sed 's/^/worker:0 │ /'`"
    ),
}


def measure(runs: int) -> Iterator[Pair]:
    print(f"logs of {MEGABYTES} MB in lines of {len(LINE)} bytes, from start to the last byte; rival: cat, or sed")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        _write(run, "one", 1)
        _write(run, "many", TASKS)
        cases = {
            "-f, one task, no prefix": ("one", ["worker:0", "-f", "--no-prefix"], CAT),
            "-f, one task": ("one", ["worker:0", "-f"], CAT),
            "-f, one task; rival: sed": ("one", ["worker:0", "-f"], SED),
            "one task": ("one", [], CAT),
            "one task, -t": ("one", ["-t"], CAT),
            f"{TASKS} tasks": ("many", [], CAT),
            f"{TASKS} tasks, no prefix": ("many", ["--no-prefix"], CAT),
            f"{TASKS} tasks, JSON": ("many", ["--json"], CAT),
        }
        for title, (name, options, rival) in cases.items():
            logs = sorted(map(str, (run / name / "attempt-1").glob("*.log")))
            mine, theirs = time_pairs(
                lambda n=name, o=options: _drain([sys.executable, "-m", "launcher", "logs", str(run / n), *o]),  # type: ignore[misc]
                lambda words=rival, paths=logs: _drain([*words, *paths]),  # type: ignore[misc]
                runs,
            )
            yield Pair(title, [MEGABYTES / s for s in mine], [MEGABYTES / s for s in theirs], "MB/s", ROWS.get(title))


def _write(root: Path, name: str, tasks: int) -> None:
    """Writes a run's logs, each with an index that has a record every 64 kB."""
    folder = write_run(root / name, outcome="succeeded", tasks=tasks).attempt(1)
    folder.mkdir()
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

"""The time from the command to the last worker's first all-reduce, if the previous run has kept TensorFlow warm."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.pairs import Pair, Row
from tests.benchmarks.start_time import BY_HAND, compare, start_ours, start_plain

KEEP = ("--keep-warm", "5m")
TRIVIAL = "import tensorflow\n"
STARTS = {
    workers: Row(f"start to first all-reduce with TensorFlow kept warm, {workers} worker{'s'[: workers > 1]}", rival)
    for workers, rival in BY_HAND.items()
}
WHOLE = Row("start to end of the same program with TensorFlow kept warm, 4 workers", BY_HAND[4])
IMPORT = Row("start to end of a program that only imports TensorFlow, kept warm", "`python trivial.py`")


def measure(runs: int) -> Iterator[Pair]:
    print("second start to the first all-reduce of the last worker; rival: N plain `TF_CONFIG=… python train.py &`")
    try:
        for workers, row in STARTS.items():
            start_ours(workers, *KEEP)
            ours, rival = [], []
            for _ in range(runs):
                ours.append(start_ours(workers, *KEEP))
                rival.append(start_plain(workers))
            yield from compare(workers, ours, rival, row, WHOLE if workers == 4 else None)
        yield _measure_trivial(runs)
    finally:
        subprocess.run([sys.executable, "-m", "launcher", "down", "--warm"], check=True, capture_output=True)


def _measure_trivial(runs: int) -> Pair:
    """Measures a program that only imports TensorFlow, from the command to its end."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "trivial.py")
        program.write_text(TRIVIAL)
        ours, rival = [], []
        for number in range(runs):
            place = ["--run-dir", f"{folder}/{number}", *KEEP]
            ours.append(_time([sys.executable, "-m", "launcher", "local", "-n", "1", *place, str(program)]))
            rival.append(_time([sys.executable, str(program)]))
    return Pair("a program that only imports TensorFlow, to its end", ours, rival, row=IMPORT)


def _time(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started

"""Every fault of `fault_matrix`, many times: which did not end as expected, and how long the end takes."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

from tests.harness.processes.fault_matrix import Cell, Played, all_cells, play

AT_ONCE = int(os.environ.get("DISTLAUNCH_FAULTS_AT_ONCE", "4"))
"""The number of simultaneous runs; they mostly wait."""


def measure(runs: int) -> None:
    cells = [cell for cell in all_cells() for _ in range(runs)]
    numbers = itertools.cycle(range(1, 100))
    print(f"{len(cells)} faults, {AT_ONCE} runs at once; seconds from the fault to the end, and to nothing left")
    results: dict[Cell, list[Played]] = {}
    failed: Counter[Cell] = Counter()
    with ThreadPool(AT_ONCE) as pool:
        for cell, result in pool.imap(lambda cell: (cell, _play(cell, next(numbers))), cells):
            if isinstance(result, str):
                failed[cell] += 1
                print(f"  FAILED {result}", flush=True)
                continue
            results.setdefault(cell, []).append(result)
            if len(results[cell]) + failed[cell] == runs:
                _print(cell, results[cell])
    print(f"{len(cells) - failed.total()} of {len(cells)} ended as expected, with nothing left")


def _print(cell: Cell, played: Sequence[Played]) -> None:
    columns = ([one.ended_s for one in played], [one.empty_s for one in played])
    shown = (f"{statistics.median(column):6.2f} (up to {max(column):5.2f})" for column in columns)
    print(f"  {cell!s:<45} {'  '.join(shown)}", flush=True)


def _play(cell: Cell, number: int) -> Played | str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return play(cell, Path(folder), number)
        except Exception as error:  # noqa: BLE001 - the others continue
            return f"{cell}: {error}"

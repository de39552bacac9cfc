"""`python -m tests.benchmarks.many_restarts [N] [TASKS]`: the resources of a run after very many restarts.

The program ends as if preempted. Such restarts do not count, so only this module's signal ends the run.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

LOOKS = (10, 100, 500, 1000, 2000, 5000, 10_000)
"""Numbers of restarts after which the processes are inspected."""
SPEC = """
name: many
program: {command: [sh, -c, "echo attempt; exit 143"]}
nodes: [{host: local, tasks: {worker: WORKERS}}]
restart: {max_restarts: 1, pause_s: 0}
"""


def main(restarts: int, tasks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec, run_dir = Path(folder, "many.yaml"), Path(folder, "run")
        spec.write_text(SPEC.replace("WORKERS", str(tasks)))
        command = [sys.executable, "-m", "launcher", "up", str(spec), "--run-dir", str(run_dir)]
        with Path(folder, "console").open("wb") as console:
            process = psutil.Popen(command, stdout=console, stderr=console)
        try:
            print(
                f"{tasks} tasks; restarts: memory, descriptors and threads of the controller; guardian's; agent's",
                flush=True,
            )
            for restart in (*(look for look in LOOKS if look < restarts), restarts):
                while not (run_dir / f"attempt-{restart + 1}").exists():
                    assert process.poll() is None, Path(folder, "console").read_text()[-2000:]
                    time.sleep(0.05)
                [guardian] = process.children()[:1]
                parts = [process, guardian, *guardian.children()[:1]]
                print(f"{restart:>6,}: {'; '.join(map(describe, parts))}", flush=True)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
        finally:
            if process.poll() is None:
                process.kill()
        report = json.loads((run_dir / "report.json").read_text())
        size = (run_dir / "report.json").stat().st_size
        print(f"report.json: {size / 1024:.0f} KiB, {len(report['attempts'])} attempts, left out: {report['left_out']}")
        last = Path(folder, "console").read_text().splitlines()[-24 - tasks :]
        print(*last, sep="\n")


def describe(process: psutil.Process) -> str:
    return (
        f"{process.memory_info().rss / 2**20:.1f} MiB, {process.num_fds()} descriptors, {process.num_threads()} threads"
    )


if __name__ == "__main__":
    main(*(int(text) for text in (*sys.argv[1:], *("2000", "2")[len(sys.argv) - 1 :])))

"""`python -m tests.benchmarks.verdicts.by_hand PROGRAM ARGS…`: what a person does without a launcher, in three shells.

It starts each worker with its TF_CONFIG, and waits until all have ended. The first that ends is the answer, with the
last traceback of its output, unless all end with status 0.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.verdicts.faults import WORKERS

_TRACEBACK = re.compile(
    r"(?<!following exception:\n\n)(?<!another exception occurred:\n\n)^Traceback \(most", re.MULTILINE
)
"""The begin of a traceback that does not follow from the one above it."""
TAIL = 5
"""How many of the last lines a person reads if there is no traceback."""


def main(argv: list[str]) -> None:
    logs = [Path(f"worker-{index}.log") for index in range(WORKERS)]
    addresses = _find_addresses()
    processes = [_start(argv, index, addresses, logs[index]) for index in range(WORKERS)]
    ends: dict[int, int] = {}
    while len(ends) < WORKERS and not any(ends.values()):
        time.sleep(0.01)
        for index, process in enumerate(processes):
            if index not in ends and (status := process.poll()) is not None:
                ends[index] = status
    if not any(ends.values()):
        print("all ended with 0", flush=True)
        return
    first, status = next(iter(ends.items()))
    print(f"worker:{first} ended first with {status}", flush=True)
    print(signal.Signals(-status).name if status < 0 else "", flush=True)
    print(read_cause(logs[first].read_text(errors="replace")), flush=True)
    for process in processes:
        process.wait()


def read_cause(log: str) -> str:
    """The end of a log, from its last traceback on, with those from which this one follows."""
    starts = [found.start() for found in _TRACEBACK.finditer(log)]
    return log[starts[-1] :] if starts else "\n".join(log.splitlines()[-TAIL:])


def _find_addresses() -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(WORKERS)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _start(argv: list[str], index: int, addresses: list[str], log: Path) -> subprocess.Popen[bytes]:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *argv],
            env={**os.environ, "TF_CONFIG": json.dumps(config)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


if __name__ == "__main__":
    main(sys.argv[1:])

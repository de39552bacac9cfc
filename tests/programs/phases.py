"""Holds a run in each phase: opens its port once DIR/form exists, and ends once DIR/end exists.

`phases.py DIR`. It leaves a daemon behind that ignores SIGTERM; once DIR/stopping exists, it ignores SIGTERM itself.
Its `tensorflow` is the test's stand-in.
"""

import json
import os
import pathlib
import signal
import socket
import sys
import time

import tensorflow  # noqa: F401

directory = sys.argv[1]


def exists(name: str) -> bool:
    return os.path.exists(os.path.join(directory, name))


def count(index: int) -> int:
    """The number of steps that a worker has begun; all workers do the next step together."""
    path = pathlib.Path(directory, f"step-{index}")
    return int(path.read_text()) if path.exists() else 0


def become_daemon() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.wait()


def end(*_: object) -> None:
    if not exists("stopping"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


become_daemon()
signal.signal(signal.SIGTERM, end)
print(f"pid {os.getpid()}", flush=True)
while not exists("form"):
    time.sleep(0.05)
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.bind(("", int(config["cluster"][task["type"]][task["index"]].rpartition(":")[2])))
server.listen()
step = 0
while not exists("end"):
    step += 1
    pathlib.Path(directory, f"step-{task['index']}.new").write_text(str(step))
    os.replace(f"{directory}/step-{task['index']}.new", f"{directory}/step-{task['index']}")
    print("a step", flush=True)
    while not exists("end") and any(count(index) < step for index in range(2)):
        time.sleep(0.05)

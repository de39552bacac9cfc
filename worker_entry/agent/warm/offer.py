"""Offers a new run's connection to an agent that waits here with TensorFlow imported."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Optional

from worker_entry.agent.connection.reattach_calls import TAKEN
from worker_entry.agent.warm.fingerprint import find_fingerprint, make_key
from worker_entry.agent.warm.rendezvous import END, find_waiting, receive_line
from worker_entry.protocol.frozen import dataclass
from worker_entry.system import kernel

ANSWER_S = 5.0
END_S = 10.0
DESCRIPTORS = (0, 1, 2)
NO_ANSWER = "the agent of the last run does not answer"


@dataclass(frozen=True)
class Answer:
    """A waiting agent's answer.

    If the agent has taken the connection, `call` is the socket to it, and `reattach_folder` its folder; otherwise,
    `problem` is the reason.
    """

    call: Optional[socket.socket] = None
    reattach_folder: str = ""
    problem: str = ""


def offer_connection(*, outlives: bool) -> Optional[Answer]:
    """Offers this process's stdin and stdout; None if no agent waits.

    Args:
        outlives: whether the agent waits for its controller to come back when the connection breaks.
    """
    if not kernel.LINUX:
        return None
    with contextlib.suppress(OSError):
        for path, _ in find_waiting(make_key()):
            return _offer(path, outlives=outlives)
    return None


def _offer(path: str, *, outlives: bool) -> Answer:
    order = {
        "fingerprint": find_fingerprint(),
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "outlives": outlives,
    }
    call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        call.settimeout(ANSWER_S)
        call.connect(path)
        data = json.dumps(order).encode() + b"\n"
        sent = socket.send_fds(call, [data[:1]], DESCRIPTORS)
        call.sendall(data[sent:])
    except OSError as error:
        call.close()
        return Answer(problem=f"{NO_ANSWER}: {error}")
    return receive_answer(call)


def receive_answer(call: socket.socket) -> Answer:
    """The answer of the agent to which the connection was handed over."""
    try:
        answer = receive_line(call)
    except OSError as error:
        call.close()
        return Answer(problem=f"{NO_ANSWER}: {error}")
    text = answer[1:-1].decode(errors="surrogateescape")
    if answer[:1] == TAKEN:
        call.settimeout(None)
        return Answer(call, text)
    call.close()
    return Answer(problem=text)


def end_waiting() -> tuple[int, list[int]]:
    """Ends this user's waiting agents here; returns the number of ended processes, and the pids of those left."""
    found = [*find_waiting()]
    guardians = [process for _, facts in found if (process := kernel.look_up(facts.guardian)) is not None]
    processes = [*guardians, *(each for process in guardians for each in kernel.descendants(process.pid))]
    for path, _ in found:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
            call.settimeout(ANSWER_S)
            call.connect(path)
            call.sendall(END)
    until = time.monotonic() + END_S
    while (left := [process for process in processes if _lives(process)]) and time.monotonic() < until:
        time.sleep(0.01)
    return len(processes) - len(left), [process.pid for process in left]


def _lives(process: kernel.Process) -> bool:
    now = kernel.look_up(process.pid)
    return now is not None and now.started == process.started and not now.zombie

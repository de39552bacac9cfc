"""Connects to many nodes as the launcher does, and prints how long this takes, as JSON.

`python -m tests.benchmarks.connect_all (agent | true) PYTHON HOST…`: `agent` starts agents and stops them once all
are up, like a run without tasks; `true` runs `true` over connections of the same kind, without an agent.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.rundir.names import make_run_id
from launcher.transports.base import LinkNews
from launcher.transports.log_mirror import LogMirror
from launcher.transports.remote import RemoteTransport
from launcher.transports.ssh.config import SshTarget, load_target
from launcher.transports.ssh.connect import connect
from launcher.transports.ssh.connector import ParamikoConnector
from worker_entry.protocol.messages import Message, Ready
from worker_entry.protocol.orders import VERSION, Goodbye, Hello

ASKING_AT_ONCE = 8
CONNECTING_AT_ONCE = 32
CLOSING_AT_ONCE = 64
NODE_FILES = "~/.local/state/distlaunch/nodes"


def start_agents(targets: Sequence[SshTarget], python: str) -> float:
    """Says Hello to all nodes, then Goodbye, and waits for their ends; returns the time of the last answer to Hello."""
    news: queue.SimpleQueue[tuple[str, Message | LinkNews]] = queue.SimpleQueue()

    def deliver(node: str, message: Message | LinkNews, frame: int = 0) -> None:
        news.put((node, message))

    run_id = make_run_id("fan-out")
    hello = Hello(VERSION, run_id, str(Path(NODE_FILES, run_id)), "~", 60.0, stream_logs=True)
    mirror = LogMirror(lambda _attempt, _task: Path("/dev/null"))
    links = []
    for target in targets:
        link = RemoteTransport(ParamikoConnector(target), python).connect(target.host, deliver, mirror, hello.lease_s)
        link.send(hello)
        links.append(link)
    for _ in targets:
        node, message = news.get(timeout=120)
        assert isinstance(message, Ready), f"{node}: {message}"
    up = time.perf_counter()
    for link in links:
        link.send(Goodbye())
    with ThreadPoolExecutor(max_workers=CLOSING_AT_ONCE) as pool:
        assert set(pool.map(lambda link: link.close(), links)) == {0}
    return up


def run_true(targets: Sequence[SshTarget], _python: str) -> float:
    never = threading.Event()

    def run(target: SshTarget) -> int:
        connection = connect(target, cancelled=never, within_s=60.0, attempts=5)
        channel = connection.transport.open_session(timeout=30.0)
        channel.exec_command("true")
        status = channel.recv_exit_status()
        connection.close()
        return status

    with ThreadPoolExecutor(max_workers=CONNECTING_AT_ONCE) as pool:
        assert set(pool.map(run, targets)) == {0}
    return time.perf_counter()


VERBS: dict[str, Callable[[Sequence[SshTarget], str], float]] = {"agent": start_agents, "true": run_true}


def main() -> None:
    verb, python, *hosts = sys.argv[1:]
    started = time.perf_counter()
    with ThreadPoolExecutor(max_workers=ASKING_AT_ONCE) as pool:
        targets = list(pool.map(load_target, hosts))
    configured = time.perf_counter()
    up = VERBS[verb](targets, python)
    ended = time.perf_counter()
    times = {"config_s": configured - started, "up_s": up - started, "end_s": ended - started}
    print(json.dumps(times))


if __name__ == "__main__":
    main()

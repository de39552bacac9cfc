"""A controller of one node, which tests kill, so that another takes over.

`python -m tests.harness.processes.takeover_driver FOLDER N` starts it.

`N` is its generation. `FOLDER/case.json` says how to reach the node and what its tasks do. The controller writes each
message it has handled as a line of `FOLDER/journal`, which the next controller reads.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.controller.links import NodeLinks
from launcher.rundir.directory import RunDir
from launcher.tasks import TaskId
from launcher.transports.base import Deliver, FileSink, LinkClosed, LinkNews, LinkTakenOver, Resumption, Transport
from launcher.transports.remote import RemoteTransport
from launcher.transports.resumable_link import ResumableLink
from tests.harness.processes.agent_streams import Pipes
from worker_entry.protocol.framing import Decoder, encode
from worker_entry.protocol.messages import Empty, Exited, Message, Noted, Prepared, Ready, Started, Status
from worker_entry.protocol.orders import Prepare, Start, Stop
from worker_entry.protocol.values import Program, TaskRequest, TaskStart

RUN_ID = "taken-over"
NODE = "gpu-a"
PASSING = (Status, Noted)
"""Messages that change no state, and so are not written to the journal."""


@dataclass(frozen=True)
class Case:
    """The node and its tasks. `host`: a host reached over SSH; if empty, the node is this machine, over pipes."""

    command: list[str]
    ports: tuple[int, int]
    tasks: int = 2
    lease_s: float = 60.0
    host: str = ""


class Journal:
    """The messages that controllers have handled; each line is written as a whole, or not at all."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, entry: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")


def read_journal(folder: Path) -> list[dict[str, Any]]:
    path = folder / "journal"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def messages_in(journal: list[dict[str, Any]]) -> list[Message]:
    return [message for entry in journal for message, _ in Decoder().feed(entry.get("message", "").encode())]


class PipesTransport:
    """A transport to this machine as a node that keeps its own files."""

    shares_files = False

    def connect(
        self, node: str, deliver: Deliver, mirror: FileSink, lease_s: float, resumption: Resumption | None = None
    ) -> ResumableLink:
        return ResumableLink(
            node,
            lambda: Pipes("node", {}),
            deliver,
            mirror,
            lease_s=lease_s,
            reopen=lambda _: Pipes("attach", {}),
            end=end,
            resumption=resumption,
        )


def end(link: ResumableLink) -> int | None:
    link.finish()
    link.join(20)
    return 0 if link.ended else None


def make_transport(case: Case) -> Transport:
    if not case.host:
        return PipesTransport()
    from launcher.transports.ssh.config import load_target
    from launcher.transports.ssh.connector import ParamikoConnector

    return RemoteTransport(ParamikoConnector(load_target(case.host)), sys.executable)


class Controller:
    """A controller that sends each order once, when it is due, and ends when no process is left on the node."""

    def __init__(self, folder: Path, generation: int) -> None:
        self._case = Case(**json.loads((folder / "case.json").read_text()))
        self._generation = generation
        self._earlier = read_journal(folder)
        self._handled = messages_in(self._earlier)
        self._journal = Journal(folder / "journal")
        self._files = RunDir(folder / "run")
        self._links = NodeLinks({NODE: make_transport(self._case)}, RUN_ID, self._files, self._case.lease_s)
        self._sent: int | None = None
        """How many orders the agent has, Hello included; None while that is unknown."""

    def run(self) -> None:
        tasks = [TaskId("worker", index) for index in range(self._case.tasks)]
        self._links.begin(1, {NODE: tasks})
        if self._generation:
            [ready] = [message for message in self._handled if isinstance(message, Ready)]
            assert ready.reattach_folder is not None
            self._links.resume(
                NODE,
                Resumption(
                    reattach_folder=ready.reattach_folder,
                    run_id=RUN_ID,
                    generation=self._generation,
                    handled=max(entry.get("frame", 0) for entry in self._earlier),
                    attempt=1,
                    offsets=self._files.log_sizes(1, tasks),
                    ready=ready,
                ),
            )
        else:
            self._links.connect(NODE, "/")
            self._sent = 1
        while not any(isinstance(message, Empty) for message in self._handled):
            incoming = self._links.next(0.2)
            if isinstance(incoming, tuple) and isinstance(incoming[1], LinkClosed):
                closed = {"closed": incoming[1].reason, "replaced": incoming[1].taken_over}
                self._journal.write({**closed, "generation": self._generation, "left": self._links.close()[NODE]})
                return
            if isinstance(incoming, tuple):
                self._handle(incoming[1])
        self._journal.write({"ended": self._links.close()[NODE], "generation": self._generation})

    def _handle(self, message: Message | LinkNews) -> None:
        if isinstance(message, LinkTakenOver):
            self._sent = message.received
            self._journal.write({"taken_over": self._sent, "generation": self._generation})
        elif self._links.frame and not isinstance(message, PASSING) and message not in self._handled:
            self._handled.append(message)  # type: ignore[arg-type]
            text = encode(message).decode()  # type: ignore[arg-type]
            self._journal.write({"frame": self._links.frame, "message": text, "generation": self._generation})
        while self._sent is not None and self._sent < 4 and self._is_time(self._sent):
            self._links.send(NODE, self._orders()[self._sent - 1])
            self._sent += 1

    def _is_time(self, sent: int) -> bool:
        kinds = [type(message) for message in self._handled]
        ended = kinds.count(Exited) == kinds.count(Started) == self._case.tasks
        return (Ready in kinds, Prepared in kinds, ended)[sent - 1]

    def _orders(self) -> tuple[Message, ...]:
        program = Program("command", self._case.command[0], self._case.command[1:])
        names = [f"worker:{index}" for index in range(self._case.tasks)]
        return (
            Prepare(1, [TaskRequest(name, program) for name in names], *self._case.ports),
            Start(1, [TaskStart(name, program) for name in names]),
            Stop(0.0),
        )


if __name__ == "__main__":
    Controller(Path(sys.argv[1]), int(sys.argv[2])).run()

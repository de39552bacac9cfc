"""Two tasks with one address never run at once: what proves that an agent has ended, and what does not."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from launcher.transports.base import LinkDropped, LinkNews, LinkResumed
from launcher.transports.log_mirror import LogMirror
from launcher.transports.node_cleanup import CleanedNode
from launcher.transports.resumable_link import ResumableLink
from tests.harness.apart import linux
from tests.harness.polling import eventually
from tests.harness.processes.agent_streams import ENTRY, Pipes
from tests.harness.witness import await_none_left, make_mark, wait_until
from worker_entry.agent import cleanup
from worker_entry.agent.connection.evidence import Fate, find_agent, find_fate
from worker_entry.agent.connection.reattach_folder import ReattachFolder
from worker_entry.agent.warm.rendezvous import WaitingSocket, WarmAgent, find_waiting
from worker_entry.protocol import environment
from worker_entry.protocol.framing import MARKER, Decoder, encode
from worker_entry.protocol.messages import Broken, Cleaned, Message, Ready
from worker_entry.protocol.orders import UNPROVEN, VERSION, Attach, Clean, Goodbye, Hello
from worker_entry.system.machine import boot_id, pid_namespace, process_view

COVERS = (
    "launcher/transports/node_cleanup.py",
    "launcher/transports/resumable_link.py",
    "worker_entry/agent/cleanup.py",
    "worker_entry/agent/connection/evidence.py",
    "worker_entry/agent/connection/reattach_folder.py",
    "worker_entry/agent/connection/connection.py",
    "worker_entry/agent/connection/handover.py",
    "worker_entry/agent/warm/rendezvous.py",
    "worker_entry/agent/warm/wait.py",
    "worker_entry/system/lock_holders.py",
    "worker_entry/system/machine.py",
)

pytestmark = linux

RUN_ID = f"evidence-{os.getpid()}"
HOST = socket.gethostname()
OTHER_BOOT = "2f6c1c6e-0000-4000-8000-000000000000"


@contextmanager
def process(run_id: str = RUN_ID) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, environment.RUN_ID: run_id}) as started:
        wait_until(lambda: psutil.Process(started.pid).name() == "sleep", "its environment is there")
        try:
            yield started
        finally:
            started.kill()


@pytest.fixture
def folder() -> Iterator[ReattachFolder]:
    """The folder of an agent; this process is the agent."""
    made = ReattachFolder.make()
    assert made is not None
    yield made
    made.close(0)


def test_the_lock_of_an_agent_shows_whether_it_lives_or_has_ended(tmp_path: Path) -> None:
    made = ReattachFolder.make()
    assert made is not None
    assert find_fate(made.path) is Fate.ALIVE
    (tmp_path / "lock").touch()
    assert find_fate(str(tmp_path)) is Fate.ENDED
    made.close(0)


@pytest.mark.parametrize(
    ("view", "fate"),
    [
        (process_view(), Fate.ENDED),
        (f"{OTHER_BOOT} {pid_namespace()} {HOST}", Fate.ENDED),
        (f"{OTHER_BOOT} {pid_namespace()} {HOST}-2", Fate.UNKNOWN),
        (f"{boot_id()} pid:[1] {HOST}", Fate.UNKNOWN),
        ("", Fate.UNKNOWN),
    ],
    ids=["no process", "restarted", "another machine", "another container", "not reported"],
)
def test_a_missing_folder_proves_the_end_only_where_the_agent_would_be_visible(
    tmp_path: Path, view: str, fate: Fate
) -> None:
    assert find_fate(str(tmp_path / "agent-gone"), view, [RUN_ID]) is fate


def test_an_agent_with_a_removed_folder_is_found_by_its_lock(folder: ReattachFolder) -> None:
    shutil.rmtree(folder.path)
    assert find_fate(folder.path, process_view()) is Fate.ALIVE
    assert [found.pid for found in find_agent(folder.path)] == [os.getpid()]
    folder.ensure()
    assert find_fate(folder.path) is Fate.ALIVE


def test_a_leftover_task_proves_that_its_run_has_not_ended(tmp_path: Path) -> None:
    gone = str(tmp_path / "agent-gone")
    with process():
        assert find_fate(gone, process_view(), [RUN_ID]) is Fate.ALIVE
        assert find_fate(gone, process_view(), ["another run"]) is Fate.ENDED


def test_a_living_task_of_another_agent_does_not_count_for_an_ended_agent(
    tmp_path: Path, folder: ReattachFolder
) -> None:
    """Two nodes of a run can be one machine; this process is the other node's agent."""
    assert folder.lock
    with process() as task:
        assert find_fate(str(tmp_path / "agent-gone"), process_view(), [RUN_ID]) is Fate.ENDED
        assert task.poll() is None


def ask_to_clean(order: Clean) -> Message:
    ran = subprocess.run([sys.executable, ENTRY, "clean"], input=encode(order), capture_output=True, check=False)
    [(answer, _)] = Decoder().feed(ran.stdout.removeprefix(MARKER))
    return answer


def test_cleanup_after_a_lost_agent_stops_its_tasks(tmp_path: Path) -> None:
    order = Clean(VERSION, [RUN_ID], str(tmp_path / "agent-gone"), process_view=process_view())
    with process() as task:
        assert ask_to_clean(order) == Cleaned(1, [])
        assert task.wait(10) == -signal.SIGTERM


def test_cleanup_where_the_agent_is_invisible_reports_that_it_proves_nothing(tmp_path: Path) -> None:
    for lost in (str(tmp_path / "agent-gone"), ""):
        answer = ask_to_clean(Clean(VERSION, [RUN_ID], lost, process_view=f"{boot_id()} pid:[1] {HOST}"))
        assert isinstance(answer, Broken)
        assert answer.problem.reference == UNPROVEN


def test_a_node_without_proof_of_cleanup_is_not_ok(tmp_path: Path) -> None:
    assert not CleanedNode("gpu-a", problem="nothing proves that its last agent has ended", unproven=True).ok
    assert tmp_path.exists()


# --- a real agent ---


@dataclass
class Linked:
    """A real agent, and the link to it."""

    root: Path
    mark: dict[str, str] = field(default_factory=make_mark)
    delivered: list[Message | LinkNews] = field(default_factory=list)
    used: list[Pipes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.link = ResumableLink(
            "gpu-a",
            lambda: self._open("node"),
            lambda _, message, frame=0: self.delivered.append(message),
            LogMirror(lambda *_: self.root / "mirror"),
            lease_s=30.0,
            reopen=lambda _: self._open("attach"),
            run_id=RUN_ID,
        )
        self.link.send(Hello(VERSION, RUN_ID, str(self.root / "node"), str(self.root), 30.0, stream_logs=True))
        self.expect(Ready)

    def _open(self, verb: str) -> Pipes:
        self.used.append(Pipes(verb, self.mark))
        return self.used[-1]

    def expect(self, kind: type) -> None:
        def look() -> None:
            assert any(isinstance(message, kind) for message in self.delivered), self.delivered

        eventually(look)

    @property
    def folder(self) -> str:
        assert self.link.reattach_folder is not None
        return self.link.reattach_folder

    @property
    def guardian(self) -> psutil.Process:
        return psutil.Process(self.used[0].process.pid)

    def remove_folder(self) -> None:
        with contextlib.suppress(OSError):  # the agent may recreate it before it is empty
            shutil.rmtree(self.folder)


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[Linked]:
    linked = Linked(tmp_path)
    yield linked
    linked.link.send(Goodbye())
    linked.link.finish()
    if not linked.link.join(20):
        linked.link.abandon()
    await_none_left(linked.mark)


def test_an_agent_recreates_its_removed_folder_and_its_controller_reconnects(linked: Linked) -> None:
    linked.remove_folder()
    linked.used[0].cut()
    linked.expect(LinkDropped)
    linked.expect(LinkResumed)
    assert not linked.link.ended
    assert stat_mode(os.path.join(linked.folder, "socket")) == 0o600
    assert cleanup.find_agents([RUN_ID]) == [linked.folder]


def stat_mode(path: str) -> int:
    return os.stat(path).st_mode & 0o777


def test_an_agent_with_a_missing_folder_does_not_count_as_ended(linked: Linked) -> None:
    [agent] = linked.guardian.children()
    agent.suspend()
    linked.remove_folder()
    attach = Attach(VERSION, linked.folder, 0, 0, {}, run_id=RUN_ID, process_view=process_view())
    way = Pipes("attach", linked.mark)
    way.write(encode(attach))
    assert way.process.wait(20) == 1
    assert way.read(1000, 5.0) == f"{linked.folder} is missing; it will be made again\n".encode()
    way.abandon()
    agent.resume()


def test_the_lock_of_a_recreated_folder_is_held_until_the_guardian_ends(linked: Linked) -> None:
    linked.remove_folder()
    wait_until(lambda: Path(linked.folder, "lock").exists(), "the agent makes it again")
    [agent] = linked.guardian.children()
    linked.guardian.suspend()
    agent.kill()
    wait_until(lambda: agent.status() == psutil.STATUS_ZOMBIE, "the agent is dead")
    assert find_fate(linked.folder, process_view(), [RUN_ID]) is Fate.ALIVE
    linked.guardian.resume()
    wait_until(lambda: find_fate(linked.folder, process_view(), [RUN_ID]) is Fate.ENDED, "all has ended")
    assert not Path(linked.folder).exists()


def test_an_agent_can_be_stopped_while_its_folder_is_missing(linked: Linked) -> None:
    [agent] = linked.guardian.children()
    agent.suspend()
    linked.remove_folder()
    assert cleanup.end_agents([linked.folder], 0.1)
    assert find_fate(linked.folder, process_view(), [RUN_ID]) is Fate.ENDED


def test_clean_stops_agents_that_recreate_their_folders(linked: Linked) -> None:
    linked.remove_folder()
    assert cleanup.clean([RUN_ID]).left == []
    assert linked.link.join(20)


# --- agents that wait for another run ---


FACTS = WarmAgent(os.getpid(), os.getppid(), 0.0, 0, sys.executable)


@pytest.fixture
def waiting() -> Iterator[WaitingSocket]:
    waiting = WaitingSocket.take(f"evidence{os.getpid()}")
    assert waiting is not None
    waiting.note(FACTS)
    yield waiting
    waiting.close()


def found(waiting: WaitingSocket) -> list[str]:
    return [path for path, _ in find_waiting(os.path.basename(waiting.path).removeprefix("warm-"))]


@pytest.mark.parametrize("name", ["", "lock", "socket", "facts"])
def test_a_warm_agent_recreates_removed_files_of_its_waiting_socket(waiting: WaitingSocket, name: str) -> None:
    assert waiting.is_intact()
    shutil.rmtree(waiting.path) if not name else os.unlink(os.path.join(waiting.path, name))
    assert not waiting.is_intact()
    assert waiting.take_again()
    assert waiting.is_intact()
    [path] = found(waiting)
    assert stat_mode(path) == 0o600
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
        call.connect(path)
        waiting.accept().close()


def test_a_warm_agent_does_not_replace_the_waiting_socket_of_another(waiting: WaitingSocket) -> None:
    shutil.rmtree(waiting.path)
    other = WaitingSocket.take(os.path.basename(waiting.path).removeprefix("warm-"))
    assert other is not None
    other.note(FACTS)
    assert not waiting.take_again()
    waiting.close()
    assert other.is_intact()
    other.close()
    os.dup2(os.open(os.devnull, os.O_RDONLY), waiting._lock)  # the fixture closes it again

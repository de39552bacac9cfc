"""An agent that begins to import before its run is known."""

from __future__ import annotations

import errno
import os
import selectors
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from launcher.transports.agent_process import EarlyAgent
from tests.harness.apart import apart_on_linux, linux
from tests.harness.processes.agent_client import Client
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.witness import await_none_left, make_mark, marked, wait_until
from worker_entry.agent.tasks.forkserver import ForkserverClient
from worker_entry.protocol.messages import Broken, Exited
from worker_entry.protocol.orders import Early, Preload
from worker_entry.protocol.values import Program, TaskStart
from worker_entry.system import processes

COVERS = (
    "worker_entry/agent",
    "worker_entry/task/forkserver.py",
    "launcher/transports",
    "launcher/cli",
    "launcher/plan",
)

pytestmark = linux

TENSORFLOW = "import os\nprint('imported by', os.getpid(), flush=True)\n"
TRAIN = "import tensorflow\n"
PROGRAM = Program("script", "train.py")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """An agent in the folder of a program that imports TensorFlow; there has been no Hello."""
    (tmp_path / "tensorflow.py").write_text(TENSORFLOW)
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    started = Client(tmp_path / "run")
    yield started
    started.process.kill()
    started.close()
    await_none_left(started.mark)


def make_preload(folder: Path, program: Program = PROGRAM, framework: str = "tensorflow", **env: str) -> Preload:
    env = {"PYTHONPATH": str(folder), **env}
    return Preload(program, env, ["TF_CONFIG"], [], keep=True, framework=framework)


def find_forkservers(mark: dict[str, str]) -> list[int]:
    return [process.pid for process in marked(mark) if process.cmdline()[-1:] == ["forkserver"]]


def begin_early(client: Client, order: Preload) -> int:
    """Sends the order before Hello; returns the pid of the process that imports."""
    client.send(Early(order))
    wait_until(lambda: len(find_forkservers(client.mark)) == 1, "the forkserver runs")
    [pid] = find_forkservers(client.mark)
    return pid


def run_task(client: Client, order: Preload) -> str:
    """Runs the program after the order, and returns the log of the imports."""
    client.greet()
    client.send(order)
    client.start(TaskStart("worker:0", order.program, order.env, order.unset))
    assert client.expect(Exited).exit.code == 0
    return (client.directory / "forkserver.log").read_text()


# --- the agent ---


def test_a_task_is_forked_from_what_was_imported_before_hello(client: Client) -> None:
    order = make_preload(client.cwd, OMP_NUM_THREADS="1")
    pid = begin_early(client, order)
    assert run_task(client, order) == f"imported by {pid}\n"
    assert find_forkservers(client.mark) == [pid]


@pytest.mark.parametrize(
    "change", [{"OMP_NUM_THREADS": "2"}, {"program": Program("module", "train")}, {"framework": "jax"}]
)
def test_an_early_import_that_does_not_suit_the_run_is_done_again(client: Client, change: dict[str, str]) -> None:
    early = make_preload(client.cwd, **{"OMP_NUM_THREADS": "1", **change})  # type: ignore[arg-type]  # each its own
    pid = begin_early(client, early)
    log = run_task(client, make_preload(client.cwd, OMP_NUM_THREADS="1"))
    [again] = find_forkservers(client.mark)
    assert again != pid
    assert log == f"imported by {again}\n"


def test_a_program_that_needs_no_framework_begins_nothing_early(client: Client) -> None:
    (client.cwd / "train.py").write_text("print('alone')\n")
    client.send(Early(make_preload(client.cwd)))
    client.greet()
    assert find_forkservers(client.mark) == []


def test_an_early_order_after_hello_is_a_protocol_error(client: Client) -> None:
    client.greet()
    client.send(Early(make_preload(client.cwd)))
    assert client.expect(Broken).problem.reference == "protocol-error"


def test_an_early_import_ends_with_a_controller_that_never_says_hello(client: Client) -> None:
    begin_early(client, make_preload(client.cwd))
    assert client.process.stdin is not None
    client.process.stdin.close()
    await_none_left(client.mark)


def test_an_early_import_that_could_not_be_started_is_started_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    forkserver = ForkserverClient(selectors.DefaultSelector())
    with monkeypatch.context() as patch:
        patch.setattr(processes, "spawn", Mock(side_effect=BlockingIOError(errno.EAGAIN, "no more processes")))
        forkserver.begin(make_preload(tmp_path), str(tmp_path), "")
    assert not forkserver.pids
    forkserver.begin(make_preload(tmp_path), str(tmp_path), str(tmp_path))
    assert forkserver.pids
    forkserver.end()


# --- its process ---


@apart_on_linux
def test_an_early_agent_that_no_run_takes_is_ended() -> None:
    folder = Path(tempfile.mkdtemp())
    agent = EarlyAgent("run-id", folder)
    assert psutil.Process().children()
    agent.end()
    assert psutil.Process().children() == []
    assert agent.take(folder / "errors") is None
    assert [*folder.iterdir()] == []


@apart_on_linux
def test_an_early_agent_whose_log_cannot_get_its_name_is_not_used() -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "errors").write_text("of an earlier agent")
    assert EarlyAgent("run-id", folder).take(folder / "errors") is None
    assert psutil.Process().children() == []
    assert (folder / "errors").read_text() == "of an earlier agent"


# --- the command ---

FIND_AGENT = """
import os
import tensorflow
with open(f"/proc/{os.getppid()}/environ") as stream:
    agent = dict(each.split("=", 1) for each in stream.read().split("\\0") if "=" in each)
names = ("DISTLAUNCH_CLOCK", "DISTLAUNCH_RUN_ID")
print("AGENT", all(agent[name] == os.environ[name] for name in names), os.readlink(f"/proc/{os.getppid()}/fd/2"))
"""


@pytest.mark.parametrize(
    ("options", "is_early"),
    [(("-e", "SHOWN=1"), True), (("--set", "stdin=none"), False), (("--keep-warm", "0s"), False)],
)
def test_local_starts_its_agent_before_it_has_a_run(
    distlaunch: Distlaunch, tmp_path: Path, options: tuple[str, ...], is_early: bool
) -> None:
    (tmp_path / "tensorflow.py").write_text(TENSORFLOW)
    (tmp_path / "train.py").write_text(FIND_AGENT)
    ran = distlaunch("local", "-n", "1", *options, "train.py", env={"PYTHONPATH": str(tmp_path)})
    assert ran.status == 0, ran.stderr
    same, errors = ran.line(r"AGENT (\S+) (.+)").groups()
    assert same == "True"  # the clock and the run, as for any agent
    assert errors.endswith("(deleted)") == is_early, errors  # Linux shows how a file was opened, not its name since
    assert (ran.directory / "agent.stderr").read_text() == ""
    assert (ran.directory / "forkserver.log").read_text().startswith("imported by")


def test_a_command_that_cannot_start_its_run_ends_its_early_agent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    mark = make_mark()
    done = subprocess.run(
        distlaunch_command("local", "--run-dir", "run", "train.py"),
        cwd=tmp_path,
        env={**os.environ, **mark},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert marked(mark) == []

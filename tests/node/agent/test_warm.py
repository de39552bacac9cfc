"""Agents that stay between two runs with TensorFlow imported.

Only this module uses their interpreter, so that no other test finds them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from launcher.rundir import warm_nodes
from tests.harness.hosts.sshd import running_hosts, skip_without_openssh
from tests.harness.places import ROOT
from tests.harness.polling import eventually
from tests.harness.processes.in_process import run_here
from tests.harness.processes.older_version import OlderVersion
from tests.harness.processes.warm_python import make_python
from tests.harness.witness import assert_none_left, make_mark, marked
from worker_entry.agent.tasks.warm_forkserver import WarmForkserver, find_difference
from worker_entry.agent.warm import offer
from worker_entry.agent.warm.rendezvous import WarmAgent, find_waiting
from worker_entry.protocol import environment
from worker_entry.system.memory import MemoryPressure

COVERS = (
    "worker_entry/agent/warm",
    "worker_entry/agent/tasks/forkserver.py",
    "worker_entry/task",
    "launcher/rundir/warm_nodes.py",
    "worker_entry/program",
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can keep processes apart")

LOOK = """
import os, sys
import tensorflow as tf
import mine
shown = dict(each.split("=", 1) for each in open("/proc/self/environ").read().split("\\0") if "=" in each)
same = shown["DISTLAUNCH_RUN_ID"] == os.environ["DISTLAUNCH_RUN_ID"]
print("LOOK", os.getppid(), same, mine.VALUE, os.environ.get("SHOWN"), os.getcwd(), "kept" in sys.argv)
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with the packages of this one, at its own path."""
    return make_python(tmp_path_factory.mktemp("python"))


@dataclass(frozen=True)
class Bench:
    """Runs distlaunch in a folder; all processes that it starts have the mark."""

    python: str
    folder: Path
    mark: Mapping[str, str]

    def run(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        status: int = 0,
        before: Callable[[], None] | None = None,
    ) -> str:
        """The output of a command."""
        done = subprocess.run(
            [self.python, "-m", "launcher", *arguments],
            cwd=self.folder,
            env={**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), **self.mark, **(env or {})},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            preexec_fn=before,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def manage(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """The output of `ls` and `down` in this process: on this machine, they find only warm agents of this bench."""

        def find_own(key: str | None = None) -> Iterator[tuple[str, WarmAgent]]:
            return (found for found in find_waiting(key) if found[1].executable == self.python)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(warm_nodes, "find_waiting", find_own)
            patch.setattr(offer, "find_waiting", find_own)
            state = {"XDG_STATE_HOME": str(self.folder / "state")}
            done = run_here(*arguments, cwd=self.folder, env={**state, **(env or {})})
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def look(self, *options: str, keep: str = "60s", **named: object) -> tuple[str, list[str]]:
        """The output of a run, and what its task has seen."""
        kept = ["--keep-warm", keep] if keep else []
        said = self.run("local", "-n", "1", *kept, *options, "look.py", **named)  # type: ignore[arg-type]
        line = next(each for each in said.splitlines() if "LOOK" in each)
        return said, line.partition("LOOK ")[2].split()

    @property
    def processes(self) -> list[psutil.Process]:
        """Guardian, agent and forkserver."""
        found = {process.ppid(): process for process in marked(dict(self.mark))}
        [guardian] = [process for parent, process in found.items() if parent not in {p.pid for p in found.values()}]
        [agent] = guardian.children()
        return [guardian, agent, *agent.children()]


@pytest.fixture
def bench(python: str, tmp_path: Path) -> Iterator[Bench]:
    mark = make_mark()
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "mine.py").write_text("VALUE = 'old'\n")
    bench = Bench(python, tmp_path, mark)
    yield bench
    with contextlib.suppress(AssertionError):
        bench.manage("down", "--warm")
    eventually(lambda: _assert_empty(mark))


def _assert_empty(mark: Mapping[str, str]) -> None:
    assert_none_left(dict(mark))


def _assert_up(log: Path) -> None:
    assert log.exists()
    assert "up" in log.read_text()


@pytest.mark.tensorflow
def test_a_warm_agent_gives_the_next_run_tensorflow_and_no_other_state(bench: Bench) -> None:
    """Takes long: one import, and four runs."""
    said, first = bench.look("-e", "SHOWN=1")
    assert "kept warm for" in said
    assert "0 processes left on this machine" in said
    assert first[1:5] == ["True", "old", "1", str(bench.folder)]
    guardian, agent, forkserver = bench.processes
    assert {each.environ()[environment.RUN_ID].strip("-") for each in (guardian, agent, forkserver)} == {""}
    assert "this machine" in bench.manage("ls")
    [known] = json.loads(bench.manage("ls", "--warm"))
    assert known["node"] == "local"
    assert 30 < known["until"] - time.time() < 60

    (bench.folder / "mine.py").write_text("VALUE = 'new'\n")
    said, second = bench.look("-e", "SHOWN=2", "--set", "progress=false")
    assert "imports TensorFlow again" not in said
    assert second[:4] == [first[0], "True", "new", "2"]
    # A failed run keeps TensorFlow warm as well; a run without --keep-warm does not change that.
    said, third = bench.look("-e", "STATUS=3", status=1)
    assert "kept warm for" in said
    said, fourth = bench.look(keep="")
    assert "kept warm for" in said
    assert first[0] == third[0] == fourth[0]
    assert [process.pid for process in bench.processes] == [guardian.pid, agent.pid, forkserver.pid]
    assert "3 processes stopped, 0 left" in bench.manage("down", "--warm")
    _assert_empty(bench.mark)
    assert "Nothing is kept warm" in bench.manage("down", "--warm")


@pytest.mark.tensorflow
def test_a_newer_version_does_not_use_what_an_older_one_has_kept_warm(bench: Bench) -> None:
    older = OlderVersion(bench.folder / "older")
    bench.look(env=older.env)

    said, _ = bench.look("-v", keep="")

    assert "imports TensorFlow again: different version of distlaunch than in the last run" in said
    eventually(lambda: _assert_empty(bench.mark))


@pytest.mark.tensorflow
def test_a_changed_environment_is_reported_and_causes_a_new_tensorflow_import(bench: Bench) -> None:
    """Takes long: an import for each difference."""
    home = bench.folder / "home"
    (home / ".keras").mkdir(parents=True)
    env = {"HOME": str(home)}
    _, [agent, *_] = bench.look(env=env)

    said, [same, *_] = bench.look("-e", "TF_CPP_MIN_LOG_LEVEL=1", env=env)
    assert "imports TensorFlow again: TF_CPP_MIN_LOG_LEVEL differs" in said
    assert same == agent  # the agent can serve the run; its forkserver cannot
    (home / ".keras" / "keras.json").write_text('{"floatx": "float64"}')
    said, _ = bench.look("-e", "TF_CPP_MIN_LOG_LEVEL=1", env=env)
    # The file has changed, or was changed while the forkserver still read what it had imported.
    assert f"imports TensorFlow again: {home}/.keras/keras.json " in said

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said, [other, *_] = bench.look(
        "-v", env=env, before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    )
    assert "imports TensorFlow again: different set of limits (`ulimit`) than in the last run" in said
    assert other != agent
    said, [third, *_] = bench.look(env=env)  # with the earlier limits
    assert "imports TensorFlow again" not in said
    assert third not in (agent, other)


@pytest.mark.tensorflow
def test_tensorflow_is_not_kept_warm_with_modules_of_the_program(bench: Bench) -> None:
    said, _ = bench.look("--set", "preload=[mine]")
    assert f"TensorFlow is not kept warm: {bench.folder}/mine.py was imported early" in said
    _assert_empty(bench.mark)


@pytest.mark.tensorflow
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["guardian", "agent", "forkserver"])
def test_all_warm_processes_end_if_one_of_them_is_killed(bench: Bench, victim: int) -> None:
    bench.look()
    bench.processes[victim].kill()
    eventually(lambda: _assert_empty(bench.mark))


@pytest.mark.tensorflow
def test_warm_processes_end_at_logout_after_a_controller_kill_and_at_their_expiry(bench: Bench) -> None:
    """Takes long: three imports."""
    bench.look()
    for process in bench.processes:  # as systemd does with all processes of a session
        process.send_signal(signal.SIGTERM)
    eventually(lambda: _assert_empty(bench.mark))

    (bench.folder / "sleep.py").write_text("import tensorflow, time\nprint('up', flush=True)\ntime.sleep(600)\n")
    bench.look()
    command = [bench.python, "-m", "launcher", "local", "-n", "1", "--run-dir", str(bench.folder / "run"), "sleep.py"]
    env = {**os.environ, **bench.mark}
    log = bench.folder / "run" / "attempt-1" / "worker-0.log"
    with subprocess.Popen(
        command, cwd=bench.folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as controller:
        eventually(lambda: _assert_up(log))
        controller.kill()  # the agent, which serves its second run, is not below it
    eventually(lambda: _assert_empty(bench.mark))

    bench.look(keep="2s")
    assert len(bench.processes) == 3
    eventually(lambda: _assert_empty(bench.mark))


@pytest.mark.tensorflow
@pytest.mark.ssh
def test_tensorflow_stays_warm_on_a_remote_node(bench: Bench, tmp_path: Path) -> None:
    skip_without_openssh()
    folder = tmp_path / "ssh"
    folder.mkdir()
    with running_hosts(folder) as hosts:
        hosts.trust()
        spec = folder / "warm.yaml"
        spec.write_text(
            f"nodes: [{{host: gpu-a, python: {bench.python}}}]\nprogram: {{script: look.py}}\n"
            f"working_directory: {bench.folder}\nkeep_warm_s: 60\n"
        )
        seen = []
        for _ in range(2):
            said = bench.run("up", str(spec), env=hosts.env)
            assert "kept warm for" in said
            [line] = [each for each in said.splitlines() if "LOOK" in each]
            seen.append(line.partition("LOOK ")[2].split()[0])
        assert seen[0] == seen[1]
        assert "gpu-a" in bench.manage("ls", env=hosts.env)
        said = bench.manage("down", "--warm", env=hosts.env)  # this machine is also gpu-a
        assert "local: 3 processes stopped, 0 left" in said
        assert re.search(r"gpu-a: \d+ processes stopped, 0 left", said)  # those of other tests
        assert "Nothing is kept warm" in bench.manage("down", "--warm", env=hosts.env)


def test_variables_read_at_server_start_do_not_cause_a_new_import() -> None:
    """Thus a run of two workers can use the import of a run of one."""
    assert find_difference({}, {"TF_GRPC_REUSE_PORT": "true"}) is None
    assert find_difference({}, {"TF_ENABLE_ONEDNN_OPTS": "0"}) == "TF_ENABLE_ONEDNN_OPTS"


def test_a_forkserver_of_another_framework_or_preload_is_not_used() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        kept = WarmForkserver(1, ours, {"A": "1"}, "jax", ["json"], frozenset(["jax", "json"]), frozenset(["A"]))
        assert kept.explain_difference({"A": "1", "B": "1"}, "jax", ["json"]) == ""
        assert kept.explain_difference({"A": "1"}, "tensorflow", ["json"]) == "`framework` differs"
        assert kept.explain_difference({"A": "1"}, "jax", []) == "`preload` differs"
        assert kept.explain_difference({"A": "2"}, "jax", ["json"]) == "A differs"


def test_memory_pressure_is_detected_from_the_kernel_files(tmp_path: Path) -> None:
    pressure, memory = tmp_path / "pressure", tmp_path / "meminfo"
    pressure.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00\n")
    memory.write_text("MemTotal: 1000 kB\nMemAvailable: 500 kB\n")
    watch = MemoryPressure(str(pressure), str(memory))
    assert not watch.exists()
    memory.write_text("MemTotal: 1000 kB\nMemAvailable: 30 kB\n")
    assert watch.exists()
    memory.write_text("MemTotal: 1000 kB\nMemAvailable: 500 kB\n")
    pressure.write_text("some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00\n")
    assert watch.exists()


IMPORTS = """
import os, sys, time
began = time.time()
time.sleep(0.05)
sys.path.insert(0, os.getcwd())
import mine
from worker_entry.task.import_snapshot import ImportSnapshot, find_foreign
assert find_foreign() == os.path.abspath("mine.py"), find_foreign()
kept = ImportSnapshot(began)
kept.record()
assert kept.problem == "", kept.problem
assert kept.find_change() == ""
os.utime("mine.py")
assert kept.find_change() == ""
text = open("mine.py").read()
with open("mine.py", "w") as file:
    file.write(text.replace("1", "2"))
assert kept.find_change().endswith("mine.py has changed"), kept.find_change()
late = ImportSnapshot(time.time() - 1)
late.record()
assert late.problem.endswith("mine.py was changed while it was imported"), late.problem
"""


def test_an_imported_file_counts_as_changed_only_if_its_content_changed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 1\n")
    time.sleep(0.05)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


OVERWRITE = """
from worker_entry.system.own_environ import overwrite
def shown():
    return open("/proc/self/environ").read().split("\\0")
assert overwrite("NAME", "longer than before", room="ROOM")
assert "NAME=longer than before" in shown() and "AFTER=1" in shown(), shown()
assert overwrite("NAME")
assert "NAME=" + "-" * len("longer than before") in shown() and "AFTER=1" in shown()
assert not overwrite("NAME", "x" * 200, room="ROOM")
assert not overwrite("OTHER", "x")
"""


def test_a_process_can_change_the_environment_that_proc_shows() -> None:
    env = {"NAME": "short", "ROOM": "-" * 40, "AFTER": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", OVERWRITE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

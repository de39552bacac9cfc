"""Starting tasks and stopping their process trees, with real processes that resist their end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from launcher.plan.tf_config import LIMIT
from tests.harness.apart import apart, apart_on_linux, linux
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from worker_entry.agent.tasks.tree import Tree
from worker_entry.protocol.environment import TF_CONFIG
from worker_entry.protocol.values import TaskExit
from worker_entry.system import kernel
from worker_entry.system.agent_kernel import SystemKernel
from worker_entry.system.processes import kill_descendants, spawn

FAMILY = str(PROGRAMS / "tree_family.py")
CHAIN = str(PROGRAMS / "tree_chain.py")


class Task:
    """A spawned leader in a tree; its output can be read."""

    def __init__(self, tree: Tree, *argv: str) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as log:
            self._log = Path(log.name)
            self.pid = spawn(argv, env=dict(os.environ), cwd="/", output=log.fileno())
        tree.add(self.pid)

    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def members(self) -> dict[str, int]:
        """The pids of a `tree_family.py`, once its tree is complete."""

        def standing() -> list[str]:
            lines = self.lines()
            assert lines[-1:] == ["stands"]
            return lines[:-1]

        return {name: int(pid) for name, _, pid in (line.partition(" ") for line in eventually(standing))}

    def close(self) -> None:
        self._log.unlink()


@contextmanager
def tree_of(*argv: str) -> Iterator[tuple[Tree, Task]]:
    kernel.become_subreaper()
    tree = Tree(SystemKernel())
    task = Task(tree, *argv)
    try:
        yield tree, task
    finally:
        task.close()


def family(*members: str) -> tuple[str, ...]:
    return sys.executable, FAMILY, *members


def sweep_until_empty(tree: Tree) -> dict[int, TaskExit]:
    """Does the same as the agent's loop while it stops a tree; returns how the leaders ended."""
    ended: dict[int, TaskExit] = {}

    def is_empty() -> None:
        ended.update((pid, TaskExit.from_wait_status(status)) for pid, status in tree.reap())
        assert tree.sweep() == 0

    eventually(is_empty)
    assert psutil.Process().children(recursive=True) == []  # an independent check
    return ended


def reap_until(tree: Tree, pid: int) -> TaskExit:
    def is_dead() -> TaskExit:
        dead = dict(tree.reap())
        assert pid in dead
        return TaskExit.from_wait_status(dead[pid])

    return eventually(is_dead)


# --- the end of a tree ---


@apart
def test_a_process_tree_that_obeys_sigterm_ends_without_sigkill() -> None:
    with tree_of(*family("child", "grandchild")) as (tree, task):
        assert len(task.members()) == 2
        tree.stop(60.0)
        assert sweep_until_empty(tree) == {task.pid: TaskExit(signal=signal.SIGTERM)}
        assert tree.killed == set()


@apart
def test_a_process_tree_that_ignores_sigterm_is_killed_only_after_the_grace_period() -> None:
    with tree_of(*family("--ignore-term", "child", "grandchild")) as (tree, task):
        members = task.members()
        began = time.monotonic()
        tree.stop(0.5)
        ended = sweep_until_empty(tree)
        assert time.monotonic() - began >= 0.5
        assert ended == {task.pid: TaskExit(signal=signal.SIGKILL)}
        assert tree.killed >= {task.pid, *members.values()}


@apart_on_linux
def test_a_daemon_of_a_task_is_killed_with_its_process_tree() -> None:
    with tree_of(*family("--ignore-term", "daemon")) as (tree, task):
        daemon = task.members()["daemon"]
        assert os.getsid(daemon) not in (os.getsid(0), os.getsid(task.pid))
        tree.stop(0.0)
        sweep_until_empty(tree)
        assert daemon in tree.killed


@apart
def test_a_suspended_process_obeys_sigterm() -> None:
    with tree_of(*family("stopped")) as (tree, task):
        assert psutil.Process(task.members()["stopped"]).status() == psutil.STATUS_STOPPED
        tree.stop(60.0)
        sweep_until_empty(tree)
        assert tree.killed == set()


@apart
def test_a_suspended_process_that_ignores_sigterm_is_killed() -> None:
    with tree_of(*family("--ignore-term", "stopped")) as (tree, task):
        stopped = task.members()["stopped"]
        tree.stop(0.0)
        sweep_until_empty(tree)
        assert stopped in tree.killed


@apart_on_linux
def test_a_suspended_task_obeys_sigterm() -> None:
    with tree_of(*family("child")) as (tree, task):
        task.members()
        os.kill(task.pid, signal.SIGSTOP)
        tree.stop(60.0)
        assert sweep_until_empty(tree) == {task.pid: TaskExit(signal=signal.SIGTERM)}


@apart_on_linux
def test_processes_that_respawn_endlessly_are_killed() -> None:
    with tree_of(sys.executable, CHAIN) as (tree, task):
        assert reap_until(tree, task.pid) == TaskExit(code=0)
        tree.stop(0.0)
        sweep_until_empty(tree)


@apart_on_linux
def test_processes_that_respawn_in_new_sessions_are_killed() -> None:
    with tree_of(sys.executable, CHAIN, "setsid") as (tree, task):
        assert reap_until(tree, task.pid) == TaskExit(code=0)
        tree.stop(0.0)
        sweep_until_empty(tree)


@apart_on_linux
def test_a_process_tree_is_never_reported_empty_while_a_process_respawns() -> None:
    """Each process lives for a shorter time than a scan of all processes takes."""
    with tree_of(sys.executable, CHAIN) as (tree, task):
        assert reap_until(tree, task.pid) == TaskExit(code=0)
        tree.stop(600.0)  # TERM may end it, or may come too late
        for _ in range(50):
            if tree.sweep() == 0:
                break
            tree.reap()
        else:
            tree.stop(0.0)
        sweep_until_empty(tree)


@apart
def test_a_second_stop_of_a_process_tree_shortens_the_grace_period() -> None:
    with tree_of(*family("--ignore-term")) as (tree, task):
        task.members()
        tree.stop(600.0)
        assert tree.sweep() == 1
        tree.stop(0.0)
        sweep_until_empty(tree)


@apart
def test_a_second_stop_of_a_process_tree_never_extends_the_grace_period() -> None:
    with tree_of(*family("--ignore-term")) as (tree, task):
        task.members()
        tree.stop(0.0)
        tree.stop(600.0)
        sweep_until_empty(tree)


@apart
def test_a_process_tree_is_not_empty_until_its_task_has_been_reaped() -> None:
    with tree_of("sleep", "60") as (tree, task):
        tree.stop(60.0)
        os.waitid(os.P_PID, task.pid, os.WEXITED | os.WNOWAIT)  # it is dead, but not reaped
        assert tree.sweep() == 1
        assert tree.reap() == [(task.pid, signal.SIGTERM)]
        assert tree.sweep() == 0


@apart_on_linux
def test_the_exit_of_a_task_with_a_reused_pid_is_reported() -> None:
    with tree_of(sys.executable, "-c", "") as (tree, task):
        reap_until(tree, task.pid)
        tree.add(task.pid)  # for the tree, this is the next task with that pid
        other = os.fork()
        if not other:
            os._exit(7)
        tree._leaders, tree._reaped = {other}, {other}
        tree.add(other)
        assert reap_until(tree, other) == TaskExit(7)


@apart_on_linux
def test_processes_that_outlive_their_task_are_counted() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        tree_of(*family("--ignore-term", "--leave", f"{folder}/go", "child", "daemon")) as (tree, task),
    ):
        members = task.members()
        Path(folder, "go").touch()
        assert reap_until(tree, task.pid) == TaskExit(code=0)
        assert {process.pid for process in tree.living()} == set(members.values())
        tree.stop(0.0)
        sweep_until_empty(tree)
        assert tree.left_behind == tree.killed == set(members.values())


@apart
def test_processes_that_end_with_their_task_do_not_count_as_left_behind() -> None:
    with tree_of(*family("child")) as (tree, task):
        task.members()
        tree.stop(60.0)
        sweep_until_empty(tree)
        assert tree.left_behind == set()


@apart_on_linux
def test_a_process_of_another_user_does_not_block_the_stop_of_a_tree() -> None:
    """For example `sudo` in a task: the agent may neither stop it nor wait for it."""
    with tree_of(*family("child")) as (tree, task):
        foreign = task.members()["child"]
        real = signal.pidfd_send_signal  # type: ignore[attr-defined,unused-ignore]

        def refuse(descriptor: int, signum: int) -> None:
            with open(f"/proc/self/fdinfo/{descriptor}") as info:
                if f"Pid:\t{foreign}\n" in info:
                    raise PermissionError
            real(descriptor, signum)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(signal, "pidfd_send_signal", refuse)
            tree.stop(0.0)
            eventually(lambda: nothing_but(tree, foreign))
            kill_descendants()  # returns as well
        assert psutil.pid_exists(foreign)
        kill_descendants()
        assert psutil.Process().children(recursive=True) == []


def nothing_but(tree: Tree, pid: int) -> None:
    tree.reap()
    assert tree.sweep() == 0
    assert [process.pid for process in psutil.Process().children(recursive=True)] == [pid]


@apart_on_linux
def test_kill_descendants_kills_all_descendants_except_spared_processes() -> None:
    with (
        tree_of(*family("--ignore-term", "grandchild", "stopped", "daemon")) as (_, task),
        tree_of(*family("child")) as (_, spared),
    ):
        task.members()
        child = spared.members()["child"]
        kill_descendants({spared.pid})
        assert {process.pid for process in psutil.Process().children(recursive=True)} == {spared.pid, child}
        kill_descendants()
        assert psutil.Process().children(recursive=True) == []


@apart
def test_an_ended_spared_child_is_reaped_and_no_longer_spared() -> None:
    spare = set[int]()
    tree = Tree(SystemKernel(), spare)
    child = spawn(["true"], env=dict(os.environ), cwd="/", output=2)
    spare.add(child)

    def is_reaped() -> None:
        assert tree.reap() == []
        assert spare == set()

    eventually(is_reaped)


# --- a task's start ---


@apart
def test_a_spawned_task_leads_its_own_session_with_an_empty_stdin() -> None:
    code = "import os; print(os.getsid(0) == os.getpgrp() == os.getpid(), repr(open(0).read()), os.getcwd())"
    with tree_of(sys.executable, "-c", code) as (tree, task):
        assert reap_until(tree, task.pid) == TaskExit(code=0)
        assert task.lines() == ["True '' /"]


@apart_on_linux
def test_a_task_dies_with_the_process_that_started_it() -> None:
    code = """if True:
        import os, time
        from worker_entry.system.processes import spawn
        print(spawn(["sleep", "60"], env=dict(os.environ), cwd="/", output=2), flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    task = int(parent.stdout.readline())
    assert psutil.pid_exists(task)
    parent.kill()
    parent.communicate()

    def gone() -> None:
        assert not psutil.pid_exists(task) or psutil.Process(task).status() == psutil.STATUS_ZOMBIE

    eventually(gone)


@pytest.mark.parametrize(
    ("argv", "cwd", "error"),
    [
        (["distlaunch-no-such-program"], "/", FileNotFoundError),
        (["/dev/null"], "/", PermissionError),
        (["true"], "/no/such/folder", FileNotFoundError),
        (["true", "x" * (4 << 20)], "/", OSError),
    ],
    ids=["no such program", "not executable", "no such folder", "too long"],
)
def test_a_program_that_cannot_be_started_raises_an_os_error(argv: list[str], cwd: str, error: type[OSError]) -> None:
    with pytest.raises(error):
        spawn(argv, env=dict(os.environ), cwd=cwd, output=2)


@linux
@pytest.mark.skipif(resource.getpagesize() != 4096, reason="with larger pages, Linux allows longer variables")
def test_linux_starts_a_program_with_the_longest_tf_config_and_none_with_a_longer_one() -> None:
    subprocess.run(["true"], env={"PATH": os.environ["PATH"], TF_CONFIG: "x" * LIMIT}, check=True)
    with pytest.raises(OSError, match="too long"):
        subprocess.run(["true"], env={"PATH": os.environ["PATH"], TF_CONFIG: "x" * (LIMIT + 1)}, check=True)


# --- how a task ended ---


@pytest.mark.parametrize(
    ("code", "expected", "text"),
    [
        ("pass", TaskExit(code=0), "exit status 0"),
        ("os._exit(3)", TaskExit(code=3), "exit status 3"),
        ("os._exit(255)", TaskExit(code=255), "exit status 255"),
        ("os._exit(137)", TaskExit(code=137), "exit status 137"),  # not folded into a signal
        ("os.kill(os.getpid(), signal.SIGKILL)", TaskExit(signal=9), "SIGKILL (signal 9)"),
        ("signal.raise_signal(signal.SIGTERM)", TaskExit(signal=15), "SIGTERM (signal 15)"),
        ("signal.raise_signal(signal.SIGHUP)", TaskExit(signal=1), "SIGHUP (signal 1)"),
        ("os.abort()", TaskExit(signal=6), "SIGABRT (signal 6)"),
        ("os.kill(os.getpid(), 40)", TaskExit(signal=40), "signal 40"),
    ],
)
def test_a_task_exit_is_described_by_its_status_or_its_signal(code: str, expected: TaskExit, text: str) -> None:
    limit = "import os, resource, signal; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    child = os.posix_spawn(sys.executable, [sys.executable, "-Sc", limit + code], os.environ)
    ended = TaskExit.from_wait_status(os.waitpid(child, 0)[1])
    assert ended == expected
    assert str(ended) == text
    assert ended.ok == (expected.code == 0)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0x80 | signal.SIGSEGV, "SIGSEGV (signal 11, core dumped)"),
        (0x80 | 40, "signal 40, core dumped"),
    ],
)
def test_a_task_exit_reports_a_core_dump(status: int, text: str) -> None:
    ended = TaskExit.from_wait_status(status)
    assert ended.core_dumped
    assert str(ended) == text


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_CORE)[1] == 0, reason="this system allows no core dumps")
def test_a_task_exit_reports_the_core_dump_of_a_real_process(tmp_path: Path) -> None:
    code = """if True:
        import os, resource
        resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
        os.abort()
    """
    done = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    _, status = os.waitpid(done.pid, 0)
    done.returncode = status
    assert os.WCOREDUMP(status) == TaskExit.from_wait_status(status).core_dumped
    assert TaskExit.from_wait_status(status).signal == signal.SIGABRT

"""`distlaunch clean` stops the leftover processes of a run whose controller is gone, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness.hosts.sshd import Hosts, running_hosts, skip_without_openssh
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import MARK, assert_none_left, await_none_left, make_mark, marked

COVERS = (
    "launcher/commands",
    "launcher/transports/node_cleanup.py",
    "worker_entry/agent/cleanup.py",
    "worker_entry/agent/guardian.py",
)

LEFT = "trap '' TERM HUP; setsid sleep 601 & echo waiting; exec sleep 600"
"""A task that ignores SIGTERM, with a child in its own session."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    skip_without_openssh()
    with running_hosts(tmp_path_factory.mktemp("ssh")) as hosts:
        hosts.trust()
        yield hosts


def begin(hosts: Hosts, folder: Path, mark: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts LEFT on both hosts, with a lease too long to wait for."""
    env = f"env_from: [{MARK}]\ntimeouts: {{lease_s: 600}}\n"
    spec = hosts.write_spec(f'program: {{command: [sh, -c, "{LEFT}"]}}\n{env}')
    process = subprocess.Popen(
        distlaunch_command("up", "--run-dir", str(folder / "run"), spec),
        env={**os.environ, **hosts.env, **mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    for _ in range(2):
        assert b"waiting" in process.stdout.readline()
    return process


def clean(hosts: Hosts, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        distlaunch_command("clean", what),
        env={**os.environ, **hosts.env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def kill_distlaunch(process: subprocess.Popen[bytes]) -> None:
    with process:
        process.kill()


def test_clean_refuses_a_run_that_is_still_running(hosts: Hosts, tmp_path: Path) -> None:
    mark = make_mark()
    process = begin(hosts, tmp_path, mark)
    with process:
        refused = clean(hosts, str(tmp_path / "run"))
        assert refused.returncode == 2
        assert f"is still running (pid {process.pid})" in refused.stderr
        assert len(marked(mark)) >= 4
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        process.stdout.read()
        assert process.wait(timeout=30) == 130
    again = clean(hosts, str(tmp_path / "run"))
    assert again.stdout == "gpu-a: 0 processes stopped, 0 left\ngpu-b: 0 processes stopped, 0 left\n"
    assert again.returncode == 0


def test_clean_stops_leftover_processes_of_a_killed_controller(hosts: Hosts, tmp_path: Path) -> None:
    mark = make_mark()
    kill_distlaunch(begin(hosts, tmp_path, mark))
    assert len(marked(mark)) >= 4
    done = clean(hosts, str(tmp_path / "run"))
    assert (done.returncode, done.stdout.count(" 0 left")) == (0, 2), done
    assert_none_left(mark)


def test_clean_stops_a_hanging_agent_without_waiting_for_its_lease(hosts: Hosts, tmp_path: Path) -> None:
    mark = make_mark()
    process = begin(hosts, tmp_path, mark)
    tasks = [p for p in marked(mark) if p.pid != process.pid]
    agents = {above.pid: above for p in tasks if (above := p.parent()) and above.cmdline()[-1:] == ["node"]}
    assert len(agents) == 2
    for agent in agents.values():
        agent.suspend()
    kill_distlaunch(process)
    done = clean(hosts, str(tmp_path / "run"))
    assert (done.returncode, done.stdout.count(" 0 left")) == (0, 2), done
    assert_none_left(mark)
    assert not any(agent.is_running() for agent in agents.values())


def test_clean_stops_orphans_of_killed_agents_and_no_other_processes(hosts: Hosts, tmp_path: Path) -> None:
    mark = make_mark()
    process = begin(hosts, tmp_path, mark)
    tasks = [p for p in marked(mark) if p.pid != process.pid]
    guardians = {parent.pid: parent for p in tasks for parent in p.parents() if parent.cmdline()[-1:] == ["node"]}
    kill_distlaunch(process)
    for guardian in guardians.values():
        guardian.suspend()  # or it would kill the tasks when its agent dies
    for guardian in guardians.values():
        guardian.kill()
    left = [p for p in marked(mark) if p.is_running()]
    others = [
        subprocess.Popen(["sleep", "600"], env={**os.environ, "DISTLAUNCH_RUN_ID": "20260101-000000-other-0000"}),
        subprocess.Popen(["sleep", "600"]),
    ]
    try:
        assert any(psutil.pid_exists(p.pid) for p in left)
        done = clean(hosts, str(tmp_path / "run"))
        assert (done.returncode, done.stdout.count(" 0 left")) == (0, 2), done
        assert_none_left(mark)
        assert [other.poll() for other in others] == [None, None]
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_clean_names_a_node_that_cannot_be_reached(hosts: Hosts, tmp_path: Path) -> None:
    mark = make_mark()
    kill_distlaunch(begin(hosts, tmp_path, mark))
    trust = hosts.known_hosts.read_text()
    hosts.known_hosts.write_text(trust.replace(hosts.addresses["gpu-b"], "gone"))
    try:
        done = clean(hosts, str(tmp_path / "run"))
        assert done.returncode == 3
        assert "gpu-b: not cleaned: the host key of " in done.stdout
        assert "gpu-a: " in done.stdout
    finally:
        hosts.known_hosts.write_text(trust)
    assert clean(hosts, str(tmp_path / "run")).returncode == 0
    assert_none_left(mark)


def test_clean_of_a_spec_cleans_all_its_ended_runs(hosts: Hosts, tmp_path: Path) -> None:
    mark = make_mark()
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    spec = hosts.write_spec(
        f'program: {{command: [sh, -c, "{LEFT}"]}}\nenv_from: [{MARK}]\ntimeouts: {{lease_s: 600}}\n'
    )
    process = subprocess.Popen(
        distlaunch_command("up", spec),
        env={**os.environ, **hosts.env, **mark, **state},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    kill_distlaunch(process)
    done = subprocess.run(
        distlaunch_command("clean", spec),
        env={**os.environ, **hosts.env, **mark, **state},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.count(" 0 left")) == (0, 2), done
    await_none_left(mark, spare={os.getpid()})


def test_clean_reports_a_path_or_id_that_is_not_a_run(hosts: Hosts, tmp_path: Path) -> None:
    for what, said in {
        "no-such-run": "there is no run no-such-run",
        str(tmp_path): f"{tmp_path} is not a run's folder",
    }.items():
        done = clean(hosts, what)
        assert done.returncode in (2, 3)
        assert said in done.stderr

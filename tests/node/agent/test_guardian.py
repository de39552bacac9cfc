"""The guardian watches its agent and kills it if it hangs; an agent closes its resources when it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness.apart import apart_on_linux, linux
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.processes.agent_client import Client, command
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import await_none_left, make_mark, marked, wait_until
from worker_entry.agent.connection.lease import SHORTEST_LIMIT_S, TICK_S, HangTimer, LoopCounter
from worker_entry.protocol.messages import Exited, Noted
from worker_entry.protocol.orders import Beat, Goodbye, Preload
from worker_entry.protocol.values import Program, TaskExit

COVERS = ("worker_entry/agent", "worker_entry/system")

TREE = str(PROGRAMS / "spawn_tree.py")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    started = Client(tmp_path / "run")
    try:
        yield started
    finally:
        for process in marked(started.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        started.close()


# --- the hang timer ---


class TestHangTimer:
    def test_the_hang_timer_counts_while_the_agent_loop_stands_still(self) -> None:
        hang_timer = HangTimer(1.0, 100.0)
        for second in range(1, 8):
            hang_timer.update(1.0, 100.0 + second * TICK_S)
        assert hang_timer.seconds == 7 * TICK_S

    def test_a_turn_of_the_agent_loop_resets_the_hang_timer(self) -> None:
        hang_timer = HangTimer(1.0, 100.0)
        hang_timer.update(1.0, 101.0)
        hang_timer.update(2.0, 102.0)
        assert hang_timer.seconds == 0.0

    @pytest.mark.parametrize("slept_s", [60.0, 86_400.0])
    def test_an_agent_has_several_ticks_for_a_turn_after_the_machine_slept(self, slept_s: float) -> None:
        hang_timer, now = HangTimer(1.0, 100.0), 100.0 + slept_s
        hang_timer.update(1.0, now)
        for _ in range(2):
            assert hang_timer.seconds < SHORTEST_LIMIT_S
            now += TICK_S
            hang_timer.update(1.0, now)
        assert hang_timer.seconds < SHORTEST_LIMIT_S

    def test_a_short_lease_does_not_reduce_the_hang_limit_below_its_minimum(self) -> None:
        turns = LoopCounter(60.0)
        turns.limit_s = 1.0
        assert turns.limit_s == SHORTEST_LIMIT_S
        turns.limit_s = 90.0
        assert turns.limit_s == 90.0


# --- an agent that hangs ---


@pytest.mark.slow
@linux
def test_a_hanging_agent_is_killed_after_its_lease_with_all_descendants(client: Client) -> None:
    ready = client.greet(lease_s=1.0)
    client.start_family("--ignore-term", "child", "grandchild", "stopped", "daemon")
    os.kill(ready.pid, signal.SIGSTOP)
    client.expect_nothing_left()
    assert client.wait() == 128 + signal.SIGKILL


@linux
def test_a_terminated_guardian_kills_a_hanging_agent_before_its_lease_ends(client: Client) -> None:
    ready = client.greet(lease_s=600.0)
    client.start_family("--ignore-term", "child", "daemon")
    os.kill(ready.pid, signal.SIGSTOP)
    client.process.terminate()
    client.expect_nothing_left()
    assert client.wait() == 128 + signal.SIGKILL


@pytest.mark.slow
@linux
def test_an_agent_that_was_suspended_together_with_its_guardian_is_not_killed(client: Client) -> None:
    """As if a laptop were closed or a container paused; here, the clock keeps running."""
    lease_s = SHORTEST_LIMIT_S
    agent = psutil.Process(client.greet(lease_s=lease_s).pid)
    client.start(command("worker:0", "sleep", "600"))
    guardian = psutil.Process(client.process.pid)
    for process in (guardian, agent):
        process.suspend()
    frozen = time.monotonic()

    def has_been_frozen_for_longer_than_the_lease() -> None:
        client.send(Beat(time.time(), 0))
        assert time.monotonic() - frozen > lease_s + 2 * TICK_S

    eventually(has_been_frozen_for_longer_than_the_lease)
    guardian.resume()
    wait_until(lambda: guardian.status() == psutil.STATUS_SLEEPING, "the guardian alone has checked")
    agent.resume()
    client.expect(Beat)
    client.send(Goodbye())
    assert client.expect(Exited).exit == TaskExit(signal=signal.SIGTERM)
    assert client.wait() == 0


@linux
def test_a_suspended_guardian_still_ends_after_its_agent(client: Client) -> None:
    client.greet()
    client.start_family("child", "daemon")
    client.process.send_signal(signal.SIGSTOP)
    client.send(Goodbye())
    assert client.wait() == 0
    client.expect_nothing_left()


@pytest.mark.slow
@linux
def test_a_guardian_is_small_and_wakes_up_once_a_second(client: Client) -> None:
    client.greet()
    guardian = psutil.Process(client.process.pid)
    before, started = guardian.num_ctx_switches().voluntary, time.monotonic()
    wait_until(lambda: guardian.num_ctx_switches().voluntary >= before + 4, "the guardian has checked four times")
    assert time.monotonic() - started > 2.5 * TICK_S
    assert guardian.memory_full_info().uss < 16 << 20


@pytest.mark.slow
@linux
@pytest.mark.parametrize("guardian_too", [False, True])
def test_clean_stops_a_local_run_with_a_hanging_agent(tmp_path: Path, guardian_too: bool) -> None:
    """The controller was killed, and the user does not want to wait for the end of the lease."""
    mark = make_mark()
    directory = tmp_path / "run"
    (tmp_path / "spec.yaml").write_text(
        f"nodes: [{{host: local}}]\nprogram: {{script: {TREE}}}\ntimeouts: {{lease_s: 600}}\n"
    )
    process = subprocess.Popen(
        distlaunch_command("up", "--run-dir", str(directory), str(tmp_path / "spec.yaml")),
        cwd=tmp_path,
        env={**os.environ, **mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        try:
            assert process.stdout is not None
            assert b"the tree stands" in process.stdout.readline()
            [guardian] = psutil.Process(process.pid).children()
            [agent] = [child for child in guardian.children() if child.cmdline() == guardian.cmdline()]
            agent.suspend()
            process.kill()
            process.wait()
            if guardian_too:
                guardian.suspend()
            done = subprocess.run(
                distlaunch_command("clean", str(directory)), capture_output=True, text=True, timeout=60, check=False
            )
            assert (done.returncode, " 0 left" in done.stdout) == (0, True), done
            await_none_left(mark)
        finally:
            for left in marked(mark):
                left.kill()


# --- the end of an agent ---


@linux
def test_an_agent_with_a_running_forkserver_ends_without_an_error(client: Client, tmp_path: Path) -> None:
    """The agent closes its resources in reverse order: the forkserver's socket, then the selector that watches it."""
    (tmp_path / "tensorflow.py").touch()
    (tmp_path / "train.py").write_text("import tensorflow\n")
    client.greet()
    env = {"PYTHONPATH": str(tmp_path)}
    client.send(Preload(Program("script", "train.py"), env, unset=[], modules=[], keep=True))
    wait_until(lambda: len(marked(client.mark)) == 3, "the forkserver runs")
    client.send(Goodbye())
    assert client.wait() == 0
    client.expect_nothing_left()
    assert client.received(Noted) == []
    assert client.close() == ""


@apart_on_linux
def test_an_agent_closes_its_resources_even_if_its_loop_raises() -> None:
    from worker_entry.agent.agent import Agent
    from worker_entry.agent.connection.connection import Opening
    from worker_entry.system.agent_kernel import SystemKernel

    here = Path.cwd()
    (stdin, writer), (reader, stdout) = os.pipe(), os.pipe()
    agent = Agent(Opening(stdin, stdout), None, LoopCounter(60.0), SystemKernel())
    agent._runner.get().forkserver.begin(
        Preload(Program("script", "x"), {}, [], [], True), str(here), tempfile.mkdtemp()
    )
    [forkserver] = psutil.Process().children()

    def fail() -> None:
        raise ZeroDivisionError

    agent._step = fail  # type: ignore[method-assign]  # a bug anywhere in a turn
    with contextlib.suppress(ZeroDivisionError):
        agent.run()
    assert not forkserver.is_running()
    assert agent._selector.get_map() is None
    for descriptor in (writer, reader):
        os.close(descriptor)

"""Starts this machine's agent as a subprocess."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from launcher import helpers
from launcher.errors import as_ours
from launcher.transports.agent_process import END_WAIT_S, EarlyAgent, start_agent
from launcher.transports.base import Deliver, FileSink, LinkBroken, LinkError, Resumption
from launcher.transports.resumable_link import ResumableLink
from launcher.transports.streams import await_readable
from worker_entry.agent.cleanup import end_agents, find_agents
from worker_entry.system import kernel, processes

_guardians: set[int] = set()
"""Guardians of this process's open links and of agents that stay; closing a link spares the others' guardians."""


class LocalTransport:
    """The transport to this machine. `python` runs the agent and the tasks; the agent's stderr goes to `errors`.

    `may_stay`: whether the agent may be kept for another run. `early`: an agent of `python` and `run_id` that runs
    already.
    """

    def __init__(
        self,
        errors: Path,
        python: str = sys.executable,
        *,
        run_id: str = "",
        shares_files: bool = True,
        may_stay: bool = False,
        early: EarlyAgent | None = None,
    ) -> None:
        self.shares_files = shares_files
        self._run_id = run_id
        self._verb = "warm-agent" if may_stay else "agent"
        self._early = early
        self._errors = errors
        self._python = python

    def connect(
        self, node: str, deliver: Deliver, mirror: FileSink, lease_s: float, resumption: Resumption | None = None
    ) -> ResumableLink:
        if resumption is not None:
            raise LinkError("an agent on its controller's own machine ends with its controller")
        # Processes that outlive the agent and its guardian become our children, so that none is missed.
        kernel.become_subreaper()
        process = self._early.take(self._errors) if self._early is not None else None
        _guardians.update([] if process is None else [process.pid])
        others = {process.pid for process in kernel.descendants(os.getpid(), spare=_guardians)}
        process = process or self._start_agent()
        _guardians.add(process.pid)
        try:
            agent = _Agent(process, others, self._run_id)
            return ResumableLink(node, agent.open, deliver, mirror, lease_s=lease_s, end=agent.end, same_clock=True)
        except RuntimeError as error:  # no thread can be started for the link
            process.kill()
            process.communicate()
            _guardians.discard(process.pid)
            with helpers.spared() as own:
                processes.kill_descendants(others | _guardians | own)
            raise as_ours(error) from None

    def _start_agent(self) -> subprocess.Popen[bytes]:
        errors = os.open(self._errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return start_agent(self._python, self._verb, self._run_id, errors)
        finally:
            os.close(errors)


class _Agent:
    """An agent on this machine; `others` are our descendants from before its start."""

    def __init__(self, process: subprocess.Popen[bytes], others: set[int], run_id: str) -> None:
        self._process = process
        self._others = others
        self._run_id = run_id

    def open(self) -> _Pipes:
        return _Pipes(self._process)

    def end(self, link: ResumableLink) -> int | None:
        """Stops it; see `Link.close`."""
        link.finish()
        try:
            self._process.wait(END_WAIT_S if not link.given_up else 0.0)
        except subprocess.TimeoutExpired:
            self._end_stuck(link.agent_pid)
        link.join(END_WAIT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        _guardians.discard(self._process.pid)
        if link.kept is not None:
            _guardians.update(link.kept.pids)
        # Check the reports of the agent and its guardian: of our descendants, only other agents and helpers may live.
        with helpers.spared() as own:
            spare = self._others | _guardians | own
            processes.kill_descendants(spare)
            return len(kernel.descendants(os.getpid(), spare=spare))

    def _end_stuck(self, agent_pid: int | None) -> None:
        """Kills an agent that hangs or is stopped; its guardian then kills everything below it."""
        if self._run_id:  # an agent that may stay is not our descendant
            end_agents(find_agents([self._run_id]), 0.0)
        for process in kernel.descendants(os.getpid()):
            if process.pid in (self._process.pid, agent_pid):
                kernel.send_signal(process, signal.SIGCONT)
            if process.pid == agent_pid:
                kernel.send_signal(process, signal.SIGKILL)
        try:
            self._process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Pipes:
    """The agent's stdin and stdout."""

    archive = b""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to_agent = process.stdin
        self._from_agent = process.stdout

    def read(self, size: int, timeout_s: float) -> bytes:
        if not await_readable(self._from_agent, timeout_s):
            raise LinkBroken(f"no data for {timeout_s:.0f} s")
        return os.read(self._from_agent.fileno(), size)

    def write(self, data: bytes) -> None:
        self._to_agent.write(data)
        self._to_agent.flush()

    def finish(self) -> None:
        self._to_agent.close()

    def abandon(self) -> None:
        pass  # `_Agent.end` stops the agent, which closes the pipes

    def how_ended(self) -> str:
        return "the agent ended"

    def exit_status(self) -> int | None:
        return None  # no shell is involved

"""The process of an agent on this machine, which a command may start before it knows its run.

An early agent begins to import the framework while the command still reads its spec. It has the run's id from its
start, because its environment cannot change later; its log has no name until the run has a folder.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from worker_entry.protocol.environment import RUN_ID
from worker_entry.system import clock

if TYPE_CHECKING:
    from worker_entry.protocol.orders import Preload

ENTRY = str(Path(__file__).parents[2] / "worker_entry")
END_WAIT_S = 5.0
"""How long an agent may take to stop before it is killed; its guardian then kills the tasks."""


def start_agent(python: str, verb: str, run_id: str, errors: int) -> subprocess.Popen[bytes]:
    """Starts an agent with `run_id` in its environment, like its tasks, so that `distlaunch clean` finds it too.

    Args:
        python: the interpreter of the agent and its tasks.
        verb: `agent`, or `warm-agent` for one that may stay for the next run.
        run_id: empty for an agent that runs no tasks.
        errors: the descriptor that it gets as stderr.
    """
    return subprocess.Popen(
        [python, ENTRY, verb],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, RUN_ID: run_id} if run_id else None,
        start_new_session=True,  # the controller alone handles the terminal's Ctrl-C
    )


class EarlyAgent:
    """An agent without a run; `take` gives it to the run, and `end` ends it if no run has taken it."""

    def __init__(self, run_id: str, folder: Path) -> None:
        """Starts the agent with this interpreter; its log will be in a folder on the same file system as `folder`.

        Raises:
            OSError: the file system, or the system, does not allow it.
        """
        clock.share()  # as a run does before it starts an agent
        self.run_id = run_id
        self.python = sys.executable
        self._errors = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_APPEND, 0o600)
        try:
            self._process: subprocess.Popen[bytes] | None = start_agent(self.python, "agent", run_id, self._errors)
        except OSError:
            os.close(self._errors)
            raise

    def preload(self, order: Preload) -> None:
        """Lets the agent begin to import."""
        from worker_entry.protocol.framing import encode
        from worker_entry.protocol.orders import Early

        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which the run notices
            self._process.stdin.write(encode(Early(order)))
            self._process.stdin.flush()

    def take(self, errors: Path) -> subprocess.Popen[bytes] | None:
        """Gives the process to the caller, and its log this name; if that fails, ends the agent and returns None."""
        if self._process is None or self._process.poll() is not None:
            self.end()  # its process is over: it may have waited in vain while this one was stopped
            return None
        try:
            # With `src_dir_fd`, which does not matter for an absolute path, `link` follows the link in /proc.
            os.link(f"/proc/self/fd/{self._errors}", errors, src_dir_fd=self._errors, follow_symlinks=True)
        except OSError:
            self.end()
            return None
        process, self._process = self._process, None
        os.close(self._errors)
        return process

    def end(self) -> None:
        """Ends the agent, and all that it has started, unless it is taken."""
        if self._process is None:
            return
        process, self._process = self._process, None
        os.close(self._errors)
        with process:  # closes its stdin, with which it ends
            try:
                process.communicate(timeout=END_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()

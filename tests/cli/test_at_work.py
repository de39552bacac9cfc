"""A healthy run is not stopped: a task at work, and tasks that train separately, are reported and left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.processes.at_work import write
from tests.harness.processes.commands import Distlaunch

COVERS = ("launcher/gang", "worker_entry/agent/tasks/stacks.py", "worker_entry/agent/tasks/watches.py")

pytestmark = pytest.mark.slow  # each waits for several seconds


class TestDrain:
    def test_drain_timeout_is_extended_for_a_task_at_work(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        program = write(tmp_path, "while mine and time.monotonic() < began + 7: pass")
        ran = distlaunch("local", "-n", "2", "--set", "timeouts.drain_s=2", program)
        assert ran.status == 0, ran.stderr
        assert "worker:1 has been in <module> at" in ran.stderr


class TestStart:
    def test_start_timeout_is_extended_while_tasks_compute_before_opening_their_ports(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        program = write(tmp_path, "while time.monotonic() < began + 7: pass")
        ran = distlaunch("local", "-n", "2", "--set", "timeouts.start_s=4", program)
        assert ran.status == 0, ran.stderr

"""A cluster that makes no progress: when it counts as stalled, which task is to blame, and what is done about it."""

from __future__ import annotations

import re

import pytest

from tests.harness.processes.commands import Distlaunch

COVERS = ("launcher/gang", "launcher/verdict", "launcher/controller/supervisor.py")


@pytest.mark.slow
def test_a_command_that_stops_printing_is_reported_as_stalled(distlaunch: Distlaunch) -> None:
    """Each line counts as progress; simulated attempts check how exact the limit is."""
    program = "for n in 1 2 3 4 5 6; do echo $n; sleep 0.5; done; sleep 600"
    ran = distlaunch("local", "-n", "1", "--set", "timeouts.stall_s=2", "--", "sh", "-c", program, timeout=60)
    assert ran.status == 3
    assert ran.log() == b"1\n2\n3\n4\n5\n6\n"
    assert re.search(r"Error: no sign of progress for \d+ s \[stalled\]\n", ran.stderr)

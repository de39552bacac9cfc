"""The lease of an agent runs from the last proof that it was heard."""

from __future__ import annotations

from worker_entry.agent.connection.lease import LONGEST_TURN_S, Lease
from worker_entry.system.agent_kernel import SystemKernel


class Clocks(SystemKernel):
    """A kernel whose clocks the test sets."""

    time = 0.0

    def monotonic(self) -> float:
        return 100.0 + self.time

    def now(self) -> float:
        return 5000.0 + self.time

    def steady(self, moment: float) -> float:
        return moment - 3000.0


def test_a_far_lease_runs_by_the_clock_from_the_last_stamp_that_was_returned() -> None:
    clocks = Clocks()
    lease = Lease(60.0, far=True, kernel=clocks)
    assert (lease.stamp(), lease.overdue_s, lease.end) == (5000.0, -60.0, 2060.0)
    clocks.time = 50.0
    for stamp, overdue_s in [(None, -10.0), (5051.0, -10.0), (5050.0, -60.0), (5020.0, -60.0)]:
        lease.confirm(stamp)  # one that lies ahead, or behind another, is not taken
        assert lease.overdue_s == overdue_s
    clocks.time = 111.0
    assert lease.overdue_s == 1.0


def test_a_lease_on_the_machine_of_the_controller_does_not_run_while_the_machine_sleeps() -> None:
    clocks = Clocks()
    lease = Lease(60.0, far=False, kernel=clocks)
    assert (lease.stamp(), lease.end) == (0.0, 0.0)
    for turn in range(1, 31):
        clocks.time = float(turn)
        assert lease.stamp() == turn
    clocks.time += 1000.0
    assert lease.overdue_s == 30.0 + LONGEST_TURN_S - 60.0
    lease.confirm(30.0)
    assert lease.overdue_s == LONGEST_TURN_S - 60.0

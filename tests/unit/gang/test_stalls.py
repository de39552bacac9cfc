"""A cluster that makes no progress: when it counts as stalled, which task is to blame, and what is done about it."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from launcher.controller.attempt import parse_not_joined
from launcher.gang.events import (
    AskStacks,
    Event,
    NodeEmpty,
    NodeHeard,
    NodeUnheard,
    StacksReceived,
    TaskHalted,
    TaskReported,
    TaskWrote,
    Tick,
)
from launcher.gang.state import AttemptState, Phase, Reason
from launcher.gang.watch.stalls import render_busy
from launcher.spec.strategies import RULES
from launcher.tasks import TaskId, find_leader
from launcher.verdict.stall_blame import find_staller, render_stall, render_steps
from tests.harness.builders.gang import (
    FAILURE_STOP,
    START_S,
    W0,
    W1,
    W2,
    exited,
    listening,
    make_policy,
    play,
    play_on,
    preparing,
    running,
    started,
)
from tests.harness.builders.stalls import THREE, stalled, told
from tests.harness.builders.verdicts import judged
from worker_entry.protocol.values import Activity, Progress

STACK = 'Thread 0x01 (most recent call first):\n  File "{file}", line {line} in {function}\n'


WAITING = STACK.format(file="/venv/lib/python3.11/site-packages/tensorflow/execute.py", line=53, function="execute")


SLEEPING = STACK.format(file="/home/me/train.py", line=41, function="load_batch")


def all_told(step: int, **how: float) -> list[Event]:
    return [told(task, step, **how) for task in (W0, W1, W2)]  # type: ignore[arg-type]  # floats, all of them


class TestDetection:
    def test_a_cluster_that_reports_no_steps_is_not_stopped_as_stalled(self) -> None:
        assert stalled(1e6, Tick()).phase is Phase.RUNNING

    @pytest.mark.parametrize(("step_s", "limit_s"), [(0.1, 10.0), (0.5, 10.0), (0.9, 18.0), (10.0, 200.0)])
    def test_a_stall_is_suspected_after_20_long_steps_but_not_before_10_seconds(
        self, step_s: float, limit_s: float
    ) -> None:
        steps = (10.0, *all_told(50, step_s=step_s))
        assert stalled(*steps, 10.0 + limit_s - 0.1, Tick()).suspicion is None
        assert stalled(*steps, 10.0 + limit_s, Tick()).suspicion is Reason.STALLED

    def test_the_slowest_task_and_its_long_steps_decide_when_a_stall_is_suspected(self) -> None:
        usual, slow = told(W1, 50, step_s=0.1), told(W1, 50, step_s=0.1, p99_s=3.0)
        assert stalled(*all_told(49), 10.0, *all_told(50), usual, 69.9, Tick()).suspicion is Reason.STALLED
        assert stalled(*all_told(49), 10.0, *all_told(50), slow, 69.9, Tick()).suspicion is None
        assert stalled(*all_told(49), 10.0, *all_told(50), slow, 70.0, Tick()).suspicion is Reason.STALLED

    def test_no_stall_is_suspected_before_two_steps(self) -> None:
        assert stalled(*all_told(0), 1e4, Tick(), *all_told(1), 1e6, Tick()).suspicion is None

    def test_no_stall_is_suspected_after_training_has_ended(self) -> None:
        assert stalled(*all_told(50), *all_told(50, training=False), 1e6, Tick()).suspicion is None

    def test_a_cluster_with_an_ended_task_has_a_drain_timeout_and_no_stall(self) -> None:
        state = stalled(*all_told(50), 10.0, exited(W0), 200.0, Tick(), 310.0, Tick(), StacksReceived({}))
        assert state.reason is Reason.DRAIN_TIMEOUT

    def test_the_stall_limit_starts_when_the_cluster_is_up_and_0_disables_it(self) -> None:
        assert stalled(30.0, Tick(), stall_s=30.0).suspicion is Reason.STALLED
        assert stalled(1e6, Tick(), stall_s=0.0).suspicion is None
        assert stalled(*all_told(50), 1e6, Tick(), stall_s=0.0).suspicion is None

    def test_output_counts_as_progress_only_for_programs_without_steps(self) -> None:
        assert stalled(20.0, TaskWrote(W1), 49.0, Tick(), stall_s=30.0).suspicion is None
        assert stalled(*all_told(5), 20.0, TaskWrote(W1), 31.0, Tick(), stall_s=30.0).suspicion is Reason.STALLED

    def test_stall_detection_works_for_steps_counted_from_0(self) -> None:
        reports = [
            TaskReported(task, "is training", 990.0, Progress(9, 0, 10, 1000.0, 1010.0, p99_s=1.0))
            for task in (W0, W1, W2)
        ]
        assert stalled(*reports, 19.0, Tick()).suspicion is None
        assert stalled(*reports, 20.0, Tick()).suspicion is Reason.STALLED
        assert stalled(*reports).status[W0].stepping is not None

    def test_a_step_of_any_task_counts_as_progress(self) -> None:
        state = stalled(*all_told(5), 29.0, told(W2, 6), 58.0, Tick(), stall_s=30.0)
        assert state.suspicion is None


STUCK = Activity(idle_s=60.0, waits=True, is_stuck=True)
"""Only another task can wake it."""
WAITS = Activity(idle_s=60.0, waits=True)
"""Something else may wake it."""
ALL = (W0, W1, W2)


def looked(*activities: Activity, text: str = WAITING) -> StacksReceived:
    """The answers of all tasks; the last activity is that of all others as well."""
    said = {task: activities[min(number, len(activities) - 1)] for number, task in enumerate(ALL)}
    return StacksReceived(dict.fromkeys(ALL, text), said)


class TestResponse:
    LATE = (*all_told(50), 10.0, Tick())

    def test_a_cluster_is_stopped_if_no_task_can_go_on_in_two_looks(self) -> None:
        policy = make_policy(THREE)
        state, actions = play(policy, *running(policy), *self.LATE, 10.5, looked(STUCK))
        assert (state.phase, state.suspicion, state.waited, actions[2:]) == (Phase.RUNNING, None, True, [AskStacks()])
        state, actions = play_on(state, 14.4, Tick())
        assert actions == []
        state, actions = play_on(state, 14.5, Tick(), 15.0, looked(STUCK))
        assert actions == [AskStacks(), FAILURE_STOP]
        assert (state.reason, state.stacks, state.stalled_s) == (Reason.STALLED, dict.fromkeys(ALL, WAITING), 14.5)
        assert render_stall(state) == "no step for 14 s (a step usually takes 0.5 s)"

    def test_a_cluster_is_not_stopped_if_one_task_may_go_on_by_itself(self) -> None:
        """It may wait for a download, a time, a child or a device."""
        for second in (
            WAITS,
            Activity(idle_s=1.0, waits=True, is_stuck=True),
            Activity(None, is_stuck=True),
            Activity(),
        ):
            state = stalled(*self.LATE, looked(STUCK), 14.0, Tick(), looked(STUCK, second), 43.9, Tick())
            assert (state.phase, state.suspicion, state.waited) == (Phase.RUNNING, None, False)
            state = play_on(state, 44.0, Tick(), looked(STUCK))[0]
            assert (state.phase, state.waited) == (Phase.RUNNING, True)  # again only the first of two looks

    def test_a_cluster_is_not_stopped_if_a_task_does_not_answer(self) -> None:
        answers = StacksReceived({W0: WAITING, W1: "", W2: WAITING}, {W0: STUCK, W2: STUCK})
        state = stalled(*self.LATE, answers)
        assert (state.phase, state.waited) == (Phase.RUNNING, False)

    def test_stacks_of_an_earlier_look_do_not_count_again(self) -> None:
        state = stalled(*self.LATE, looked(STUCK), 14.0, Tick(), 24.0, Tick())
        assert (state.phase, state.suspicion, state.waited) == (Phase.RUNNING, None, False)

    def test_tasks_that_may_go_on_by_themselves_get_two_minutes(self) -> None:
        state = stalled(*self.LATE)
        for time in (10.0, 40.0, 70.0, 100.0):
            state, actions = play_on(state, time, Tick(), looked(WAITS))
            assert (state.phase, state.waited, state.seems_stalled) == (Phase.RUNNING, False, False)
        state, actions = play_on(state, 120.0, Tick(), looked(WAITS))
        assert (state.phase, state.waited, actions) == (Phase.RUNNING, True, [AskStacks()])
        state, actions = play_on(state, 124.0, Tick(), looked(WAITS))
        assert (state.reason, actions) == (Reason.STALLED, [AskStacks(), FAILURE_STOP])

    def test_a_task_stopped_by_a_signal_does_not_go_on_by_itself(self) -> None:
        late = (*self.LATE, TaskHalted(W2, signal.SIGSTOP, 1.0))
        answers = StacksReceived({W0: WAITING, W1: WAITING, W2: ""}, {W0: STUCK, W1: STUCK})
        assert stalled(*late, answers, 14.0, Tick(), answers).reason is Reason.STALLED
        state = stalled(*late, answers, TaskHalted(W2, None, 1.0), 14.0, Tick(), answers)
        assert (state.phase, state.waited) == (Phase.RUNNING, False)

    def test_a_server_that_may_go_on_keeps_a_cluster_from_being_stopped(self) -> None:
        """A chief waits for the steps that its workers do."""
        chief, worker = TaskId("chief", 0), TaskId("worker", 0)
        policy = replace(make_policy({"a": [chief, worker]}), strategy=RULES["parameter_server"])
        for activity, reason in ((WAITS, None), (STUCK, Reason.STALLED)):
            answers = StacksReceived({chief: WAITING, worker: ""}, {chief: STUCK, worker: activity})
            state, _ = play(policy, *running(policy), told(chief, 50), 10.0, Tick(), answers, 14.0, Tick(), answers)
            assert state.reason is reason

    def test_a_step_while_stacks_are_requested_cancels_the_stall(self) -> None:
        policy = make_policy(THREE)
        state, actions = play(
            policy, *running(policy), *self.LATE, 11.0, told(W1, 51), StacksReceived({}), 20.9, Tick()
        )
        assert (state.phase, state.suspicion, state.deadline) == (Phase.RUNNING, None, None)
        assert actions[2:] == [AskStacks()]

    def test_a_step_between_two_looks_restarts_the_stall_limit(self) -> None:
        state = stalled(*self.LATE, looked(STUCK), 13.0, told(W1, 51), 22.9, Tick())
        assert (state.suspicion, state.waited) == (None, False)
        state, _ = play_on(state, 23.0, Tick(), looked(STUCK))
        assert (state.phase, state.waited) == (Phase.RUNNING, True)

    def test_a_stalled_cluster_is_stopped_even_if_no_stacks_arrive(self) -> None:
        state = stalled(*self.LATE, 120.0, Tick(), 130.0, Tick(), 134.0, Tick())
        assert (state.phase, state.waited) == (Phase.RUNNING, True)
        assert play_on(state, 144.0, Tick())[0].reason is Reason.STALLED

    def test_a_task_failure_while_stacks_are_requested_replaces_the_stall(self) -> None:
        assert stalled(*self.LATE, exited(W1, 1)).reason is Reason.TASK_FAILED

    def test_a_broken_connection_between_two_looks_starts_them_again(self) -> None:
        """The tasks of that node may have made steps."""
        state = stalled(*self.LATE, looked(STUCK), NodeUnheard("a"), 14.0, Tick(), 20.0, NodeHeard("a"), 29.9, Tick())
        assert (state.suspicion, state.waited) == (None, False)
        state, _ = play_on(state, 30.0, Tick(), looked(STUCK))
        assert (state.phase, state.waited) == (Phase.RUNNING, True)


class TestAtWork:
    """A task at work is reported, and not stopped unless the user has set a limit."""

    LATE = (*all_told(50), 10.0, Tick(), looked(WAITS), 120.0, Tick())
    CALLBACK = STACK.format(file="/home/me/train.py", line=40, function="on_epoch_end")
    EXPORT = STACK.format(file="/venv/lib/python3.11/site-packages/h5py/files.py", line=9, function="flush")
    EXPORT += '  File "/home/me/train.py", line 44 in on_epoch_end\n'
    SAVING = WAITING + '  File "/home/me/train.py", line 44 in on_epoch_end\n'
    LOCK = STACK.format(file="/usr/lib/python3.11/threading.py", line=331, function="wait") + (
        '  File "/home/me/train.py", line 45 in load_batch\n'
    )
    FEEDING = (
        CALLBACK + '  File "/venv/lib/python3.11/site-packages/tensorflow/python/ops/script_ops.py", line 1 in f\n'
    )
    IDLE, ACTIVE = Activity(idle_s=120.0), Activity(idle_s=1.0)
    LOCKED = Activity(idle_s=120.0, waits=True)

    def answers(self, **said: tuple[str, Activity]) -> StacksReceived:
        """What the tasks that are named answer; all others wait."""
        found = {task: said.get(f"w{task.index}", (WAITING, self.LOCKED)) for task in ALL}
        texts = {task: text for task, (text, _) in found.items()}
        return StacksReceived(texts, {task: activity for task, (_, activity) in found.items()})

    def asked(self, *events: Event | float, stall_s: float | None = None, **said: tuple[str, Activity]) -> AttemptState:
        return stalled(*self.LATE, *events, self.answers(**said), stall_s=stall_s)

    @pytest.mark.parametrize(
        ("text", "activity", "place"),
        [
            (CALLBACK, IDLE, "in on_epoch_end at /home/me/train.py:40"),
            (EXPORT, IDLE, "in on_epoch_end at /home/me/train.py:44"),
            (SAVING, ACTIVE, "in on_epoch_end at /home/me/train.py:44"),
            (WAITING, ACTIVE, "at work"),
            ("", ACTIVE, "at work"),
            (FEEDING + WAITING, LOCKED, "in on_epoch_end at /home/me/train.py:40"),
        ],
    )
    def test_a_task_at_work_is_reported_and_not_stopped(self, text: str, activity: Activity, place: str) -> None:
        state = self.asked(w0=(text, activity))
        assert (state.phase, state.suspicion, state.busy) == (Phase.RUNNING, None, {W0: place})
        assert render_busy(state) == f"worker:0 has been {place} for 120 s; the others wait"
        assert not state.waited

    @pytest.mark.parametrize(
        ("text", "activity"),
        [(SAVING, IDLE), (CALLBACK, LOCKED), (LOCK, IDLE), (CALLBACK + WAITING, LOCKED), ("", IDLE), ("", Activity())],
    )
    def test_a_task_that_waits_or_idles_does_not_prevent_a_stall(self, text: str, activity: Activity) -> None:
        state = self.asked(w0=(text, activity))
        assert (state.phase, state.waited) == (Phase.RUNNING, True)
        assert play_on(state, 124.0, Tick(), self.answers(w0=(text, activity)))[0].reason is Reason.STALLED

    def test_no_task_is_reported_before_two_minutes(self) -> None:
        state = stalled(*all_told(50), 10.0, Tick(), self.answers(w0=(self.CALLBACK, self.ACTIVE)))
        assert (state.phase, state.busy, state.seems_stalled) == (Phase.RUNNING, {}, False)

    def test_a_configured_stall_limit_is_exact_even_for_a_task_at_work(self) -> None:
        late, answers = (*all_told(50), 60.0, Tick()), self.answers(w0=(self.CALLBACK, self.ACTIVE))
        assert stalled(*late, answers, stall_s=60.0).reason is Reason.STALLED

    def test_a_halted_task_is_a_stall_despite_another_task_at_work(self) -> None:
        work = (self.CALLBACK, self.ACTIVE)
        state = self.asked(TaskHalted(W2, signal.SIGSTOP, 1.0), w0=work)
        assert play_on(state, 124.0, Tick(), self.answers(w0=work))[0].reason is Reason.STALLED

    def test_a_cluster_is_stopped_if_no_step_follows_the_work_of_a_task(self) -> None:
        """The work may have just ended, and TensorFlow may take a minute to drop the iterator of a long epoch."""
        state = self.asked(w0=(self.CALLBACK, self.IDLE))
        for time in (150.0, 180.0, 210.0):
            state, actions = play_on(state, time - 0.1, Tick(), time, Tick(), looked(WAITS))
            assert (state.phase, state.waited, actions) == (Phase.RUNNING, False, [AskStacks()])
        assert play_on(state, 239.0, told(W0, 51), 248.0, Tick())[0].suspicion is None
        state, _ = play_on(state, 240.0, Tick(), looked(WAITS))
        state, actions = play_on(state, 244.0, Tick(), looked(WAITS))
        assert (state.reason, actions) == (Reason.STALLED, [AskStacks(), FAILURE_STOP])

    def test_a_cluster_in_which_no_task_can_go_on_after_work_is_stopped_soon(self) -> None:
        state = self.asked(w0=(self.CALLBACK, self.IDLE))
        state, _ = play_on(state, 150.0, Tick(), looked(STUCK), 154.0, Tick(), looked(STUCK))
        assert state.reason is Reason.STALLED

    def test_the_stall_limit_after_work_is_longer_for_slow_steps(self) -> None:
        steps = (10.0, *all_told(50, step_s=10.0), 210.0, Tick())
        state = stalled(*steps, StacksReceived({W0: self.CALLBACK}, {W0: self.IDLE}))
        for time in range(240, 410, 30):
            state, _ = play_on(state, float(time), Tick(), looked(WAITS))
            assert (state.phase, state.waited) == (Phase.RUNNING, False)
        state, _ = play_on(state, 420.0, Tick(), looked(WAITS), 424.0, Tick(), looked(WAITS))
        assert state.reason is Reason.STALLED

    def test_a_task_that_is_at_work_again_is_not_stopped(self) -> None:
        state = self.asked(w0=(self.CALLBACK, self.IDLE))
        work = self.answers(w0=(self.CALLBACK, self.IDLE))
        for time in range(150, 700, 30):
            state, _ = play_on(state, float(time), Tick(), work if time % 90 == 0 else looked(WAITS))
            assert (state.phase, state.suspicion, state.waited) == (Phase.RUNNING, None, False)

    def test_a_step_after_work_restarts_the_stall_limit(self) -> None:
        state = self.asked(w0=(self.CALLBACK, self.IDLE))
        state, _ = play_on(state, 130.0, told(W0, 51), 139.0, Tick())
        assert (state.busy, state.suspicion) == ({}, None)
        assert play_on(state, 140.0, Tick())[0].suspicion is Reason.STALLED


class TestSeparateTraining:
    """Whether tasks that should train as one cluster do."""

    RULES = make_policy({"a": [W0, W1]})
    STARTED = (*preparing(RULES), *started(W0, W1))

    def test_steps_of_all_tasks_show_that_a_cluster_is_up(self) -> None:
        state, _ = play(self.RULES, *self.STARTED, *listening(W0), told(W0, 1))
        assert state.phase is Phase.FORMING
        state, _ = play_on(state, told(W1, 1), START_S, Tick())
        assert (state.phase, state.separate) == (Phase.RUNNING, frozenset())

    @pytest.mark.parametrize("strategy", ["", "jax", "MultiWorkerMirroredStrategy"])
    def test_tasks_that_train_without_an_open_port_are_not_reported_as_separate(self, strategy: str) -> None:
        """They may use other ports, or Horovod, MPI or JAX."""
        steps = [replace(told(task, 1), strategy=strategy) for task in (W0, W1)]
        state, _ = play(self.RULES, *self.STARTED, *steps, START_S, Tick())
        assert (state.phase, state.separate) == (Phase.RUNNING, frozenset())
        state, _ = play_on(state, exited(W0), exited(W1), NodeEmpty("a"))
        assert judged(state).evidence == []

    @pytest.mark.parametrize("strategy", ["MirroredStrategy", "no strategy"])
    def test_tasks_with_a_single_process_strategy_are_reported_as_separate(self, strategy: str) -> None:
        said = [TaskReported(task, "is busy", 1.0, strategy=strategy) for task in (W0, W1)]
        state, _ = play(self.RULES, *self.STARTED, said[0])
        assert state.separate == frozenset()
        state, _ = play_on(state, said[1], START_S, Tick())
        assert (state.phase, state.separate) == (Phase.RUNNING, frozenset({W0, W1}))

    def test_a_single_task_is_not_reported_as_separate(self) -> None:
        policy = make_policy({"a": [W0]})
        state, _ = play(policy, *preparing(policy), *started(W0), told(W0, 1))
        assert state.separate == frozenset()

    def test_the_start_timeout_is_extended_for_tasks_at_work_before_any_port_opens(self) -> None:
        late = (START_S, Tick())
        at_work = StacksReceived({}, {task: Activity(idle_s=1.0) for task in (W0, W1)})
        state, _ = play(self.RULES, *self.STARTED, *late, at_work)
        assert (state.phase, state.deadline) == (Phase.FORMING, 2 * START_S)
        state, _ = play(self.RULES, *self.STARTED, *listening(W0), *late, at_work)
        assert state.reason is Reason.START_TIMEOUT


class TestBlame:
    def staller(self, *events: Event | float, **stacks: str) -> TaskId | None:
        texts = {task: stacks.get(name, WAITING) for name, task in (("w0", W0), ("w1", W1), ("w2", W2))}
        return find_staller(stalled(*events, 300.0, Tick(), StacksReceived(texts), stall_s=120.0))

    def test_no_task_is_blamed_for_a_stall_if_all_stacks_are_equal(self) -> None:
        assert self.staller(*all_told(50)) is None

    def test_a_task_stopped_by_a_signal_is_blamed_for_a_stall(self) -> None:
        assert self.staller(*all_told(50), TaskHalted(W2, signal.SIGSTOP, 1.0), w1=SLEEPING) == W2

    def test_a_task_in_user_code_is_blamed_for_a_stall(self) -> None:
        assert self.staller(*all_told(50), w1=SLEEPING) == W1

    def test_a_task_with_another_thread_in_user_code_is_blamed_for_a_stall(self) -> None:
        assert self.staller(*all_told(50), w1=SLEEPING + WAITING) == W1

    def test_a_task_one_step_behind_is_blamed_for_a_stall(self) -> None:
        gang_events = (*all_told(50), told(W1, 49))
        assert self.staller(*gang_events) == W1
        assert render_steps(stalled(*gang_events)) == "steps done: 49 by worker:1, 50 by the others"

    def test_the_only_task_with_a_different_stack_is_blamed_for_a_stall(self) -> None:
        assert self.staller(*all_told(50), w1=WAITING.replace("53", "99")) == W1

    def test_no_task_is_blamed_for_a_stall_if_two_are_in_user_code(self) -> None:
        assert self.staller(*all_told(50), w1=SLEEPING, w2=SLEEPING) is None


def test_log_lines_of_the_leader_about_missing_tasks_are_parsed() -> None:
    first = b"I0000 coordination_service.cc:502] Waiting for 2/3 tasks to connect.\nI0000 Example stragglers:\n"
    first += b"/job:worker/replica:0/task:1\n/job:worker/replica:0/task:2\n"
    then = first + b"I0000 Waiting for 1/3 tasks to connect.\nExample stragglers:\n/job:worker/replica:0/task:2\n"
    assert parse_not_joined(b"") is None
    assert parse_not_joined(first) == frozenset({W1, W2})
    assert parse_not_joined(then) == frozenset({W2})
    assert parse_not_joined(then + b"I0000 Waiting for 0/3 tasks to connect.\n") == frozenset()
    chief = TaskId("chief", 0)
    assert (find_leader([W1, W0]), find_leader([W0, chief]), find_leader([W1])) == (W0, chief, None)

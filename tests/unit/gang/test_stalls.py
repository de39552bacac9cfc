"""A cluster that makes no progress: when it counts as stalled, which task is to blame, and what is done about it."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from launcher.controller.attempt import parse_not_joined
from launcher.gang.events import AskStacks, Event, NodeEmpty, StacksReceived, TaskHalted, TaskReported, TaskWrote, Tick
from launcher.gang.state import AttemptState, Phase, Reason
from launcher.gang.watch.stalls import render_busy
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


class TestWhen:
    def test_without_a_word_about_steps_a_cluster_is_not_stopped(self) -> None:
        assert stalled(1e6, Tick()).phase is Phase.RUNNING

    @pytest.mark.parametrize(("step_s", "limit_s"), [(0.5, 120.0), (10.0, 200.0)])
    def test_twenty_steps_are_too_long_for_one_and_two_minutes_always_enough(
        self, step_s: float, limit_s: float
    ) -> None:
        steps = (10.0, *all_told(50, step_s=step_s))
        assert stalled(*steps, 10.0 + limit_s - 0.1, Tick()).suspicion is None
        assert stalled(*steps, 10.0 + limit_s, Tick()).suspicion is Reason.STALLED

    def test_before_two_steps_nothing_is_known_of_their_time(self) -> None:
        assert stalled(*all_told(0), 1e4, Tick(), *all_told(1), 1e6, Tick()).suspicion is None

    def test_once_training_is_over_the_program_may_take_its_time(self) -> None:
        assert stalled(*all_told(50), *all_told(50, training=False), 1e6, Tick()).suspicion is None

    def test_a_task_that_has_ended_leaves_it_to_the_rules_of_the_end(self) -> None:
        state = stalled(*all_told(50), 10.0, exited(W0), 200.0, Tick(), 310.0, Tick(), StacksReceived({}))
        assert state.reason is Reason.DRAIN_TIMEOUT

    def test_a_limit_counts_from_when_the_cluster_is_up(self) -> None:
        assert stalled(30.0, Tick(), stall_s=30.0).suspicion is Reason.STALLED
        assert stalled(1e6, Tick(), stall_s=0.0).suspicion is None
        assert stalled(*all_told(50), 1e6, Tick(), stall_s=0.0).suspicion is None

    def test_output_counts_only_for_programs_that_report_no_steps(self) -> None:
        assert stalled(20.0, TaskWrote(W1), 49.0, Tick(), stall_s=30.0).suspicion is None
        assert stalled(*all_told(5), 20.0, TaskWrote(W1), 31.0, Tick(), stall_s=30.0).suspicion is Reason.STALLED

    def test_a_program_may_count_its_steps_from_0(self) -> None:
        reports = [
            TaskReported(task, "is training", 990.0, Progress(9, 0, 10, 1000.0, 1010.0)) for task in (W0, W1, W2)
        ]
        assert stalled(*reports, 119.0, Tick()).suspicion is None
        assert stalled(*reports, 120.0, Tick()).suspicion is Reason.STALLED
        assert stalled(*reports).status[W0].stepping is not None

    def test_a_batch_of_any_task_counts(self) -> None:
        state = stalled(*all_told(5), 29.0, told(W2, 6), 58.0, Tick(), stall_s=30.0)
        assert state.suspicion is None


class TestThen:
    LATE = (*all_told(50), 120.0, Tick())

    def test_all_are_asked_for_their_stacks_before_they_are_stopped(self) -> None:
        policy = make_policy(THREE)
        state, actions = play(policy, *running(policy), *self.LATE, StacksReceived({W0: WAITING}))
        assert actions[2:] == [AskStacks(), FAILURE_STOP]
        assert (state.reason, state.stacks, state.stalled_s) == (Reason.STALLED, {W0: WAITING}, 120.0)
        assert render_stall(state) == "no step for 120 s (a step usually takes 0.5 s)"

    def test_a_step_calls_it_off(self) -> None:
        policy = make_policy(THREE)
        state, actions = play(
            policy, *running(policy), *self.LATE, 121.0, told(W1, 51), StacksReceived({}), 200.0, Tick()
        )
        assert (state.phase, state.suspicion, state.deadline) == (Phase.RUNNING, None, None)
        assert actions[2:] == [AskStacks()]

    def test_it_does_not_wait_for_their_stacks_for_ever(self) -> None:
        assert stalled(*self.LATE, 130.0, Tick()).reason is Reason.STALLED

    def test_a_failure_meanwhile_is_the_reason(self) -> None:
        assert stalled(*self.LATE, exited(W1, 1)).reason is Reason.TASK_FAILED


class TestAtWork:
    """A task at work is named, and not stopped, unless the user has set a limit."""

    LATE = (*all_told(50), 120.0, Tick())
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

    def asked(self, *events: Event | float, stall_s: float | None = None, **said: tuple[str, Activity]) -> AttemptState:
        answers = {task: said.get(f"w{task.index}", (WAITING, self.LOCKED)) for task in (W0, W1, W2)}
        texts = {task: text for task, (text, _) in answers.items()}
        activity = {task: activity for task, (_, activity) in answers.items()}
        return stalled(*self.LATE, *events, StacksReceived(texts, activity), stall_s=stall_s)

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
    def test_it_is_named_and_left_at_it(self, text: str, activity: Activity, place: str) -> None:
        state = self.asked(w0=(text, activity))
        assert (state.phase, state.suspicion, state.busy) == (Phase.RUNNING, None, {W0: place})
        assert render_busy(state) == f"worker:0 has been {place} for 120 s; the others wait"

    @pytest.mark.parametrize(
        ("text", "activity"),
        [(SAVING, IDLE), (CALLBACK, LOCKED), (LOCK, IDLE), (CALLBACK + WAITING, LOCKED), ("", IDLE), ("", Activity())],
    )
    def test_a_task_that_waits_is_not_at_work(self, text: str, activity: Activity) -> None:
        assert self.asked(w0=(text, activity)).reason is Reason.STALLED

    def test_a_limit_of_the_users_is_exact(self) -> None:
        assert self.asked(w0=(self.CALLBACK, self.ACTIVE), stall_s=60.0).reason is Reason.STALLED

    def test_a_task_that_a_signal_stopped_is_not_excused_by_another(self) -> None:
        state = self.asked(TaskHalted(W2, signal.SIGSTOP, 1.0), w0=(self.CALLBACK, self.ACTIVE))
        assert state.reason is Reason.STALLED

    def test_it_is_asked_again_after_a_minute_and_stopped_once_all_have_waited_for_as_long_as_usual(self) -> None:
        """Its work may have just ended, and TensorFlow may take a minute to drop the iterator of a long epoch."""
        state = self.asked(w0=(self.CALLBACK, self.IDLE))
        state, actions = play_on(state, 179.0, Tick(), 180.0, Tick(), StacksReceived({}))
        assert (state.phase, state.suspicion, actions) == (Phase.RUNNING, None, [AskStacks()])
        state, actions = play_on(state, 299.0, Tick())
        assert (state.phase, state.suspicion, actions) == (Phase.RUNNING, None, [])
        assert play_on(state, 299.0, told(W0, 51), 418.0, Tick())[0].suspicion is None
        state, actions = play_on(state, 300.0, Tick(), StacksReceived({}))
        assert (state.reason, actions) == (Reason.STALLED, [AskStacks(), FAILURE_STOP])

    def test_slow_steps_have_their_time_after_work_too(self) -> None:
        steps = (10.0, *all_told(50, step_s=10.0), 210.0, Tick())
        work, none = StacksReceived({W0: self.CALLBACK}, {W0: self.IDLE}), StacksReceived({})
        state = stalled(*steps, work, 270.0, Tick(), none, 469.0, Tick())
        assert (state.phase, state.suspicion) == (Phase.RUNNING, None)
        assert play_on(state, 470.0, Tick(), none)[0].reason is Reason.STALLED

    def test_a_task_that_is_at_work_again_gets_its_time_again(self) -> None:
        state = self.asked(w0=(self.CALLBACK, self.IDLE))
        work = StacksReceived({W0: self.CALLBACK}, {W0: self.IDLE})
        for time in (180.0, 300.0, 360.0, 480.0):
            state, _ = play_on(state, time, Tick(), work if time in (300.0, 480.0) else StacksReceived({}))
            assert (state.phase, state.suspicion) == (Phase.RUNNING, None)

    def test_a_step_ends_it(self) -> None:
        state = self.asked(w0=(self.CALLBACK, self.IDLE))
        state, _ = play_on(state, 130.0, told(W0, 51), 249.0, Tick())
        assert (state.busy, state.suspicion) == ({}, None)
        assert play_on(state, 250.0, Tick())[0].suspicion is Reason.STALLED


class TestTogether:
    """Whether training tasks that should be one cluster are one."""

    RULES = make_policy({"a": [W0, W1]})
    STARTED = (*preparing(RULES), *started(W0, W1))

    def test_steps_show_that_a_cluster_is_up(self) -> None:
        state, _ = play(self.RULES, *self.STARTED, *listening(W0), told(W0, 1))
        assert state.phase is Phase.FORMING
        state, _ = play_on(state, told(W1, 1), START_S, Tick())
        assert (state.phase, state.separate) == (Phase.RUNNING, frozenset())

    @pytest.mark.parametrize("strategy", ["", "jax", "MultiWorkerMirroredStrategy"])
    def test_tasks_that_do_steps_without_a_port_may_train_together(self, strategy: str) -> None:
        """They may name other ports, or use Horovod, MPI or JAX."""
        steps = [replace(told(task, 1), strategy=strategy) for task in (W0, W1)]
        state, _ = play(self.RULES, *self.STARTED, *steps, START_S, Tick())
        assert (state.phase, state.separate) == (Phase.RUNNING, frozenset())
        state, _ = play_on(state, exited(W0), exited(W1), NodeEmpty("a"))
        assert judged(state).evidence == []

    @pytest.mark.parametrize("strategy", ["MirroredStrategy", "no strategy"])
    def test_tasks_that_are_known_to_train_alone_do(self, strategy: str) -> None:
        said = [TaskReported(task, "is busy", 1.0, strategy=strategy) for task in (W0, W1)]
        state, _ = play(self.RULES, *self.STARTED, said[0])
        assert state.separate == frozenset()
        state, _ = play_on(state, said[1], START_S, Tick())
        assert (state.phase, state.separate) == (Phase.RUNNING, frozenset({W0, W1}))

    def test_one_task_alone_is_no_cluster(self) -> None:
        policy = make_policy({"a": [W0]})
        state, _ = play(policy, *preparing(policy), *started(W0), told(W0, 1))
        assert state.separate == frozenset()

    def test_tasks_at_work_before_any_port_is_open_get_more_time_to_form(self) -> None:
        late = (START_S, Tick())
        at_work = StacksReceived({}, {task: Activity(idle_s=1.0) for task in (W0, W1)})
        state, _ = play(self.RULES, *self.STARTED, *late, at_work)
        assert (state.phase, state.deadline) == (Phase.FORMING, 2 * START_S)
        state, _ = play(self.RULES, *self.STARTED, *listening(W0), *late, at_work)
        assert state.reason is Reason.START_TIMEOUT


class TestWhom:
    def staller(self, *events: Event | float, **stacks: str) -> TaskId | None:
        texts = {task: stacks.get(name, WAITING) for name, task in (("w0", W0), ("w1", W1), ("w2", W2))}
        return find_staller(stalled(*events, 300.0, Tick(), StacksReceived(texts), stall_s=120.0))

    def test_nobody_if_all_are_alike(self) -> None:
        assert self.staller(*all_told(50)) is None

    def test_the_one_that_a_signal_stopped(self) -> None:
        assert self.staller(*all_told(50), TaskHalted(W2, signal.SIGSTOP, 1.0), w1=SLEEPING) == W2

    def test_the_one_that_is_in_the_programs_own_code(self) -> None:
        assert self.staller(*all_told(50), w1=SLEEPING) == W1

    def test_the_one_whose_other_thread_is(self) -> None:
        assert self.staller(*all_told(50), w1=SLEEPING + WAITING) == W1

    def test_the_one_that_is_a_step_behind(self) -> None:
        gang_events = (*all_told(50), told(W1, 49))
        assert self.staller(*gang_events) == W1
        assert render_steps(stalled(*gang_events)) == "steps done: 49 by worker:1, 50 by the others"

    def test_the_one_that_is_elsewhere(self) -> None:
        assert self.staller(*all_told(50), w1=WAITING.replace("53", "99")) == W1

    def test_nobody_if_two_are_elsewhere(self) -> None:
        assert self.staller(*all_told(50), w1=SLEEPING, w2=SLEEPING) is None


def test_the_leaders_lines_about_missing_tasks_are_parsed() -> None:
    first = b"I0000 coordination_service.cc:502] Waiting for 2/3 tasks to connect.\nI0000 Example stragglers:\n"
    first += b"/job:worker/replica:0/task:1\n/job:worker/replica:0/task:2\n"
    then = first + b"I0000 Waiting for 1/3 tasks to connect.\nExample stragglers:\n/job:worker/replica:0/task:2\n"
    assert parse_not_joined(b"") is None
    assert parse_not_joined(first) == frozenset({W1, W2})
    assert parse_not_joined(then) == frozenset({W2})
    assert parse_not_joined(then + b"I0000 Waiting for 0/3 tasks to connect.\n") == frozenset()
    chief = TaskId("chief", 0)
    assert (find_leader([W1, W0]), find_leader([W0, chief]), find_leader([W1])) == (W0, chief, None)

"""The verdict on out-of-step workers shows where each worker is, whichever worker gets TensorFlow's error."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from launcher.gang.events import StacksReceived, TaskExited
from launcher.gang.state import AttemptState, Reason
from launcher.gang.watch.stacks import find_call, find_outsider, is_out_of_step, render_split
from launcher.tasks import TaskId
from launcher.verdict.causes import find_cause, is_collateral
from launcher.verdict.judge import exit_status
from tests.harness.builders.gang import ONE_NODE, W0, W1, W2, make_policy, play, running
from tests.harness.builders.verdicts import THREE, UNAVAILABLE, ended, failed, judged
from worker_entry.protocol.values import CrashRecord, SourceLine, TaskExit

OTHER_TYPE = "Collective instance 151 expected type 0 and data_type 1 but got type 2 and data_type 3"
OTHER_SHAPE = (
    "Shape mismatch in the collective instance 157. Op at device /job:worker/replica:0/task:1/device:CPU:0 expected "
    "shape [27] but another member in the group expected shape [1]."
)
AT_PEER = (
    "\nAdditional GRPC error information from remote target /job:worker/replica:0/task:0 while calling "
    "/tensorflow.WorkerService/CompleteInstance:\n:UNKNOWN:Error received from peer  {grpc_status:13}"
)
EVALUATE = """Current thread 0x00007f22 (most recent call first):
  File "/venv/lib/python3.11/site-packages/tensorflow/python/eager/execute.py", line 53 in quick_execute
  File "/venv/lib/python3.11/site-packages/keras/src/backend/tensorflow/trainer.py", line 531 in evaluate
  File "/venv/lib/python3.11/site-packages/keras/src/utils/traceback_utils.py", line 117 in error_handler
  File "/home/me/train.py", line 31 in validate
  File "/home/me/train.py", line 60 in <module>
"""
FIT = SourceLine("/home/me/train.py", 29, "fit")


def apart(task: TaskId, at: float, place: SourceLine | None = FIT, said: str = OTHER_TYPE) -> TaskExited:
    message = f"Graph execution error:\n\nCollective ops is aborted by: {said}{AT_PEER}"
    return TaskExited(task, TaskExit(1), at, CrashRecord(at - 1.0, "InternalError", message, None, None, None, place))


def split(layout: dict[str, list[TaskId]], *exits: TaskExited, **stacks: str) -> AttemptState:
    policy = make_policy(layout)
    state, _ = play(policy, *running(policy), *exits[:1])
    state = replace(state, stacks={TaskId("worker", int(name[1:])): text for name, text in stacks.items()})
    stopped = state.policy.tasks - {exits[0].task}
    ends = {event.task: event for event in exits}
    return replace(state, reason=Reason.TASK_FAILED, exits=ends, stopped=stopped)


@pytest.mark.parametrize(
    "said", [OTHER_TYPE, OTHER_SHAPE, "Device 1 is joining a group with size 2, but it has size 3"]
)
def test_an_error_about_different_collectives_is_out_of_step_and_not_collateral(said: str) -> None:
    event = apart(W0, 1050.0, said=said)
    assert is_out_of_step(event)
    assert not is_collateral(event, {})


def test_an_error_about_a_lost_peer_is_not_out_of_step() -> None:
    assert not is_out_of_step(failed(W0, 1050.0, "InternalError", f"{UNAVAILABLE}{AT_PEER}"))


def test_an_out_of_step_error_is_found_in_a_log_without_crash_record() -> None:
    state = split(ONE_NODE, ended(W1, 1050.0, code=1))
    cause = find_cause(state, {W1: [f"tensorflow…InternalError: Collective ops is aborted by: {OTHER_TYPE}"]})
    assert cause is not None
    assert cause.reference == "out-of-step"


def test_an_out_of_step_verdict_shows_places_from_crash_records_and_stacks() -> None:
    state = split(ONE_NODE, apart(W1, 1050.0), ended(W0, 1051.0, by=signal.SIGKILL), w0=EVALUATE)
    verdict = judged(state)
    assert verdict.reference == "out-of-step"
    assert verdict.message == (
        "worker:0 and worker:1 are out of step: worker:0 is in evaluate at /home/me/train.py:31, "
        "worker:1 in fit at /home/me/train.py:29"
    )
    assert verdict.task is None
    assert verdict.evidence[:2] == [f"worker:1 noticed it: {OTHER_TYPE}", "stopped by distlaunch: worker:0"]
    assert "all workers must make the same calls" in verdict.hint
    assert exit_status(state, verdict) == 1


def test_the_place_in_a_crash_record_takes_precedence_over_the_stack() -> None:
    """The worker may have raised after its stack was taken."""
    lost = failed(W0, 1051.0, "UnavailableError", UNAVAILABLE)
    assert lost.crash is not None
    lost = replace(lost, crash=replace(lost.crash, place=SourceLine("/home/me/train.py", 33, "save")))
    state = split(ONE_NODE, apart(W1, 1050.0), lost, w0=EVALUATE)
    assert render_split(state).startswith("worker:0 is in save at /home/me/train.py:33, ")


def test_the_only_worker_at_a_different_place_is_blamed_as_out_of_step() -> None:
    state = split(THREE, apart(W1, 1050.0), ended(W0, 1051.0, by=signal.SIGKILL), apart(W2, 1050.0), w0=EVALUATE)
    assert find_outsider(state) == W0
    assert judged(state).task == "worker:0"
    assert judged(state).message.startswith("worker:0, worker:1, worker:2 are out of step: worker:0 is in ")
    assert judged(state).message.endswith(", worker:1, worker:2 in fit at /home/me/train.py:29")


def test_a_line_is_one_place_although_the_call_in_it_is_known_of_one_worker_only() -> None:
    """A crash record has the call from the source, a stack has it from the frames."""
    evaluate = SourceLine("/home/me/train.py", 31, "evaluate")
    stack = EVALUATE.replace("in evaluate", "in __call__")
    state = split(THREE, apart(W1, 1050.0), ended(W0, 1051.0, by=signal.SIGKILL), apart(W2, 1050.0, evaluate), w0=stack)
    assert find_outsider(state) == W1
    assert render_split(state) == (
        "worker:0, worker:2 are in evaluate at /home/me/train.py:31, worker:1 in fit at /home/me/train.py:29"
    )


def test_a_line_with_two_known_calls_is_two_places() -> None:
    evaluate, predict = (SourceLine("/home/me/train.py", 31, call) for call in ("evaluate", "predict"))
    stack = EVALUATE.replace("in evaluate", "in __call__")
    state = split(
        THREE, apart(W1, 1050.0, predict), ended(W0, 1051.0, by=signal.SIGKILL), apart(W2, 1050.0, evaluate), w0=stack
    )
    assert find_outsider(state) is None


def test_an_out_of_step_verdict_reports_that_all_workers_are_at_one_place() -> None:
    state = split(ONE_NODE, apart(W1, 1050.0), apart(W0, 1051.0))
    assert render_split(state) == "all are in fit at /home/me/train.py:29"


def test_an_out_of_step_verdict_handles_unknown_places() -> None:
    assert render_split(split(ONE_NODE, apart(W1, 1050.0), ended(W0, 1051.0, by=signal.SIGKILL))) == (
        "worker:1 is in fit at /home/me/train.py:29, worker:0 somewhere unknown"
    )
    state = split(ONE_NODE, apart(W1, 1050.0, None))
    assert judged(state).message == "worker:0 and worker:1 are out of step"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (EVALUATE, SourceLine("/home/me/train.py", 31, "evaluate")),
        ("", None),
        (
            'Current thread 0x0 (most recent call first):\n  File "/home/me/a.py", line 9 in f\n',
            SourceLine("/home/me/a.py", 9),
        ),
        (EVALUATE.replace("in evaluate", "in __call__"), SourceLine("/home/me/train.py", 31)),
    ],
)
def test_the_user_line_and_the_called_function_are_found_in_a_stack(text: str, place: SourceLine | None) -> None:
    assert find_call(text) == place


def test_an_out_of_step_verdict_does_not_repeat_places_in_its_evidence() -> None:
    policy = make_policy(ONE_NODE)
    state, _ = play(policy, *running(policy), apart(W1, 1050.0), StacksReceived({W0: EVALUATE}))
    assert [line for line in judged(state).evidence if "train.py" in line] == []

"""Every failure has a class with a stable name, and the cause is the task that broke the cluster."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

import pytest

from launcher.gang.decide import FAILURE_GRACE_S, RAISED_S, SAVING_S
from launcher.gang.events import ProgramEnded, StopNodes, TaskExited, TaskHalted, TaskReported, Tick
from launcher.gang.state import AttemptState, Phase, Reason
from launcher.tasks import TaskId
from launcher.verdict.causes import classify, find_cause, is_collateral
from tests.harness.builders.gang import (
    ONE_NODE,
    W0,
    W1,
    W2,
    listening,
    make_policy,
    play,
    preparing,
    running,
    started,
)
from tests.harness.builders.verdicts import THREE, UNAVAILABLE, ended, failed, history, judged
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import CrashRecord, FirstError, Problem, TaskExit

OOM = Problem("out-of-memory", "the kernel's OOM killer killed it", "lower the batch size")
FULL = Problem("disk-full", "No space left on device: /runs")
GONE = "tensorflow.python.framework.errors_impl.UnavailableError: Collective ops is aborted by: Socket closed"


def crash(exception: str, message: str) -> CrashRecord:
    status = re.fullmatch(r"sys\.exit\((\d+)\)", message)
    return CrashRecord(1050.0, exception, message, exit_status=int(status[1]) if status is not None else None)


def history_of(event: TaskExited, *, saves: bool = False) -> AttemptState:
    """A cluster whose program has built a PreemptionCheckpointHandler if it `saves`, after the event."""
    return history(ONE_NODE, *([saving(event.task)] if saves else []), event)


def saving(*tasks: TaskId) -> TaskReported:
    [task] = tasks
    return TaskReported(task, "has imported TensorFlow", 1040.0, saves_when_preempted=True)


@pytest.mark.parametrize(
    ("event", "tail", "reference"),
    [
        (TaskExited(W0, TaskExit(1), 1050.0, crash("ValueError", "no batch")), (), "task-failed"),
        (TaskExited(W0, TaskExit(7), 1050.0), (), "task-failed"),
        # The task raised, and was stopped while its interpreter shut down.
        (TaskExited(W0, TaskExit(None, signal.SIGTERM), 1050.0, crash("ValueError", "no batch")), (), "task-failed"),
        (TaskExited(W0, TaskExit(None, signal.SIGKILL), 1050.0, crash("ValueError", "no batch")), (), "task-failed"),
        (TaskExited(W0, TaskExit(42), 1050.0, crash("SystemExit", "sys.exit(42)")), (), "task-failed"),
        # A typing error: argparse exits, and we stop the task while its interpreter shuts down.
        (TaskExited(W0, TaskExit(None, signal.SIGTERM), 1050.0, crash("SystemExit", "sys.exit(2)")), (), "task-failed"),
        (TaskExited(W0, TaskExit(None, signal.SIGKILL), 1050.0, crash("Quit", "sys.exit(2)")), (), "task-failed"),
        (TaskExited(W0, TaskExit(None, signal.SIGKILL), 1050.0, crash("Quit", "no"), evidence=OOM), (), "task-failed"),
        (TaskExited(W0, TaskExit(None, signal.SIGSEGV), 1050.0), (), "task-killed"),
        (TaskExited(W0, TaskExit(None, signal.SIGKILL), 1050.0), (), "task-killed"),
        (TaskExited(W0, TaskExit(None, signal.SIGKILL), 1050.0, evidence=OOM), (), "out-of-memory"),
        (TaskExited(W0, TaskExit(1), 1050.0, crash("ResourceExhaustedError", "OOM when")), (), "out-of-memory"),
        (TaskExited(W0, TaskExit(1), 1050.0, evidence=FULL), (), "disk-full"),
        (TaskExited(W0, TaskExit(1), 1050.0, crash("OSError", "[Errno 28] No space left on device")), (), "disk-full"),
        # The disk is full too, but the task did not end because of that.
        (TaskExited(W0, TaskExit(143), 1050.0, crash("SystemExit", "sys.exit(143)"), evidence=FULL), (), "preempted"),
        (TaskExited(W0, TaskExit(143), 1050.0, crash("OSError", "full"), evidence=FULL), (), "disk-full"),
        (TaskExited(W0, TaskExit(42), 1050.0), (), "task-failed"),
        (TaskExited(W0, TaskExit(143), 1050.0), (), "preempted"),
        (TaskExited(W0, TaskExit(None, signal.SIGTERM), 1050.0), (), "preempted"),
        (TaskExited(W0, TaskExit(1), 1050.0, crash("UnknownError", "Could not start gRPC server")), (), "port-taken"),
        (TaskExited(W0, TaskExit(1), 1050.0), ("UnknownError: Could not start gRPC server",), "port-taken"),
        (
            TaskExited(W0, TaskExit(1), 1050.0),
            ("port: 20000, code: -98, message: address already in use",),
            "port-taken",
        ),
        (TaskExited(W0, TaskExit(1), 1050.0), ("OSError: [Errno 98] Address already in use",), "task-failed"),
        (TaskExited(W0, TaskExit(1), 1050.0), ("127.0.0.1:6006: Address already in use",), "task-failed"),
        (
            TaskExited(W0, TaskExit(None, signal.SIGABRT), 1050.0),
            ("TensorFlow was compiled to use AVX2 instructions, but these aren't available on your machine",),
            "version-mismatch",
        ),
        (
            TaskExited(W0, TaskExit(1), 1050.0, crash("TypeError", "Descriptors cannot be created directly.\nIf")),
            (),
            "version-mismatch",
        ),
        (
            TaskExited(W0, TaskExit(1), 1050.0),
            ("ImportError: a.so: undefined symbol: _ZN10tensorflow8OpKernelE",),
            "version-mismatch",
        ),
    ],
)
def test_each_task_exit_has_its_failure_class(event: TaskExited, tail: Sequence[str], reference: str) -> None:
    assert classify(history_of(event), event, tail).reference == reference


def test_exit_status_42_means_preempted_only_with_a_preemption_handler() -> None:
    for event in (
        TaskExited(W0, TaskExit(42), 1050.0),
        TaskExited(W0, TaskExit(42), 1050.0, crash("SystemExit", "sys.exit(42)")),
        TaskExited(W0, TaskExit(42), 1050.0, evidence=FULL),
    ):
        assert classify(history_of(event, saves=True), event, ()).reference == "preempted"
        assert classify(history_of(event), event, ()).reference != "preempted"
    raised = TaskExited(W0, TaskExit(42), 1050.0, crash("ValueError", "no batch"))
    assert classify(history_of(raised, saves=True), raised, ()).reference == "task-failed"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("Collectives are not yet implemented for CPU devices when compiling with XLA.", "jit_compile=True"),
        ("RuntimeError: SLURM_PROCID not found in environment. Not running inside a SLURM step?", "TF_CONFIG"),
        ("Loaded runtime CuDNN library: 8.9.4 but source was compiled with: 9.3.0.", "tensorflow[and-cuda]"),
        ("CUDA driver version is insufficient for CUDA runtime version", "update the driver"),
        ("no kernel image is available for execution on the device", "was not built for this GPU"),
        ("A module that was compiled using NumPy 1.x cannot be run in NumPy 2.1", "numpy<2"),
        (
            "[Errno 11] Unable to synchronously create file (unable to lock file, errno = 11, error message = 'R')",
            "give each worker its own path",
        ),
        (
            "allow_missing_files was set to false and m/variables/variables_temp/part-00000 did not exist.NOT_FOUND: m",
            "give each worker its own path",
        ),
        ("Serialized cache key does not match. [Op:__inference_f_176]", "remove the folder"),
        ("InternalError: Failed to parse serialized CpuAotCompilationResult.", "remove the folder"),
        ("Attempt to convert a value (PerReplica:{ 0: <tf.Tensor", "set keras.patch to true"),
        ("you need to pass this dataset to ClusterCoordinator.create_per_worker_dataset.", "TF_USE_LEGACY_KERAS=1"),
        ("Keras 3 only supports V3 `.keras` files and legacy H5 format files", "TF_USE_LEGACY_KERAS=1"),
        ("Collective ops must be configured at program startup", "before any other operation"),
        ("Mixing different tf.distribute.Strategy objects: <tensorflow.python", "within `strategy.scope()`"),
        (
            "`colocate_vars_with` must only be passed a variable created in this tf.distribute.Strategy.scope(), not",
            "within `strategy.scope()`",
        ),
        ("OOM when allocating tensor with shape[512,512]", "batch size"),
        (
            "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16 bytes",
            "batch size",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "batch size"),
        ("jax.distributed.initialize() must be called before any JAX calls that might", "first, before"),
        (
            "AssertionError: <class 'ArrayImpl'> passed to device_put is not the same on each process.",
            "set_random_seed",
        ),
        ("With auto-sharding enabled, the data must be provided as a `tf.data.Dataset` instance.", "set keras.patch"),
    ],
)
def test_a_known_error_message_has_a_hint(text: str, hint: str) -> None:
    event = TaskExited(W0, TaskExit(1), 1050.0)
    assert hint in classify(history_of(event), event, ["other lines", text]).hint


def test_a_task_with_a_log_that_blames_a_peer_is_not_the_cause() -> None:
    state = history(ONE_NODE, ended(W0, 1050.0, code=1), ended(W1, 1051.0, code=9))
    assert cause_of(state, {W0: ("Traceback (most recent call last):", GONE)}) == (W1, "task-failed")
    assert cause_of(state, {}) == (W0, "task-failed")


def test_a_task_whose_heartbeat_the_leader_does_not_answer_is_not_the_cause() -> None:
    message = (
        "Collective ops is aborted by: Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat\n"
        "The error could be from a previous operation. Restart your program to reset."
    )
    state = history(ONE_NODE, failed(W0, 1050.0, "DeadlineExceededError", message), ended(W1, 1051.0, code=9))
    assert cause_of(state, {}) == (W1, "task-failed")


def test_the_device_name_of_an_operation_is_no_sign_of_a_lost_peer() -> None:
    wrapper = "{{function_node __wrapped__Conv2D_device_/job:worker/replica:0/task:0/device:GPU:0}} "
    said = f"{wrapper}cuDNN launch failure"
    assert not is_collateral(TaskExited(W0, TaskExit(1), 1050.0, crash("InternalError", said)), {})
    assert not is_collateral(ended(W0, 1050.0, code=1), {W0: (f"errors_impl.InternalError: {said}",)})


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        (
            "JaxRuntimeError",
            "INTERNAL: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection",
        ),
        ("ValueError", "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error"),
        ("XlaRuntimeError", "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):"),
    ],
)
def test_an_error_of_jax_that_blames_a_peer_is_not_the_cause(exception: str, message: str) -> None:
    state = history(ONE_NODE, failed(W0, 1050.0, exception, message), ended(W1, 1051.0, code=9))
    assert cause_of(state, {}) == (W1, "task-failed")


def test_a_process_that_jax_aborts_because_a_peer_is_gone_is_not_the_cause() -> None:
    fatal = (
        "F1129 client.h:80] Terminating process because the JAX distributed service detected fatal errors. This most"
    )
    state = history(ONE_NODE, ended(W0, 1050.0, by=signal.SIGABRT), ended(W1, 1051.0, code=9))
    assert cause_of(state, {W0: (fatal, "absl::Status: UNAVAILABLE")}) == (W1, "task-failed")
    assert cause_of(state, {}) == (W0, "task-killed")


def test_a_task_killed_by_a_signal_is_the_cause_despite_its_log() -> None:
    state = history(ONE_NODE, ended(W0, 1050.0, by=signal.SIGSEGV), ended(W1, 1051.0, code=9))
    assert cause_of(state, {W0: (GONE,)}) == (W0, "task-killed")


def test_a_task_that_ended_early_is_the_cause_of_peer_failures() -> None:
    state = history(THREE, ended(W1, 1050.0), failed(W0, 1059.8, "UnavailableError", UNAVAILABLE))
    assert cause_of(state, {}) == (W1, "ended-early")


def test_a_task_that_finished_early_is_the_cause_even_if_it_exits_later() -> None:
    early = TaskExited(W1, TaskExit(0), 1051.0, finished=1050.0)
    state = history(THREE, failed(W0, 1050.9, "UnavailableError", UNAVAILABLE, raised=1050.4), early)
    assert cause_of(state, {}) == (W1, "ended-early")


def test_a_halted_task_is_the_cause_of_peer_failures() -> None:
    lost = failed(W0, 1060.0, "UnavailableError", "/job:worker/replica:0/task:2 stopped sending heartbeats")
    halted = TaskHalted(W2, signal.SIGSTOP, 1050.0)
    assert cause_of(history(THREE, halted, lost), {}) == (W2, "stalled")
    assert cause_of(history(THREE, halted, TaskHalted(W2, None, 1051.0), lost), {}) == (W0, "task-failed")
    assert cause_of(history(THREE, halted, failed(W0, 1060.0)), {}) == (W0, "task-failed")


def test_an_interpreter_crash_after_the_program_finished_is_no_failure() -> None:
    aborted = TaskExited(W0, TaskExit(None, signal.SIGABRT), 1051.0, finished=1050.5)
    state = history(ONE_NODE, ended(W1, 1050.0), aborted)
    assert find_cause(state, {}) is None


def test_a_preempted_worker_leaves_time_for_the_others_to_save() -> None:
    state = history(
        ONE_NODE, saving(W0), saving(W1), ended(W0, 1050.0, code=42), SAVING_S - 1.0, ended(W1, 1052.0, code=42)
    )
    assert state.stopped == frozenset()
    assert cause_of(state, {}) == (W0, "preempted")


def test_a_worker_that_fails_while_others_save_ends_the_wait() -> None:
    state = history(THREE, saving(W0), ended(W0, 1050.0, code=42), failed(W1, 1052.0))
    assert state.stopped == {W2}
    assert cause_of(state, {}) == (W0, "preempted")


def test_the_wait_for_saving_workers_is_limited() -> None:
    """Even if `drain_s` sets no limit."""
    policy = make_policy(THREE, drain_s=0.0)
    ends = (saving(W0), 10.0, ended(W0, 1050.0, code=42), 10.0 + SAVING_S - 1.0, Tick())
    state, actions = play(policy, *running(policy), *ends)
    assert state.phase is Phase.RUNNING
    state, actions = play(policy, *running(policy), *ends, 10.0 + SAVING_S, Tick())
    assert actions[-1] == StopNodes(FAILURE_GRACE_S)
    assert cause_of(state, {}) == (W0, "preempted")


def test_exit_status_42_without_a_preemption_handler_stops_the_cluster() -> None:
    state = history(THREE, ended(W0, 1050.0, code=42))
    assert state.stopped == {W1, W2}
    assert cause_of(state, {}) == (W0, "task-failed")


@pytest.mark.parametrize(
    ("fault", "event", "reference"),
    [
        ("kill@step=5", TaskExited(W0, TaskExit(None, signal.SIGKILL), 1050.0, evidence=OOM), "task-killed"),
        ("exit@step=5", TaskExited(W0, TaskExit(1), 1050.0), "task-failed"),
        ("preempt@step=5", TaskExited(W0, TaskExit(None, signal.SIGTERM), 1050.0), "preempted"),
        ("preempt@step=5", TaskExited(W0, TaskExit(None, signal.SIGKILL), 1080.0), "preempted"),
    ],
)
def test_an_injected_fault_is_reported_as_injected(fault: str, event: TaskExited, reference: str) -> None:
    status = TaskReported(W0, "trains", 1040.0, injected=(fault,))
    verdict = judged(history(ONE_NODE, status, event))
    what, _, moment = fault.partition("@")
    assert (verdict.reference, verdict.task) == (reference, "worker:0")
    assert verdict.message.endswith(f" s, as --chaos {what}:worker:0@{moment} asked for")
    other = judged(history(ONE_NODE, status, failed(W0, 1050.0)))
    assert ("--chaos" in other.message) == (what == "preempt")


def cause_of(state: AttemptState, tails: dict[TaskId, Sequence[str]]) -> tuple[TaskId, str]:
    cause = find_cause(state, tails)
    assert cause is not None
    return cause.exited.task, cause.reference


def test_a_program_that_raised_is_the_cause_although_its_process_exits_with_status_0() -> None:
    """An exit handler may call `os._exit(0)`, after the others were stopped because of the exception."""
    raised = ProgramEnded(W0, 1050.0, CrashRecord(1050.0, "ValueError", "no batch"))
    state = history(ONE_NODE, raised, RAISED_S, Tick(), ended(W1, 1060.0, by=signal.SIGKILL), ended(W0, 1061.0))
    assert state.reason is Reason.TASK_FAILED
    cause = find_cause(state, {})
    assert cause is not None
    assert (cause.exited.task, cause.reference) == (W0, "task-failed")


def test_the_only_worker_that_goes_on_when_all_others_have_finished_is_the_cause() -> None:
    late = failed(W1, 1052.0, "UnavailableError", UNAVAILABLE, raised=1051.0)
    state = history(THREE, ended(W0, 1050.0), ended(W2, 1050.5), late)
    assert cause_of(state, {}) == (W1, "ended-early")
    assert judged(state).message.endswith(" s, when all others had finished")


def test_the_task_that_has_not_opened_its_port_is_the_cause_of_peers_that_cannot_reach_it() -> None:
    policy = make_policy(THREE)
    lost = failed(W0, 1050.0, "UnavailableError", UNAVAILABLE)
    begins = [*preparing(policy), *started(W0, W1, W2), *listening(W0, W1)]
    state, _ = play(policy, *begins, lost, ended(W1, 1052.0, by=signal.SIGKILL), ended(W2, 1052.0, by=signal.SIGKILL))
    verdict = judged(state)
    assert (verdict.reference, verdict.task) == ("task-failed", "worker:2")
    assert verdict.message.startswith(
        "worker:2 on a has not opened its port 20002, and worker:0, which needs it, exited with"
    )
    state, _ = play(policy, *begins, lost, replace(lost, task=W2, time=1051.0), ended(W1, 1052.0, by=9))
    assert judged(state).task == "worker:2", "it may fail as well, a little later"
    state, _ = play(policy, *begins, failed(W0, 1050.0), ended(W1, 1052.0, by=9), ended(W2, 1052.0, by=9))
    assert judged(state).task == "worker:0"


def wrapped(task: TaskId, at: float, first: FirstError) -> TaskExited:
    """The end of a program that raises an exception of its own whenever a step fails."""
    return TaskExited(
        task, TaskExit(1), at, CrashRecord(at, "StepError", "step 25 failed", "train.py", 70, first=first)
    )


def test_a_peer_that_wraps_the_error_of_a_lost_peer_is_not_the_cause() -> None:
    lost = FirstError("UnavailableError", UNAVAILABLE)
    state = history(THREE, wrapped(W0, 1050.0, lost), wrapped(W2, 1050.5, lost), ended(W1, 1050.1, code=5))
    assert cause_of(state, {}) == (W1, "task-failed")


def test_an_error_that_wraps_another_is_shown_with_it_and_has_its_class() -> None:
    state = history(
        THREE, wrapped(W1, 1050.0, FirstError("OSError", "[Errno 28] No space left on device", "save.py", 7))
    )
    verdict = judged(state)
    assert (verdict.reference, verdict.task) == ("disk-full", "worker:1")
    assert verdict.evidence[:2] == [
        "StepError: step 25 failed   train.py:70",
        "after OSError: [Errno 28] No space left on device   save.py:7",
    ]

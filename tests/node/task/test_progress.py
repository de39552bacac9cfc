"""The progress of training is reported without a call in the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from tests.harness.polling import eventually
from worker_entry.agent.tasks.status_reader import StatusFiles
from worker_entry.protocol.file_names import AttemptFiles
from worker_entry.protocol.values import EPOCH_ENDS
from worker_entry.system import clock
from worker_entry.task import meter as meters
from worker_entry.task.keras_progress import CALLBACK_LISTS, FitLength, _watch, read_iterations
from worker_entry.task.meter import Meter
from worker_entry.task.status_file import StatusFile

COVERS = (
    "worker_entry/task",
    "worker_entry/hooks",
    "worker_entry/progress.py",
    "worker_entry/agent/tasks/status_reader.py",
)


class Counts:
    """A meter that records its calls."""

    def __init__(self) -> None:
        self.step, self.told = 0, list[str]()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.told.append(name)

    def count_step(self, step: int, _: object = None) -> None:
        self.step = step
        self.told.append(f"step {step}")


class Callbacks:
    """A list of callbacks, as in Keras: it calls the user's functions."""

    def __init__(self, **functions: Callable[[], None]) -> None:
        self.model, self.params = None, dict[str, int]()
        self.functions = functions


def _call(name: str) -> Callable[..., None]:
    return lambda self, *_: self.functions.get(name, lambda: None)()


PLACES = ("train_begin", "train_end", "epoch_begin", "epoch_end", "train_batch_begin", "train_batch_end")


for _place in (*PLACES, *(f"{what}{end}" for what in ("test", "predict") for end in ("_begin", "_end", "_batch_end"))):
    setattr(Callbacks, f"on_{_place}", _call(f"on_{_place}"))


@pytest.mark.parametrize("place", [f"on_{place}" for place in PLACES])
def test_a_fit_in_a_callback_does_not_change_the_step_count_around_it(place: str) -> None:
    meter = Counts()
    patched: Any = type("CallbackList", (Callbacks,), {})

    def fit(**functions: Callable[[], None]) -> None:
        callbacks = patched(**functions)
        callbacks.on_train_begin()
        for epoch in range(2):
            callbacks.on_epoch_begin(epoch)
            for batch in range(3):
                callbacks.on_train_batch_begin(batch)
                callbacks.on_train_batch_end(batch, {})
            callbacks.on_epoch_end(epoch, {})
        callbacks.on_train_end()

    def fail() -> None:
        fit(on_train_batch_end=lambda: next(iter(())))

    module = SimpleNamespace(CallbackList=patched, __name__="callbacks")
    _watch(cast("ModuleType", module), cast("Meter", meter), lambda: None)
    fit()
    alone, meter.told, meter.step = [*meter.told], [], 0
    fit(**{place: fit})
    around = [told for told in meter.told if told != "count_batch"]
    assert around == alone
    assert meter.told.count("count_batch") > 0
    with pytest.raises(StopIteration):
        fit(**{place: fail})
    meter.told, meter.step = [], 0
    fit()
    assert meter.told == alone  # the failed fit is no longer active


@pytest.mark.parametrize(
    ("version", "numbers"), [("3.10.0", [0, 4, 8]), ("3.11.0", [3, 7, 9]), ("3.15.1", [3, 7, 9]), ("4.0", [3, 7, 9])]
)
def test_each_step_of_an_execution_counts_whichever_of_them_keras_names(
    version: str, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of ten steps, four in each execution."""
    monkeypatch.setitem(sys.modules, "keras.src.version", cast("ModuleType", SimpleNamespace(__version__=version)))
    meter = Counts()
    patched: Any = type("CallbackList", (Callbacks,), {})
    module = SimpleNamespace(CallbackList=patched, __name__=CALLBACK_LISTS[0])
    _watch(cast("ModuleType", module), cast("Meter", meter), lambda: None)
    callbacks = patched()
    callbacks.model, callbacks.params = SimpleNamespace(steps_per_execution=4), {"epochs": 2, "steps": 10}
    callbacks.on_train_begin()
    for epoch in range(2):
        callbacks.on_epoch_begin(epoch)
        for number in numbers:
            callbacks.on_train_batch_begin(number)
            callbacks.on_train_batch_end(number, {})
        assert meter.step == 10 * (epoch + 1)
        callbacks.on_epoch_end(epoch, {})


class TestFitLength:
    """What Keras passes to its callbacks: the epochs, and the steps of each if they are known."""

    def fit(self, meter: Meter, steps: int | None, epochs: int, first: int = 0) -> list[tuple[int | None, int | None]]:
        """Trains in epochs of 20 steps; returns the totals during each epoch."""
        length, told = FitLength(meter), []
        length.begin_train()
        for epoch in range(first, epochs):
            length.begin_epoch(SimpleNamespace(params={"epochs": epochs, "steps": steps}), epoch)
            meter.count_step(meter.step + 20)
            told.append((meter._progress().total_steps, meter._progress().total_epochs))
            length.end_epoch()
        return told

    def test_the_fit_length_is_known_at_once_and_extended_by_a_second_fit(self, tmp_path: Path) -> None:
        meter = Meter(StatusFile(str(tmp_path / "status.json")), lambda: 0.0)
        assert self.fit(meter, 20, 3) == [(60, 3)] * 3
        assert self.fit(meter, 20, 5, first=3) == [(100, 5)] * 2

    def test_the_fit_length_of_unsized_data_is_known_after_the_first_epoch(self, tmp_path: Path) -> None:
        meter = Meter(StatusFile(str(tmp_path / "status.json")), lambda: 0.0)
        assert self.fit(meter, None, 3) == [(None, 3), (60, 3), (60, 3)]

    def test_iterations_are_unknown_if_the_optimizer_is_missing_raises_or_hangs(self) -> None:
        never = threading.Event()

        def hang() -> int:
            never.wait()
            return 7

        def read(numpy: Callable[[], int]) -> int | None:
            optimizer = SimpleNamespace(_iterations=SimpleNamespace(numpy=numpy))
            return read_iterations(SimpleNamespace(model=SimpleNamespace(optimizer=optimizer)))

        assert read(lambda: 7) == 7
        assert read(lambda: int("no number")) is None
        assert read(hang) is None
        assert read_iterations(SimpleNamespace(model=SimpleNamespace(optimizer=None))) is None
        assert read_iterations(None) is None
        never.set()


class TestMeter:
    def read(self, file: Path) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(file.read_text())
        return told

    def test_a_meter_reports_0_as_the_first_step(self, tmp_path: Path) -> None:
        file = tmp_path / "status.json"
        meter = Meter(StatusFile(str(file)), lambda: 0.0)
        meter.begin()
        meter.count_step(0)
        meter.report()
        assert self.read(file)["progress"]["first_step"] == 0

    def test_the_longest_of_the_usual_times_between_batches_is_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        meter = Meter(StatusFile(str(tmp_path / "status.json")), lambda: 0.0)
        now = 100.0
        monkeypatch.setattr(clock, "now", lambda: now)
        meter.count_step(1)
        meter.report()
        assert meter._progress().p99_s is None
        for number in range(2, 402):
            now += 2.0 if number % 40 == 0 else 0.1  # a checkpoint
            meter.count_step(number) if number % 2 else meter.count_batch()
            if number % 4 == 0:
                meter.report()
        assert meter._progress().p99_s == pytest.approx(2.0, rel=0.15)

    def test_a_step_time_is_the_mean_of_at_least_one_second_of_steps(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One short step before a pause is no measurement: it would look ten times as fast as the mean."""
        meter = Meter(StatusFile(str(tmp_path / "status.json")), lambda: 0.0)
        now, told = 100.0, []
        monkeypatch.setattr(clock, "now", lambda: now)
        for number in range(1, 37):
            now += 0.015 if number % 12 == 1 else 0.1
            meter.count_step(number)
            if number % 12 < 2:  # the program pauses
                now += 5.0
                meter.report()
                now -= 5.0
                told.append(meter._progress().step_s)
        assert told[0] is None
        assert all(step_s is None or 0.09 <= step_s <= 0.1 for step_s in told)
        assert told[-1] is not None

    def test_a_meter_does_not_wait_for_a_report_that_blocks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "status.json"
        meter = Meter(StatusFile(str(file)), lambda: 0.0)
        monkeypatch.setattr(meters, "BLOCK_LIMIT_S", 0.01)
        with meter._reporting:
            meter.report()
            assert self.read(file)["progress"] is None
        meter.report()
        assert self.read(file)["progress"] is not None

    def test_a_status_file_does_not_write_to_a_descriptor_that_the_program_replaced(self, tmp_path: Path) -> None:
        """Some programs close all descriptors that they have not opened, and then open their own."""
        status = StatusFile(str(tmp_path / "status.json"))
        assert status._descriptor is not None
        os.close(status._descriptor)
        status.report_phase("trains")
        with (tmp_path / "own").open("w+") as own:
            os.dup2(own.fileno(), status._descriptor)
            status.report_phase("trains")
            os.close(status._descriptor)
            assert own.read() == ""

    def test_the_thread_of_a_meter_sleeps_while_no_step_is_counted(self, tmp_path: Path) -> None:
        """The profile of a task that only waits for other tasks has to be empty; otherwise, it is not taken again."""
        script = (
            "import sys, threading, time\n"
            "from worker_entry.task.meter import Meter\n"
            "from worker_entry.task.status_file import StatusFile\n"
            "seen = []\n"
            "threading.setprofile(lambda frame, event, what: seen.append(event))\n"
            "meter = Meter(StatusFile(sys.argv[1]), lambda: 0.0)\n"
            "meter.begin(); meter.count_step(1, {'loss': 1.0})\n"
            "deadline = time.monotonic() + 30\n"
            "while time.monotonic() < deadline:\n"
            "    known = len(seen); time.sleep(1.2)\n"
            "    if known and len(seen) == known: break\n"
            "else: raise SystemExit('it never rests')\n"
            "meter.count_step(2)\n"
            "while len(seen) == known:\n"
            "    assert time.monotonic() < deadline, 'it does not wake up'; time.sleep(0.01)\n"
        )
        file = str(tmp_path / "status.json")
        done = subprocess.run([sys.executable, "-c", script, file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_a_meter_reports_steps_epochs_batches_and_finite_metrics(self, tmp_path: Path) -> None:
        file = tmp_path / "status.json"
        meter = Meter(StatusFile(str(file)), lambda: 0.0)
        assert self.read(file)["progress"] is None
        meter.begin()
        assert self.read(file)["progress"]["training"] is True
        assert self.read(file)["progress"]["first_step"] is None
        meter.begin_epoch(3)
        meter.count_step(1, {"loss": 0.5, "text": "no number"})
        meter.count_step(2)
        meter.count_batch()
        meter.report()
        told = self.read(file)["progress"]
        assert (told["step"], told["first_step"], told["batches"]) == (2, 1, 3)
        assert (told["epoch"], told["first_epoch"]) == (3, 3)
        assert told["metrics"] == {"loss": 0.5}
        meter.end_epoch({"loss": 0.25, "nan": float("nan"), "diverged": 7.6e18})
        meter.end()
        told = self.read(file)
        assert told["phase"] == "has trained"
        assert told["progress"]["training"] is False
        assert told["progress"]["metrics"] == {"loss": 0.25, "nan": None, "diverged": None}

    def test_a_meter_keeps_the_ends_of_the_last_epochs(self, tmp_path: Path) -> None:
        """They may come faster than the status is read."""
        files = AttemptFiles(str(tmp_path), 1)
        Path(files.status("worker:0")).parent.mkdir(parents=True, exist_ok=True)
        meter = Meter(StatusFile(files.status("worker:0")), lambda: 0.0)
        reader = StatusFiles(files, "worker:0")
        for epoch in range(1, 9):
            meter.begin_epoch(epoch)
            meter.count_step(10 * epoch)
            meter.end_epoch({"loss": 1 / epoch, "val_loss": 2 / epoch})
            meter.report()
            if epoch in (3, 8):
                status = reader.read_changed()
                assert status is not None
                assert status.progress is not None
                ends = [(end.epoch, end.step, end.metrics["val_loss"]) for end in status.progress.epoch_ends]
                first = 1 if epoch == 3 else 4  # only the new ones
                assert ends == [(number, 10 * number, 2 / number) for number in range(first, epoch + 1)]
        for epoch in range(9, 100):
            meter.begin_epoch(epoch)
            meter.count_step(10 * epoch)
        meter.report()
        progress = self.read(Path(files.status("worker:0")))["progress"]
        assert [end["epoch"] for end in progress["epoch_ends"]] == [*range(99 - EPOCH_ENDS, 99)]

    def test_in_a_custom_training_loop_the_next_epoch_ends_the_previous_one(self, tmp_path: Path) -> None:
        meter = Meter(StatusFile(str(tmp_path / "status.json")), lambda: 0.0)
        for step in range(1, 10):
            meter.begin_epoch(1 + step // 4)
            meter.count_step(step, {"loss": 1.0 / step})
        meter.report()
        ends = [(end.epoch, end.step, end.metrics) for end in meter._progress().epoch_ends]
        assert ends == [(1, 3, {"loss": 1 / 3}), (2, 7, {"loss": 1 / 7})]

    def test_an_epoch_end_has_only_metrics_of_its_own_epoch(self, tmp_path: Path) -> None:
        """A value that is read late belongs to no later epoch."""
        meter = Meter(StatusFile(str(tmp_path / "status.json")), lambda: 0.0)
        blocked = threading.Event()

        def late() -> float:
            blocked.wait()
            return 0.75

        for epoch, value in enumerate((SimpleNamespace(numpy=lambda: 0.5), SimpleNamespace(numpy=late)), 1):
            meter.begin_epoch(epoch)
            meter.count_step(epoch)
            meter.end_epoch({"loss": value, "val_loss": epoch})
        meter.report()
        blocked.set()
        meter.begin_epoch(3)
        meter.count_step(3)
        meter.end_epoch({"val_loss": 3})
        meter.report()
        ends = [(end.epoch, end.metrics) for end in meter._progress().epoch_ends]
        assert ends == [(1, {"loss": 0.5, "val_loss": 1}), (2, {"val_loss": 2}), (3, {"val_loss": 3})]

    def test_a_meter_reports_the_expected_steps_and_epochs_and_the_resumed_step(self, tmp_path: Path) -> None:
        file = tmp_path / "status.json"
        meter = Meter(StatusFile(str(file)), lambda: 0.0)
        meter.resume(500)
        meter.expect(900, 9)
        meter.count_step(1)
        meter.resume(700)  # a second `fit`: the first step has been done
        meter.report()
        told = self.read(file)["progress"]
        assert (told["total_steps"], told["total_epochs"], told["resumed"]) == (900, 9, 500)

    def test_a_status_file_does_not_write_to_a_reused_descriptor(self, tmp_path: Path) -> None:
        source = """
import os, sys
from worker_entry.task.status_file import StatusFile
status = StatusFile("status.json")
status.report_phase("is at work")
os.closerange(3, 1000)
others = [os.open("other", os.O_RDWR | os.O_CREAT) for _ in range(300)]
status.report_phase("has closed everything")
"""
        subprocess.run([sys.executable, "-c", source], cwd=tmp_path, check=True)
        assert (tmp_path / "other").read_bytes() == b""
        assert self.read(tmp_path / "status.json")["phase"] == "is at work"

    def test_a_forked_child_does_not_write_the_status_of_its_parent(self, tmp_path: Path) -> None:
        source = """
import os
from worker_entry.task.status_file import StatusFile
status = StatusFile("status.json")
if os.fork() == 0:
    status.report_phase("is a child")
    os._exit(0)
os.wait()
"""
        subprocess.run([sys.executable, "-c", source], cwd=tmp_path, check=True)
        assert self.read(tmp_path / "status.json")["phase"] == "has not imported TensorFlow"


NASTY = """
import sys, threading
import numpy as np
from worker_entry import progress
from worker_entry.task.meter import Meter, install
from worker_entry.task.status_file import StatusFile

class Nasty:
    def __init__(self, do): self._do = do
    def __float__(self): return self._do()
    def __bool__(self): raise RuntimeError("neither true nor false")
    def __eq__(self, other): raise RuntimeError("not to be compared")
    __hash__ = object.__hash__

def exits(): raise SystemExit(3)
def interrupts(): raise KeyboardInterrupt

class NoMapping(Nasty):
    def items(self): return self._do()

metrics = {
    "raises": Nasty(lambda: 1 / 0), "exits": Nasty(exits), "interrupts": Nasty(interrupts), "text": "none",
    "complex": np.complex64(1j), "array": np.ones(1), "axes": np.ones((2, 2)), "none": None, "number": np.float32(0.5),
}
meter = Meter(StatusFile("status.json"), lambda: None)
install(meter)
meter.begin_epoch(1)
meter.count_step(1, metrics if sys.argv[1] == "values" else NoMapping(exits) if sys.argv[1] == "mapping" else object())
meter.begin()
sys.stdin.readline()
meter.end_epoch({"blocks": Nasty(threading.Event().wait), "plain": 0.25})
progress.report(later=Nasty(lambda: 7.0), sooner=1)
print("goes on", flush=True)
sys.stdin.readline()
progress.report(step=100)
sys.stdin.readline()
"""


@pytest.mark.parametrize("which", ["values", "mapping", "object"])
def test_metrics_of_any_type_neither_stop_the_counting_nor_print_nor_block(tmp_path: Path, which: str) -> None:
    pytest.importorskip("numpy")
    file = tmp_path / "status.json"

    def told() -> dict[str, Any]:
        try:
            progress: dict[str, Any] | None = json.loads(file.read_text())["progress"]
        except (OSError, ValueError):
            raise AssertionError from None
        assert progress is not None
        return progress

    def check(step: int, metrics: dict[str, float]) -> None:
        assert told()["step"] == step
        assert told()["metrics"] == metrics

    command = [sys.executable, "-W", "always", "-c", NASTY, which]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:  # type: ignore[call-overload]
        before = {"array": 1.0, "number": 0.5} if which == "values" else {}
        eventually(lambda: check(1, before))
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "goes on\n"
        # `later` waits for ever behind `blocks`; the other metrics do not.
        eventually(lambda: check(2, {**before, "plain": 0.25, "sooner": 1.0}))
        process.stdin.write("\n")
        process.stdin.flush()
        eventually(lambda: check(100, {**before, "plain": 0.25, "sooner": 1.0}))
        rest, _ = process.communicate("\n", timeout=30)
    assert (rest, process.returncode) == ("", 0)


def test_progress_report_without_a_launcher_does_nothing() -> None:
    source = "from worker_entry import progress; progress.report(step=1, loss=0.5)"
    subprocess.run([sys.executable, "-c", source], check=True)

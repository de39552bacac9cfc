"""`model.fit` of Keras 3 under ParameterServerStrategy trains like tf_keras and, in most cases, like one process.

With one worker, steps are done one after the other, so all numbers are compared. The order of the steps of two workers
varies, so only results that do not depend on it are compared.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Command, distlaunch_command
from tests.harness.processes.keras_runs import CLOSE, OLDER_KERAS, Results, assert_agree, install_keras
from tests.harness.processes.warm_python import WarmPython

PROGRAM = PROGRAMS / "parameter_server_cases.py"
TRAIN_S = 1200.0

pytestmark = [
    pytest.mark.timeout(2 * TRAIN_S),  # the first test of a configuration waits for about 20 cases
]

AS_TF_KERAS = [
    *("fit_on_dataset", "fit_on_function", "validation", "steps_per_execution", "callbacks", "backup_and_restore"),
    "custom_train_step",
]
AS_ONE_PROCESS = [
    *("fit_on_dataset", "fit_on_function", "fit_on_arrays", "fit_on_distributed_dataset", "validation", "evaluate"),
    *("single_batches", "callbacks", "batch_callbacks", "backup_and_restore", "custom_train_step"),
    *("normalized_and_dropped_out", "own_functions", "every_optimizer", "predict_on_batch"),
]
OLDER = f"Keras {OLDER_KERAS}"
ON_OLDER_KERAS = ["fit_on_dataset", "steps_per_execution", "callbacks"]
TWO_WORKERS = [
    *("fit_on_dataset", "fit_on_arrays", "steps_per_execution", "evaluate", "custom_train_step", "converges"),
    *("failures", "without_steps", "refused"),
]


class Runs:
    """Runs the program once per configuration, when a test first asks for it."""

    def __init__(self, folder: Path, warm: Command) -> None:
        self._folder = folder
        self._warm = warm
        self.get = functools.cache(self._get)

    def _get(self, configuration: str) -> Results:
        """
        Args:
            configuration: "one process", "one worker", "two workers", OLDER or "tf_keras".
        """
        folder = self._folder / configuration.replace(" ", "-")
        out = folder / "out"
        folder.mkdir()
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        if configuration == "tf_keras":
            env["TF_USE_LEGACY_KERAS"] = "1"
        if configuration == OLDER:
            place = install_keras(OLDER_KERAS, folder / "packages")
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(place), env.get("PYTHONPATH", "")]))
        some = {"tf_keras": AS_TF_KERAS, OLDER: ON_OLDER_KERAS, "two workers": TWO_WORKERS}
        cases = some.get(configuration, [])
        program = [str(PROGRAM), str(out), *cases]
        if configuration == "one process":
            command = [sys.executable, *program]
        else:
            workers = "2" if configuration == "two workers" else "1"
            options = ["--strategy", "parameter_server", "--workers", workers, "--run-dir", str(folder / "run")]
            start = distlaunch_command if configuration in (OLDER, "tf_keras") else self._warm
            command = start("local", *options, *program)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TRAIN_S, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        results: Results = json.loads((out / "results.json").read_text())
        if configuration != "one process":
            results["log"] = (folder / "run" / "attempt-1" / "chief-0.log").read_text(errors="replace")
            results["progress"] = json.loads((folder / "run" / "report.json").read_text())["attempts"][0]["tasks"]
        return results

    def case(self, configuration: str, name: str) -> Results:
        result: Results = self.get(configuration)[name]
        assert "error" not in result, result["error"]
        return result


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Runs:
    return Runs(tmp_path_factory.mktemp("parameter-server"), warm_python.command)


def numbers_of(result: Any) -> Any:
    """The numbers of a result, with the learning rate named as in Keras 3."""
    if isinstance(result, dict):
        kept = {{"lr": "learning_rate"}.get(name, name): numbers_of(value) for name, value in result.items()}
        return {name: value for name, value in kept.items() if value is not None}
    if isinstance(result, list):
        return [value for value in map(numbers_of, result) if value is not None]
    return result if isinstance(result, (int, float)) else None


def seen_names(result: Results) -> list[str]:
    return [call.replace("'lr', ", "").replace("'learning_rate', ", "") for call in result.get("calls", [])]


@pytest.mark.parametrize(
    ("keras", "case"),
    [
        *(("one worker", case) for case in AS_TF_KERAS),
        *((OLDER, case) for case in ON_OLDER_KERAS),
    ],
)
def test_parameter_server_training_with_one_worker_matches_tf_keras(runs: Runs, keras: str, case: str) -> None:
    expected, result = runs.case("tf_keras", case), runs.case(keras, case)
    assert_agree(numbers_of(expected), numbers_of(result), tolerance=CLOSE)
    assert seen_names(result) == seen_names(expected)


@pytest.mark.parametrize("case", AS_ONE_PROCESS)
def test_parameter_server_training_with_one_worker_matches_one_process(runs: Runs, case: str) -> None:
    expected, result = runs.case("one process", case), runs.case("one worker", case)
    assert_agree(numbers_of(expected), numbers_of(result), tolerance=CLOSE)
    assert result.get("calls") == expected.get("calls")
    assert result.get("seen") == expected.get("seen")


def test_model_and_optimizer_variables_are_on_the_parameter_servers(runs: Runs) -> None:
    assert runs.case("one worker", "fit_on_dataset")["places"] == ["/job:ps"]


def test_epoch_callbacks_get_python_numbers(runs: Runs) -> None:
    assert runs.case("one worker", "callbacks")["types"] == ["float"]


@pytest.mark.parametrize(
    ("case", "seen", "steps"),
    [("fit_on_dataset", 40, 15), ("fit_on_arrays", 40, 15), ("steps_per_execution", 80, 30), ("converges", 480, 180)],
)
def test_metrics_and_optimizer_count_every_step_of_two_workers(runs: Runs, case: str, seen: int, steps: int) -> None:
    result = runs.case("two workers", case)
    assert result["history"]["samples"] == [seen] * 3
    assert result["iterations"] == steps


def test_two_workers_converge_to_the_same_weights_as_one(runs: Runs) -> None:
    one, two = (runs.case(name, "converges") for name in ("one worker", "two workers"))
    for result in (one, two):
        assert result["history"]["loss"][-1] < 1e-4
    assert_agree({"weights": one["weights"]}, {"weights": two["weights"]}, tolerance=1e-3)


@pytest.mark.parametrize("workers", ["one worker", "two workers"])
def test_each_batch_of_an_evaluation_counts_once(runs: Runs, workers: str) -> None:
    result = runs.case(workers, "evaluate")
    for name in ("evaluated", "without_steps", "by_function"):
        assert result[name] == pytest.approx(result["expected"], rel=CLOSE, abs=CLOSE)
    assert result["predicted"] == pytest.approx(result["expected_predictions"], rel=CLOSE, abs=CLOSE)


def test_steps_per_epoch_is_optional_for_arrays_and_required_for_other_data(runs: Runs) -> None:
    assert runs.case("one worker", "without_steps")["samples"] == [20, 20]
    # Three batches of 8, 8 and 4 samples; the two workers begin with different batches.
    assert all(16 <= seen <= 24 for seen in runs.case("two workers", "without_steps")["samples"])
    for refusal in (refusals := runs.case("two workers", "without_steps")["refusals"]):
        assert refusal.startswith("steps_per_epoch must be given under ParameterServerStrategy")
    assert len(refusals) == 2


def test_unsupported_keras_features_are_rejected_under_parameter_server_strategy(runs: Runs) -> None:
    refusals = runs.case("two workers", "refused")["refusals"]
    assert [refusal.partition(",")[0][:60] for refusal in refusals] == [
        "run_eagerly cannot be used under ParameterServerStrategy: wo",
        "gradient_accumulation_steps cannot be used under ParameterSe",
        "class_weight cannot be given for data that a coordinator has",
        "y and sample_weight cannot be given with a function: its dat",
        "under ParameterServerStrategy the data must be a tf.data.Dat",
        "a function that returns a tf.data.Dataset must create all of",
        "predict runs in the chief: call it outside of the scope of P",
    ]


def test_a_failed_step_raises_its_error_and_the_next_fit_works(runs: Runs) -> None:
    for workers in ("one worker", "two workers"):
        result = runs.case(workers, "failures")
        assert "a batch that is wrong" in result["message"]
        assert result["again"] == [40, 40, 40]
    assert runs.case("one worker", "failures")["ended"] == [40]  # the five batches, and then a warning
    assert "Your input ran out of data" in runs.get("one worker")["log"]


@pytest.mark.parametrize("configuration", ["one worker", OLDER])
def test_the_log_has_one_line_about_the_patched_fit(runs: Runs, configuration: str) -> None:
    said = re.findall(r"^distlaunch: patched Keras (\S+) .*", runs.get(configuration)["log"], re.MULTILINE)
    assert said == [runs.get(configuration)["version"]]
    assert "fit under ParameterServerStrategy" in runs.get(configuration)["log"]


def test_tf_keras_is_not_patched_under_parameter_server_strategy(runs: Runs) -> None:
    assert "distlaunch: patched" not in runs.get("tf_keras")["log"]


def start(command: Command, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = ["--strategy", "parameter_server", "--run-dir", str(tmp_path / "run")]
    return subprocess.run(
        command("local", *options, *arguments),
        capture_output=True,
        text=True,
        timeout=TRAIN_S,
        check=False,
    )


def test_a_worker_killed_during_fit_restarts_and_every_batch_counts_once(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "run" / "attempt-1" / "worker-1.log"
    done = start(
        warm_python.command,
        tmp_path,
        *("--workers", "2", "--chaos", "kill:worker:1@seconds=6", "--max-restarts", "0"),
        *(str(PROGRAM), str(out), "lose_a_worker", str(log)),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "worker:1 was restarted individually, after SIGKILL (signal 9)" in done.stderr
    result = json.loads((out / "results.json").read_text())["lose_a_worker"]
    assert "error" not in result, result["error"]
    epochs = len(result["epochs"])
    assert result["history"]["samples"] == [160] * epochs
    assert result["history"]["val_samples"] == [37] * epochs
    # A step that the dead worker had done but not reported is done again.
    assert 20 * epochs <= result["iterations"] <= 20 * epochs + 1
    [attempt] = json.loads((tmp_path / "run" / "report.json").read_text())["attempts"]
    [progress] = [task["progress"] for task in attempt["tasks"] if task["task"] == "chief:0"]
    assert (progress["step"], progress["epoch"]) == (20 * epochs, epochs)


def test_fit_on_parameter_servers_without_the_patch_fails_with_a_hint(warm_python: WarmPython, tmp_path: Path) -> None:
    program = (str(PROGRAM), str(tmp_path), "raise:fit_on_dataset")
    done = start(warm_python.command, tmp_path, "--workers", "1", "--set", "keras.patch=false", *program)
    assert done.returncode == 1
    assert "create_per_worker_dataset" in done.stderr
    assert "set keras.patch to true" in done.stderr
    assert "TF_USE_LEGACY_KERAS=1" in done.stderr

"""Keras 3's `model.fit` under MultiWorkerMirroredStrategy: training with the patch and without it.

The tests run tests/programs/keras_cases.py, an ordinary user's script of many cases, once per configuration, and
compare the numbers: worker with worker, cluster with one process, Keras 3 with tf_keras.
"""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Command, distlaunch_command
from tests.harness.processes.keras_runs import (
    CLOSE,
    OLDER_KERAS,
    Results,
    assert_agree,
    install_keras,
    keras_has,
    leaves,
)
from tests.harness.processes.warm_python import WarmPython

COVERS = ("worker_entry/strategies.py",)


PROGRAM = PROGRAMS / "keras_cases.py"
NUMBERS = PROGRAMS / "keras_number_cases.py"
"""A module of the program with more cases."""
NEWEST, OLDER, ONE_BY_ONE = "newest Keras", f"Keras {OLDER_KERAS}", "newest Keras, started one by one"
KERAS = [NEWEST, OLDER]
THREE_WORKERS = "newest Keras, three workers"
LARGER_BATCH = "12"
START_AND_TRAIN_S = 3000.0
"""Ends a run that hangs; an idle machine with two cores needs up to three minutes."""
STALL_S = 600
"""More than any case takes. To drop an iterator may take TensorFlow a minute: it may miss that its tuning thread is to
end, and then waits for the thread's next round."""


HAS_ORBAX = keras_has("callbacks/orbax_checkpoint.py")
"""Keras before 3.13 has no OrbaxCheckpoint."""


def case_names() -> list[str]:
    """The functions of the program that are marked as cases, in order, if the installed Keras has what they need."""
    names = [
        node.name
        for module in (NUMBERS, PROGRAM)
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "case" for mark in node.decorator_list)
    ]
    return [name for name in names if name != "orbax_checkpoints" or HAS_ORBAX]


ONE_PROCESS_ONLY = {
    "uneven_fit_as_mean_of_means",
    "uneven_fit_with_idle_worker_as_mean_of_means",
    "batch_normalization_by_halves",
    "batch_normalization_with_idle_worker_by_halves",
}
"""Cases that compute in one process what another case computes on two workers."""
CLUSTER_ONLY = {"backup_of_the_chief_alone", "backup_of_another_worker_alone"}
"""Cases in which only one of the workers does something."""
CASES = [name for name in case_names() if name not in {*ONE_PROCESS_ONLY, "optimizers_with_some_options"}]
"""Without a case that is a quarter of another."""
OF_NUMBERS = [
    "loss_of_one_number",
    "loss_of_rank_0",
    "loss_of_rank_0_summed",
    "loss_of_rank_1_summed",
    "loss_of_rank_1_unreduced",
    "loss_of_rank_2",
    "loss_of_rank_2_summed",
    "loss_of_rank_2_unreduced",
    "losses_of_several_outputs",
    "numbers_of_own_functions",
    "state_of_an_own_layer",
    "logs_of_each_batch",
    "losses_that_a_step_returns",
    "generator",
    "generator_over_epochs",
    "shuffled",
    "stream",
    "rows_of_threads",
    "predict_on_batch",
    "sparse_rows",
    "ragged_rows",
    "objects_from_outside_of_the_scope",
    "numbers_of_variables",
]
"""Cases whose numbers are the same under each strategy, with any number of replicas that divides the batch."""
WITH_IDLE_REPLICA = ["numbers_of_own_functions_with_idle_worker", "state_of_an_own_layer_with_idle_worker"]
RANDOM = ["random_layers", "random_numbers_without_a_seed", "random_augmentation", "random_initial_weights"]
NOT_AS_ONE_PROCESS = {
    "uneven_fit": "a worker averages its own samples, and the workers' means are averaged",
    "uneven_fit_with_idle_worker": "the same",
    "batch_normalization": "a worker normalizes by its own part of the batch",
    "batch_normalization_with_idle_worker": "the same",
}
"""Cases that cannot agree with one process, and why; each has a test of what holds instead."""
NOT_COMPARED = {*NOT_AS_ONE_PROCESS, *WITH_IDLE_REPLICA, *RANDOM, *CLUSTER_ONLY}
"""Cases that are not compared with one process."""
NOT_COMPARED_WITH_TF_KERAS = {
    # tf_keras sums the values that a train_step returns over the replicas; Keras 3 averages them.
    "custom_train_step": {"logs"},
    # A worker of tf_keras evaluates with its own moving statistics, and saves the mean of all workers'.
    "batch_normalization": {"evaluated", "predictions"},
    # An idle worker of tf_keras keeps its own moving statistics; one of Keras 3 has the common ones.
    "batch_normalization_with_idle_worker": {
        "evaluated",
        "predictions",
        "expected",
        "weights.4",
        "weights.5",
    },
}
ON_DEVICES = [
    "plain_fit",
    "validation_data",
    "evaluate",
    "predict",
    "uneven_fit",
    "uneven_fit_with_idle_worker",
    "batch_normalization",
    "batch_normalization_with_idle_worker",
    "synchronized_batch_normalization",
    "steps_per_execution",
    "gradient_accumulation",
    "mixed_precision",
    "mixed_precision_with_overflow",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "clipnorm_with_accumulation",
    "clipnorm_with_mixed_precision",
    "global_clipnorm_of_embedding",
    "global_clipnorm_in_own_step",
    "loop_of_its_own",
    "moving_average",
    "moving_average_with_overwrite",
    "metrics_of_all_kinds",
    "adversaries",
    "train_on_batch",
    "loss_that_is_no_mean",
    "optimizers_with_some_options",
    "loss_that_a_step_does_not_divide",
    *OF_NUMBERS,
    *WITH_IDLE_REPLICA,
    *RANDOM,
]
"""Cases that also run on two devices of one process: those in which replicas exchange values."""
OF_PATCHES = [
    "plain_fit",
    "predict",
    "uneven_fit_with_idle_worker",
    "batch_normalization",
    "batch_normalization_with_idle_worker",
    "synchronized_batch_normalization",
    "custom_train_step",
    "steps_per_execution",
    "gradient_accumulation",
    "mixed_precision_with_overflow",
    "clipnorm",
    "clipnorm_with_accumulation",
    "clipnorm_with_mixed_precision",
    "global_clipnorm_of_embedding",
    "loop_of_its_own",
    "moving_average_with_overwrite",
    "metrics_of_all_kinds",
    "model_checkpoint",
    "backup_and_restore",
    "loss_of_rank_0",
    "loss_of_rank_1_summed",
    "losses_of_several_outputs",
    "state_of_an_own_layer",
    "logs_of_each_batch",
    "losses_that_a_step_returns",
    "generator",
    "predict_on_batch",
    "objects_from_outside_of_the_scope",
    "numbers_of_variables",
    "backup_of_the_chief_alone",
    *WITH_IDLE_REPLICA,
    *RANDOM,
]
"""Cases that cover all patched code: enough if the patch is the same, and only the code around it differs."""
CASES_OF = {
    "one process": [name for name in case_names() if name not in CLUSTER_ONLY],
    NEWEST: CASES,
    OLDER: OF_PATCHES,
    # Once Keras is patched, these tasks run the same code as the forkserver's.
    ONE_BY_ONE: ["plain_fit", "batch_normalization_with_idle_worker", "clipnorm_with_accumulation"],
    # With a batch that three workers divide evenly.
    "one process, larger batch": OF_NUMBERS,
    THREE_WORKERS: [*OF_NUMBERS, "random_layers"],
    # One process is the reference for all cases; tf_keras replaces it where it cannot be, and verifies it.
    "tf_keras": [*NOT_AS_ONE_PROCESS, "plain_fit", "predict", "custom_train_step", "metrics_of_all_kinds"],
    "unpatched": ["plain_fit"],
    "mirrored": ON_DEVICES,
    # Like mirrored, except for the place of the variables and the way in which gradients reach them.
    "central storage": [
        "plain_fit",
        "batch_normalization_with_idle_worker",
        "synchronized_batch_normalization",
        "gradient_accumulation",
        "mixed_precision_with_overflow",
        "clipnorm_with_accumulation",
        "global_clipnorm_of_embedding",
        "loop_of_its_own",
        "moving_average_with_overwrite",
        "train_on_batch",
        "optimizers_with_some_options",
        *OF_NUMBERS,
        *WITH_IDLE_REPLICA,
        *RANDOM,
    ],
    # The model is built as with several devices; nothing else differs from a process without a strategy.
    "one device": ["generator", "stream", "shuffled"],
    "mirrored unpatched": ["clipnorm"],
}
"""The cases of each configuration of `Runs`."""
EXACT = 0.0
TOLERANCES = {"mixed_precision": 2e-3, "clipnorm_with_mixed_precision": 2e-3}
"""float16 keeps 11 bits (5e-4), and the halves of a batch are rounded separately."""
Test = TypeVar("Test", bound=Callable[..., None])


def start(
    command: Command, run_dir: Path, *arguments: str, flags: Sequence[str], env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs the program on this machine with the launcher's command."""
    place = ("--run-dir", str(run_dir), "--set", f"timeouts.stall_s={STALL_S}")
    words = command("local", *place, *flags, str(PROGRAM), *arguments)
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=START_AND_TRAIN_S, check=False)


@dataclass(frozen=True)
class Run:
    """A finished run of the program: the results and the log of every process."""

    workers: list[Results]
    logs: list[str]

    def case(self, name: str, worker: int = 0) -> Results:
        result: Results = self.workers[worker][name]
        assert "error" not in result, f"worker {worker} raised:\n{result['error']}"
        return result

    def patch_line(self) -> str:
        """The patch's line about Keras; asserts that every worker's log has exactly one."""
        lines = [[line for line in log.splitlines() if line.startswith("distlaunch: ")] for log in self.logs]
        about_keras = [[line for line in of_worker if "Keras" in line] for of_worker in lines]
        assert [len(of_worker) for of_worker in about_keras] == [1] * len(self.logs)
        return about_keras[0][0]


class Runs:
    """Runs the program once for each configuration, when a test first asks for it."""

    def __init__(self, folder: Path, warm: Command) -> None:
        self._folder = folder
        self._warm = warm
        self._done: dict[tuple[str, ...], Run | str] = {}

    def get(self, configuration: str, *some: str) -> Run:
        """
        Args:
            configuration: a key of CASES_OF; "mirrored" and "central storage" train on two devices of one process.
            some: the cases to run; by default, all of the configuration.
        """
        key = (configuration, *some)
        if key not in self._done:
            self._done[key] = f"the run {key} has failed, which another test shows"
            self._done[key] = self._run(configuration, *some)
        done = self._done[key]
        if isinstance(done, str):
            pytest.fail(done, pytrace=False)
        return done

    def _run(self, configuration: str, *some: str) -> Run:
        cases = some or CASES_OF[configuration]
        folder = self._folder / "-".join([configuration, *some]).replace(" ", "-")
        out, run_dir = folder / "out", folder / "run"
        out.mkdir(parents=True)
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        command = distlaunch_command if configuration in (OLDER, "tf_keras", ONE_BY_ONE) else self._warm
        if configuration == "tf_keras":
            env["TF_USE_LEGACY_KERAS"] = "1"
        if configuration == OLDER:
            place = install_keras(OLDER_KERAS, folder / "packages")
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(place), env.get("PYTHONPATH", "")]))
        if configuration in ("one process, larger batch", THREE_WORKERS):
            env["BATCH"] = LARGER_BATCH
        if configuration.startswith("one process"):
            done = subprocess.run(
                [sys.executable, str(PROGRAM), str(out), *cases],
                env=env,
                capture_output=True,
                text=True,
                timeout=START_AND_TRAIN_S,
                check=False,
            )
            return Run([read_results(out, 0, done)], [done.stderr])
        if configuration in ("mirrored", "mirrored unpatched", "central storage", "one device"):
            strategy = configuration.removesuffix(" unpatched").replace(" ", "_")
            patch = ["--set", "keras.patch=false"] if configuration.endswith("unpatched") else []
            options = ["--strategy", strategy, "--devices", "2", *patch]
            done = start(command, run_dir, str(out), *cases, flags=options, env=env)
            log = run_dir / "attempt-1" / "worker-0.log"
            return Run([read_results(out, 0, done)], [log.read_text(errors="replace")])
        flags = {"unpatched": ["--set", "keras.patch=false"], ONE_BY_ONE: ["--set", "preload=false"]}.get(
            configuration, []
        )
        workers = range(3 if configuration == THREE_WORKERS else 2)
        done = start(command, run_dir, str(out), *cases, flags=["--workers", str(len(workers)), *flags], env=env)
        logs = [run_dir / "attempt-1" / f"worker-{worker}.log" for worker in workers]
        return Run(
            [read_results(out, worker, done) for worker in workers],
            [log.read_text(errors="replace") for log in logs],
        )


def read_results(out: Path, worker: int, done: subprocess.CompletedProcess[str]) -> Results:
    file = out / f"results-{worker}.json"
    assert file.exists(), f"no results; the command printed:\n{done.stdout}\n{done.stderr}"
    results: Results = json.loads(file.read_text())
    return results


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Runs:
    return Runs(tmp_path_factory.mktemp("keras"), warm_python.command)


def may_train(test: Test) -> Test:
    """Marks a test that may be the first to need one or two runs of the program, and so takes long."""
    marked: Test = pytest.mark.timeout(2 * START_AND_TRAIN_S)(test)
    return marked


def every_keras(case: str) -> Callable[[Test], Test]:
    """Runs a test with each version of Keras that trains this case."""
    return pytest.mark.parametrize("keras", [keras for keras in KERAS if case in CASES_OF[keras]])


def on_every_keras(cases: Iterable[str]) -> Callable[[Test], Test]:
    """Runs a test with each of the cases, and with each version of Keras that trains it."""
    return pytest.mark.parametrize(
        ("keras", "case"), [(keras, case) for case in cases for keras in KERAS if case in CASES_OF[keras]]
    )


def on_devices(cases: Iterable[str]) -> Callable[[Test], Test]:
    """Runs a test with each of the cases, and with each strategy of several devices that trains it."""
    strategies = ["mirrored", "central storage"]
    return pytest.mark.parametrize(
        ("strategy", "case"), [(name, case) for case in cases for name in strategies if case in CASES_OF[name]]
    )


@may_train
@pytest.mark.smoke
def test_plain_fit_on_two_workers_matches_one_process(runs: Runs) -> None:
    """The quick version of the comparisons below, which cover every case and take minutes."""
    alone, cluster = runs.get("one process", "plain_fit"), runs.get(NEWEST, "plain_fit")
    for worker in (0, 1):
        assert_agree(alone.case("plain_fit"), cluster.case("plain_fit", worker), tolerance=CLOSE)


@may_train
def test_plain_fit_on_two_workers_fails_without_the_keras_patch(runs: Runs) -> None:
    if "needs no patch" in runs.get(NEWEST).patch_line():
        pytest.skip("this Keras needs no patch")
    for result in runs.get("unpatched").workers:
        assert "error" in result["plain_fit"]


@may_train
def test_the_newest_keras_is_patched_or_needs_no_patch(runs: Runs) -> None:
    line = runs.get(NEWEST).patch_line()
    if "patched Keras" in line and "reduce_per_replica" in line:
        return
    errors = [result["plain_fit"].get("error") for result in runs.get("unpatched").workers]
    if any(errors):
        pytest.fail(
            "Keras has changed: the patch no longer finds the faulty code in its trainer, and model.fit on two "
            "workers still fails; update worker_entry/keras_patches/trainer.py.\n"
            f"The patch's log line: {line}\n{errors[0]}",
            pytrace=False,
        )


@may_train
@every_keras("plain_fit")
def test_every_worker_log_has_one_line_about_the_keras_patch(runs: Runs, keras: str) -> None:
    run = runs.get(keras)
    version = run.workers[0]["version"]
    assert run.patch_line().startswith(("distlaunch: patched Keras " + version, f"distlaunch: Keras {version} needs"))
    assert keras in (NEWEST, f"Keras {version}")


@may_train
def test_tasks_without_preload_get_the_same_keras_patch(runs: Runs) -> None:
    assert runs.get(ONE_BY_ONE).patch_line() == runs.get(NEWEST).patch_line()


@may_train
@pytest.mark.parametrize("case", CASES_OF[ONE_BY_ONE])
def test_training_without_preload_matches_training_with_preload(runs: Runs, case: str) -> None:
    for worker in (0, 1):
        assert_agree(runs.get(NEWEST).case(case, worker), runs.get(ONE_BY_ONE).case(case, worker), tolerance=CLOSE)


@may_train
def test_tf_keras_is_not_patched(runs: Runs) -> None:
    run = runs.get("tf_keras")
    assert [results["library"] for results in run.workers] == ["tf_keras", "tf_keras"]
    assert not [log for log in run.logs if "patched" in log]


@may_train
@every_keras("plain_fit")
def test_both_workers_train_in_one_cluster(runs: Runs, keras: str) -> None:
    assert [results["replicas"] for results in runs.get(keras).workers] == [2, 2]


@may_train
@on_every_keras(CASES)
def test_two_workers_end_with_the_same_weights_and_history(runs: Runs, keras: str, case: str) -> None:
    run = runs.get(keras)
    assert_agree(run.case(case, 0), run.case(case, 1), tolerance=EXACT)


@may_train
@on_every_keras(case for case in CASES if case not in NOT_COMPARED)
def test_training_on_two_workers_matches_one_process(runs: Runs, keras: str, case: str) -> None:
    assert_agree(
        runs.get("one process").case(case),
        runs.get(keras).case(case),
        tolerance=TOLERANCES.get(case, CLOSE),
    )


@may_train
@pytest.mark.parametrize("case", OF_NUMBERS)
def test_training_on_three_workers_matches_one_process(runs: Runs, case: str) -> None:
    for worker in range(3):
        assert_agree(
            runs.get("one process, larger batch").case(case),
            runs.get(THREE_WORKERS).case(case, worker),
            tolerance=CLOSE,
        )


@may_train
@on_every_keras(CASES_OF["tf_keras"])
def test_training_on_two_workers_matches_tf_keras(runs: Runs, keras: str, case: str) -> None:
    assert_agree(
        runs.get("tf_keras").case(case),
        runs.get(keras).case(case),
        tolerance=TOLERANCES.get(case, CLOSE),
        apart_from=NOT_COMPARED_WITH_TF_KERAS.get(case),
    )


@may_train
@on_devices(case for case in ON_DEVICES if case not in NOT_COMPARED)
def test_training_on_two_devices_matches_one_process(runs: Runs, strategy: str, case: str) -> None:
    run = runs.get(strategy)
    assert run.workers[0]["replicas"] == 2
    assert_agree(runs.get("one process").case(case), run.case(case), tolerance=TOLERANCES.get(case, CLOSE))


@may_train
@on_devices(case for case in ON_DEVICES if case in NOT_COMPARED and case not in RANDOM)
def test_training_on_two_devices_matches_two_workers(runs: Runs, strategy: str, case: str) -> None:
    assert_agree(runs.get(NEWEST).case(case), runs.get(strategy).case(case), tolerance=CLOSE)


@may_train
@pytest.mark.parametrize("case", CASES_OF["one device"])
def test_a_one_device_strategy_reads_its_data_once(runs: Runs, case: str) -> None:
    assert runs.get("one device").workers[0]["replicas"] == 1
    assert_agree(runs.get("one process").case(case), runs.get("one device").case(case), tolerance=CLOSE)


@may_train
def test_each_device_clips_its_own_gradients_without_the_keras_patch(runs: Runs) -> None:
    run = runs.get("mirrored unpatched")
    assert "distlaunch: " not in run.logs[0]
    with pytest.raises(AssertionError, match="weights"):
        assert_agree(runs.get("one process").case("clipnorm"), run.case("clipnorm"), tolerance=0.1)


@may_train
@pytest.mark.parametrize("strategy", ["mirrored", "central storage"])
def test_the_log_of_a_multi_device_process_has_one_patch_line(runs: Runs, strategy: str) -> None:
    assert runs.get(strategy).patch_line().startswith("distlaunch: patched Keras ")


@may_train
@on_every_keras(["uneven_fit", "uneven_fit_with_idle_worker"])
def test_uneven_last_batches_train_by_the_mean_of_worker_means(runs: Runs, keras: str, case: str) -> None:
    """One process averages a batch over its samples; workers average their own samples, then their means."""
    alone, cluster = runs.get("one process"), runs.get(keras).case(case)
    assert_agree(
        {"weights": alone.case(f"{case}_as_mean_of_means")["weights"]},
        {"weights": cluster["weights"]},
        tolerance=CLOSE,
    )
    with pytest.raises(AssertionError, match="weights"):
        assert_agree({"weights": alone.case(case)["weights"]}, {"weights": cluster["weights"]}, tolerance=1e-3)


@may_train
@on_every_keras(["batch_normalization", "batch_normalization_with_idle_worker"])
def test_batch_normalization_normalizes_the_batch_of_each_worker_separately(runs: Runs, keras: str, case: str) -> None:
    """The moving statistics follow the mean over the workers; one without samples counts with the moving statistics."""
    alone, cluster = runs.get("one process").case(f"{case}_by_halves"), runs.get(keras).case(case)
    # The sample weights that stand for a worker without samples also change the reported loss.
    assert_agree(alone, cluster, tolerance=CLOSE, apart_from={"history"})


@may_train
@on_every_keras(["batch_normalization", "batch_normalization_with_idle_worker", "synchronized_batch_normalization"])
def test_batch_normalization_predicts_with_its_saved_statistics(runs: Runs, keras: str, case: str) -> None:
    result = runs.get(keras).case(case)
    assert result["predictions"] == pytest.approx(result["expected"], abs=CLOSE)


@may_train
@every_keras("batch_normalization_with_idle_worker")
def test_a_worker_without_samples_keeps_the_moving_statistics_finite(runs: Runs, keras: str) -> None:
    result = runs.get(keras).case("batch_normalization_with_idle_worker")
    assert [path for path, number in leaves(result) if not math.isfinite(number)] == []


@may_train
@every_keras("predict")
def test_predict_returns_all_samples_in_order(runs: Runs, keras: str) -> None:
    for count, result in runs.get(keras).case("predict").items():
        assert len(result["predictions"]) == int(count)
        assert result["predictions"] == pytest.approx(result["expected"], abs=CLOSE)


@may_train
@every_keras("mixed_precision_with_overflow")
def test_overflow_on_one_worker_skips_the_step_on_both(runs: Runs, keras: str) -> None:
    """The first of an epoch's four steps overflows, on worker 0 only."""
    for worker in (0, 1):
        assert runs.get(keras).case("mixed_precision_with_overflow", worker)["applied_steps"] == 6


@may_train
@every_keras("early_stopping")
def test_early_stopping_stops_both_workers_at_the_same_epoch(runs: Runs, keras: str) -> None:
    epochs = [runs.get(keras).case("early_stopping", worker)["epochs"] for worker in (0, 1)]
    assert epochs[0] == epochs[1]
    assert len(epochs[0]) < 40


@may_train
@every_keras("model_checkpoint")
def test_checkpoints_hold_the_trained_weights(runs: Runs, keras: str) -> None:
    for worker in (0, 1):
        result = runs.get(keras).case("model_checkpoint", worker)
        losses = result["history"]["loss"]
        best = losses.index(min(losses))
        assert best < len(losses) - 1, "the best model must not be the last for this test"
        assert result["saved"] == result["passed"][best]
        assert result["reloaded"] == result["weights"] == result["passed"][-1]


@may_train
@every_keras("backup_and_restore")
def test_interrupted_fit_resumes_and_ends_with_the_weights_of_uninterrupted_fit(runs: Runs, keras: str) -> None:
    for worker in (0, 1):
        result = runs.get(keras).case("backup_and_restore", worker)
        assert result["interrupted"]
        assert result["epochs"] == [2, 3, 4]
        assert_agree({"weights": result["uninterrupted"]["weights"]}, {"weights": result["weights"]}, tolerance=1e-6)


@may_train
@every_keras("custom_train_step")
def test_tf_keras_sums_train_step_values_that_keras_3_averages(runs: Runs, keras: str) -> None:
    """The only difference that a script sees: Keras 3 averages these values."""
    cluster = runs.get(keras).case("custom_train_step")["logs"]["own_error"]
    legacy = runs.get("tf_keras").case("custom_train_step")["logs"]["own_error"]
    assert_agree({"error": [[2 * value for value in values] for values in cluster]}, {"error": legacy}, tolerance=CLOSE)


@may_train
@on_every_keras(WITH_IDLE_REPLICA)
def test_results_stay_finite_if_a_worker_has_no_samples(runs: Runs, keras: str, case: str) -> None:
    """A mean over no sample is NaN, which counts neither in the epoch's values nor in a layer's own state."""
    result = runs.get(keras).case(case)
    assert [path for path, number in leaves(result) if not math.isfinite(number)] == []


@may_train
@every_keras("numbers_of_own_functions_with_idle_worker")
def test_an_idle_worker_does_not_change_the_loss_of_an_epoch(runs: Runs, keras: str) -> None:
    """Before the uneven batch, which is the last, the weights are those of one process."""
    case = "numbers_of_own_functions_with_idle_worker"
    alone, cluster = runs.get("one process").case(case), runs.get(keras).case(case)
    assert cluster["history"]["loss"][0] == pytest.approx(alone["history"]["loss"][0], rel=CLOSE)


@may_train
@pytest.mark.parametrize("configuration", [NEWEST, "mirrored"])
def test_the_log_names_a_train_step_that_does_not_divide_its_loss(runs: Runs, configuration: str) -> None:
    for log in runs.get(configuration).logs:
        (line,) = [line for line in log.splitlines() if "times the gradient" in line]
        assert line.startswith("distlaunch: Unaware.train_step trains with 2 times the gradient of one process: ")


MANY_REPLICAS = [(NEWEST, 2), (OLDER, 2), (THREE_WORKERS, 3), ("mirrored", 2), ("central storage", 2)]


def of_rows(values: list[float], replicas: int) -> list[tuple[float, ...]]:
    """What each row of `random_layers` has got, of which a replica has two."""
    width = len(values) // (2 * replicas)
    return [tuple(values[first : first + width]) for first in range(0, len(values), width)]


@may_train
@pytest.mark.parametrize(("configuration", "replicas"), MANY_REPLICAS)
def test_each_replica_draws_its_own_random_numbers(runs: Runs, configuration: str, replicas: int) -> None:
    result = runs.get(configuration).case("random_layers")
    drawn = [*of_rows(result["first"], replicas), *of_rows(result["second"], replicas)]
    assert len(set(drawn)) == 4 * replicas
    masks, noises = {row[:16] for row in drawn}, {row[16:] for row in drawn}
    assert len(masks) == len(noises) == 4 * replicas


@may_train
@pytest.mark.parametrize("configuration", [NEWEST, OLDER, "mirrored", "central storage"])
def test_each_replica_draws_its_own_random_numbers_without_a_seed(runs: Runs, configuration: str) -> None:
    first, second = runs.get(configuration).case("random_numbers_without_a_seed")["drawn"]
    assert len({*first, *second}) == len(first) + len(second) == 2 * 4 * 3


@may_train
@pytest.mark.parametrize("configuration", [NEWEST, THREE_WORKERS, "mirrored", "central storage"])
def test_training_does_not_change_the_arrays_of_the_program(runs: Runs, configuration: str) -> None:
    """TensorFlow uses aligned arrays without a copy, and a divided batch is overwritten."""
    run = runs.get(configuration)
    assert [run.case("rows_of_threads", worker)["changed"] for worker in range(len(run.workers))] == [0] * len(
        run.workers
    )


@may_train
@pytest.mark.parametrize(("configuration", "_"), MANY_REPLICAS)
def test_random_numbers_continue_from_a_saved_state(runs: Runs, configuration: str, _: int) -> None:
    result = runs.get(configuration).case("random_layers")
    assert result["restored"] == result["second"] != result["first"]


@may_train
@pytest.mark.parametrize(("configuration", "_"), MANY_REPLICAS)
def test_the_random_state_of_replicas_equals_that_of_one_process(runs: Runs, configuration: str, _: int) -> None:
    assert (
        runs.get(configuration).case("random_layers")["state"] == runs.get("one process").case("random_layers")["state"]
    )


@may_train
def test_random_numbers_are_the_same_in_every_run(runs: Runs) -> None:
    again = runs.get(NEWEST, "random_layers")
    assert again.case("random_layers") == runs.get(NEWEST).case("random_layers")


@may_train
@every_keras("random_augmentation")
def test_each_sample_of_a_data_set_gets_its_own_random_number(runs: Runs, keras: str) -> None:
    alone, cluster = (runs.get(name).case("random_augmentation")["drawn"] for name in ("one process", keras))
    assert len(set(cluster)) == len(cluster) == len(alone)
    assert len(set(cluster) & set(alone)) == len(alone) / 2, "worker 0 draws what one process draws"


@may_train
@pytest.mark.parametrize("configuration", [NEWEST, "mirrored", "central storage"])
def test_layers_created_in_a_step_have_equal_weights_on_all_replicas(runs: Runs, configuration: str) -> None:
    run = runs.get(configuration)
    copies = [run.case("random_initial_weights", worker)["copies"] for worker in range(len(run.workers))]
    for of_worker in copies:
        assert [copy for variable in of_worker for copy in variable if copy != variable[0]] == []
    assert all(each == copies[0] for each in copies)


@may_train
@every_keras("state_of_an_own_layer")
def test_the_log_names_the_layer_state_that_is_averaged(runs: Runs, keras: str) -> None:
    for log in runs.get(keras).logs:
        lines = [line for line in log.splitlines() if "averages" in line]
        assert len(lines) == 3, "one for each model that has such a layer"
        assert lines[0].startswith("distlaunch: averages sequential")
        assert "own_state/mean over the replicas" in lines[0]


@may_train
@pytest.mark.parametrize("configuration", [NEWEST, THREE_WORKERS])
def test_the_logs_have_no_warnings_about_eager_strategies(runs: Runs, configuration: str) -> None:
    for log in runs.get(configuration).logs:
        assert "eagerly" not in log


@may_train
@pytest.mark.parametrize("case", ["backup_of_the_chief_alone", "backup_in_a_folder_with_a_slash"])
def test_all_workers_resume_from_the_backup_of_the_chief(runs: Runs, case: str) -> None:
    for worker in (0, 1):
        result = runs.get(NEWEST).case(case, worker)
        assert result["epochs"] == [2, 3, 4]
        assert result["files"] == 2
        assert result.get("beside", 0) == 0


@may_train
def test_a_backup_of_a_non_chief_worker_is_ignored_with_a_note(runs: Runs) -> None:
    run = runs.get(NEWEST)
    for worker in (0, 1):
        result = run.case("backup_of_another_worker_alone", worker)
        assert result["epochs"] == [0, 1, 2, 3, 4]
        assert result["files"] == 0
    assert ["BackupAndRestore does nothing" in log for log in run.logs] == [False, True]


@may_train
@pytest.mark.skipif(not HAS_ORBAX, reason="this version of Keras has no OrbaxCheckpoint")
def test_only_the_chief_writes_orbax_checkpoints(runs: Runs) -> None:
    for worker in (0, 1):
        assert runs.get(NEWEST).case("orbax_checkpoints", worker)["writers"] == [0, 0]

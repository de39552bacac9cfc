"""Several workers save to one path: by callbacks within `fit`, and by direct calls.

tests/programs/save_together.py, an ordinary user's script, runs once on two workers and once in one process; the tests
compare the saved files.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.keras_runs import names
from tests.harness.processes.warm_python import WarmPython
from worker_entry.keras_patches.saving import PART

# --- two workers, one path ---


CLOSE = 1e-5
START_AND_TRAIN_S = 900.0


@dataclass(frozen=True)
class Saved:
    """The files, results and logs of one run of the program."""

    folder: Path
    results: list[dict[str, Any]]
    log: list[str]

    def files(self) -> Counter[str]:
        """The number of files per name, with TensorBoard's counted as one name: they differ by process and time."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return Counter(re.sub(r"tfevents.*", "tfevents", str(path.relative_to(self.folder))) for path in found)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("alone")
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    command = [sys.executable, str(PROGRAMS / "save_together.py"), str(folder / "out")]
    return run(command, folder, 1, {**env, "CUDA_VISIBLE_DEVICES": ""})


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Saved:
    folder = tmp_path_factory.mktemp("together")
    program = [str(PROGRAMS / "save_together.py"), str(folder / "out")]
    return run(warm_python.command("local", "-n", "2", "--run-dir", str(folder / "run"), *program), folder, 2, None)


def run(command: list[str], folder: Path, workers: int, env: dict[str, str] | None) -> Saved:
    (folder / "out").mkdir()
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=START_AND_TRAIN_S, check=False, errors="replace"
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    results = [json.loads((folder / f"results-{task}.json").read_text()) for task in range(workers)]
    logs = [folder / "run" / "attempt-1" / f"worker-{task}.log" for task in range(workers)]
    return Saved(folder / "out", results, [log.read_text() if log.exists() else done.stdout for log in logs])


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = [value[name] for name in sorted(value)]
    return [number for item in value for number in numbers(item)] if isinstance(value, list) else [float(value)]


cluster = pytest.mark.timeout(2 * START_AND_TRAIN_S)
"""Marks of tests that use the program's runs: the first such test waits for them."""


class TestSavingToOnePath:
    pytestmark = cluster

    def test_two_workers_save_the_same_files_as_one_process(self, alone: Saved, together: Saved) -> None:
        """No incomplete file, no second event file of TensorBoard, and no temporary file is left."""
        of_the_second = Counter(["own/1.keras", "own/folder-1/here.keras", "alone-in-fit.keras"])
        assert together.files() == alone.files() + of_the_second
        assert [name for name in names(together.folder) if Path(name).name.startswith(".")] == []

    @pytest.mark.parametrize("what", ["after fit", "own", "tracking", "here", "final", "served"])
    def test_each_worker_reads_back_the_saved_values_of_one_process(
        self, alone: Saved, together: Saved, what: str
    ) -> None:
        """The files hold what a single process has trained, and are complete when the workers' calls return."""
        expected = alone.results[0][what]
        for result in together.results:
            if isinstance(expected, dict):
                assert result[what].keys() == expected.keys()
            assert numbers(result[what]) == pytest.approx(numbers(expected), rel=CLOSE, abs=CLOSE)

    def test_exported_files_of_both_workers_are_interchangeable(self, together: Saved) -> None:
        """Each file is renamed separately, so files of both workers may stay: both must number the variables alike."""
        for name in ("variables.index", "variables.data-00000-of-00001"):
            of_both = [together.folder.parent / f"exported-{task}" / "variables" / name for task in (0, 1)]
            assert of_both[0].read_bytes() == of_both[1].read_bytes()

    def test_the_best_model_is_kept_even_if_it_is_not_the_last(self, together: Saved) -> None:
        first, _, last = [name for name in together.results[0]["after fit"] if name.startswith("epochs/")]
        for result in together.results:
            assert result["after fit"]["best.keras"] == result["after fit"][first]
            assert result["after fit"][last] == result["weights"]

    def test_only_the_chief_writes_a_common_path_in_an_object_store(self, together: Saved) -> None:
        assert [result["stored"] for result in together.results] == [["0.keras", "remote.keras"], ["1.keras"]]

    def test_the_csv_log_has_each_epoch_once(self, alone: Saved, together: Saved) -> None:
        for_both = [list(csv.DictReader((saved.folder / "log.csv").open())) for saved in (alone, together)]
        assert [row["epoch"] for row in for_both[1]] == ["0", "1", "2"]
        values = [[float(value) for row in rows for value in row.values()] for rows in for_both]
        assert values[1] == pytest.approx(values[0], rel=CLOSE)

    def test_only_the_saving_worker_logs_that_it_saves(self, together: Saved) -> None:
        # Newer versions of Keras print another line when a model is saved.
        lines = [re.findall(r"^Epoch \d+: saving model to .*", log, re.MULTILINE) for log in together.log]
        assert [len(of_worker) for of_worker in lines] == [4, 0]
        assert lines[0][0].endswith(f"saving model to {together.folder}/epochs/01-{lines[0][0][-10:]}")

    def test_paths_of_callbacks_are_restored_after_fit(self, together: Saved) -> None:
        assert {result["log_dir"] for result in together.results} == {str(together.folder / "board")}

    def test_messages_of_keras_name_the_requested_path_of_an_export(self, together: Saved) -> None:
        for log in together.log:
            assert f"Saved artifact at '{together.folder}/exported'." in log
            assert PART not in log

    def test_the_log_names_the_patched_keras_classes_and_methods(self, together: Saved) -> None:
        for log in together.log:
            line = next(line for line in log.splitlines() if "patched Keras" in line)
            assert {"ModelCheckpoint", "TensorBoard", "CSVLogger", "Model.save", "Model.export"} <= {
                *re.split(r"[, ]+", line)
            }

    def test_tensorflow_does_not_warn_about_overhead_of_saving(self, together: Saved) -> None:
        assert [line for log in together.log for line in log.splitlines() if "significant overhead" in line] == []

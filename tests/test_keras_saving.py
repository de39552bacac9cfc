"""What workers save to one path: by callbacks within `fit`, and by themselves.

tests/programs/save_together.py, an ordinary user's script, runs once on two workers and once in one process; what they
have saved is compared.
"""

from __future__ import annotations

import csv
import json
import os
import re
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROGRAMS, distlaunch_command
from worker_entry.keras_patches.saving import PART, _shown_as, written_whole

# --- whole files ---


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"task": {"type": "worker", "index": 1}}')


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_file_is_seen_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "model.keras"
    file.write_text("before")
    with written_whole(file, make_folders=False) as path:
        Path(path).write_text("half")
        assert file.read_text() == "before"
    assert file.read_text() == "half"
    assert names(tmp_path) == ["model.keras"]


def test_a_file_that_fails_half_way_leaves_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "model.keras"
    file.write_text("before")

    def fail() -> None:
        with written_whole(file, make_folders=False) as path:
            Path(path).write_text("half")
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        fail()
    assert file.read_text() == "before"
    assert names(tmp_path) == ["model.keras"]


def test_what_a_killed_worker_has_left_goes_with_its_next_save(tmp_path: Path) -> None:
    source = f"""
import os, signal
from worker_entry.keras_patches.saving import written_whole
with written_whole({str(tmp_path / "model.keras")!r}, make_folders=False) as path:
    open(path, "w").write("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", source], check=False)
    assert names(tmp_path) == [f"{PART}worker-1-model.keras", f"{PART}worker-1-model.keras/model.keras"]
    with written_whole(tmp_path / "model.keras", make_folders=False) as path:
        Path(path).write_text("whole")
    assert names(tmp_path) == ["model.keras"]


@pytest.mark.parametrize("config", [None, "no JSON", "[]", "{}", '{"task": 1}'])
def test_in_a_process_without_a_cluster_keras_writes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str | None
) -> None:
    monkeypatch.delenv("TF_CONFIG") if config is None else monkeypatch.setenv("TF_CONFIG", config)
    with written_whole(tmp_path / "model.keras", make_folders=False) as path:
        assert path == tmp_path / "model.keras"


def test_without_messages_of_keras_none_is_changed() -> None:
    with _shown_as("part", "whole") as nothing:
        assert nothing is None


def test_a_folder_is_filled_into_one_that_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "exported"
    for content in ("first", "second"):
        with written_whole(folder, make_folders=True) as path:
            (Path(path) / "variables").mkdir(parents=True)
            (Path(path) / "variables" / "data").write_text(content)
            (Path(path) / "saved_model.pb").write_text(content)
    assert names(tmp_path / "new") == [
        "exported",
        "exported/saved_model.pb",
        "exported/variables",
        "exported/variables/data",
    ]
    assert (folder / "variables" / "data").read_text() == "second"


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.keras"
    link.symlink_to(tmp_path / "real" / "model.keras")
    with written_whole(link, make_folders=False) as path:
        Path(path).write_text("whole")
    assert link.is_symlink()
    assert names(tmp_path / "real") == ["model.keras"]


def test_what_cannot_be_renamed_is_written_as_it_is(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in ("gs://bucket/model.keras", str(fifo), str(tmp_path / "nowhere" / "model.keras")):
        with written_whole(path, make_folders=False) as given:
            assert given == path
    assert stat.S_ISFIFO(fifo.stat().st_mode)


# --- two workers, one path ---

CLOSE = 1e-5
START_AND_TRAIN_S = 300.0


@dataclass(frozen=True)
class Saved:
    """What one way to run the program has left."""

    folder: Path
    results: list[dict[str, Any]]
    log: list[str]

    def files(self) -> Counter[str]:
        """How many of each name; TensorBoard's have the process and the time in theirs."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return Counter(re.sub(r"tfevents.*", "tfevents", str(path.relative_to(self.folder))) for path in found)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("alone")
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    command = [sys.executable, str(PROGRAMS / "save_together.py"), str(folder / "out")]
    return run(command, folder, 1, {**env, "CUDA_VISIBLE_DEVICES": ""})


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("together")
    program = [str(PROGRAMS / "save_together.py"), str(folder / "out")]
    return run(distlaunch_command("local", "-n", "2", "--run-dir", str(folder / "run"), *program), folder, 2, None)


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


cluster = [pytest.mark.tensorflow, pytest.mark.timeout(2 * START_AND_TRAIN_S)]
"""For a test that may be the first to ask for the program's runs."""


class TestTogether:
    pytestmark = cluster

    def test_two_workers_leave_the_files_of_one_process(self, alone: Saved, together: Saved) -> None:
        """And nothing half done, no second event file of TensorBoard's, no file for a moment's use."""
        of_the_second = Counter(["own/1.keras", "own/folder-1/here.keras", "alone-in-fit.keras"])
        assert together.files() == alone.files() + of_the_second
        assert [name for name in names(together.folder) if Path(name).name.startswith(".")] == []

    @pytest.mark.parametrize("what", ["after fit", "own", "tracking", "here", "final", "served"])
    def test_each_worker_reads_at_once_what_one_process_has_saved(
        self, alone: Saved, together: Saved, what: str
    ) -> None:
        """The files have what a single process has trained, and it was there when the workers' calls returned."""
        expected = alone.results[0][what]
        for result in together.results:
            if isinstance(expected, dict):
                assert result[what].keys() == expected.keys()
            assert numbers(result[what]) == pytest.approx(numbers(expected), rel=CLOSE, abs=CLOSE)

    def test_files_of_one_workers_export_fit_those_of_the_other(self, together: Saved) -> None:
        """Each file is renamed by itself, so those of two workers may stay: variables need the same numbers in both."""
        for name in ("variables.index", "variables.data-00000-of-00001"):
            of_both = [together.folder.parent / f"exported-{task}" / "variables" / name for task in (0, 1)]
            assert of_both[0].read_bytes() == of_both[1].read_bytes()

    def test_the_best_model_is_not_the_last_one(self, together: Saved) -> None:
        first, _, last = [name for name in together.results[0]["after fit"] if name.startswith("epochs/")]
        for result in together.results:
            assert result["after fit"]["best.keras"] == result["after fit"][first]
            assert result["after fit"][last] == result["weights"]

    def test_only_the_chief_writes_to_an_object_store_what_all_would(self, together: Saved) -> None:
        assert [result["stored"] for result in together.results] == [["0.keras", "remote.keras"], ["1.keras"]]

    def test_epochs_are_logged_once(self, alone: Saved, together: Saved) -> None:
        for_both = [list(csv.DictReader((saved.folder / "log.csv").open())) for saved in (alone, together)]
        assert [row["epoch"] for row in for_both[1]] == ["0", "1", "2"]
        values = [[float(value) for row in rows for value in row.values()] for rows in for_both]
        assert values[1] == pytest.approx(values[0], rel=CLOSE)

    def test_only_the_worker_that_writes_says_that_it_does(self, together: Saved) -> None:
        lines = [[line for line in log.splitlines() if "finished saving" in line] for log in together.log]
        assert [len(of_worker) for of_worker in lines] == [4, 0]
        assert lines[0][0].endswith(f"saving model to {together.folder}/epochs/01-{lines[0][0][-10:]}")

    def test_callbacks_have_their_paths_back(self, together: Saved) -> None:
        assert {result["log_dir"] for result in together.results} == {str(together.folder / "board")}

    def test_what_keras_says_names_the_path_that_was_asked_for(self, together: Saved) -> None:
        for log in together.log:
            assert f"Saved artifact at '{together.folder}/exported'." in log
            assert PART not in log

    def test_the_log_names_what_is_treated_so(self, together: Saved) -> None:
        for log in together.log:
            line = next(line for line in log.splitlines() if "patched Keras" in line)
            assert {"ModelCheckpoint", "TensorBoard", "CSVLogger", "Model.save", "Model.export"} <= {
                *re.split(r"[, ]+", line)
            }

    def test_tensorflow_finds_nothing_slow_in_it(self, together: Saved) -> None:
        assert [line for log in together.log for line in log.splitlines() if "significant overhead" in line] == []

"""Several workers save to one path: by callbacks within `fit`, and by direct calls.

tests/programs/save_together.py, an ordinary user's script, runs once on two workers and once in one process; the tests
compare the saved files.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.processes.keras_runs import names
from worker_entry.keras_patches.saving import PART, _shown_as, written_whole

COVERS = ("worker_entry/keras_patches", "worker_entry/hooks")


# --- complete files ---


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"task": {"type": "worker", "index": 1}}')


def test_a_saved_model_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "model.keras"
    file.write_text("before")
    with written_whole(file, make_folders=False) as path:
        Path(path).write_text("half")
        assert file.read_text() == "before"
    assert file.read_text() == "half"
    assert names(tmp_path) == ["model.keras"]


def test_a_failed_save_keeps_the_previous_model_file(tmp_path: Path) -> None:
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


def test_the_next_save_removes_the_partial_file_of_a_killed_worker(tmp_path: Path) -> None:
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
def test_without_a_cluster_keras_writes_to_the_path_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str | None
) -> None:
    monkeypatch.delenv("TF_CONFIG") if config is None else monkeypatch.setenv("TF_CONFIG", config)
    with written_whole(tmp_path / "model.keras", make_folders=False) as path:
        assert path == tmp_path / "model.keras"


def test_messages_of_a_save_are_not_changed_if_keras_is_not_imported() -> None:
    with _shown_as("part", "whole") as nothing:
        assert nothing is None


def test_a_saved_folder_is_merged_into_an_existing_folder(tmp_path: Path) -> None:
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


def test_saving_to_a_symbolic_link_replaces_its_target_and_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.keras"
    link.symlink_to(tmp_path / "real" / "model.keras")
    with written_whole(link, make_folders=False) as path:
        Path(path).write_text("whole")
    assert link.is_symlink()
    assert names(tmp_path / "real") == ["model.keras"]


def test_a_path_that_is_no_rename_target_is_written_directly(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in ("gs://bucket/model.keras", str(fifo), str(tmp_path / "nowhere" / "model.keras")):
        with written_whole(path, make_folders=False) as given:
            assert given == path
    assert stat.S_ISFIFO(fifo.stat().st_mode)

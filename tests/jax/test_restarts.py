"""Keras's callbacks and saving with several processes of JAX, and what a restart continues with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.jax import write_spec

COVERS = (
    "worker_entry/hooks/jax_cluster.py",
    "worker_entry/keras_patches/backup.py",
    "worker_entry/keras_patches/callbacks.py",
    "worker_entry/keras_patches/on_jax",
    "worker_entry/keras_patches/saving.py",
)


@pytest.mark.parametrize("where", ["together", "apart"])
def test_all_writers_on_one_path_write_whole_files_and_a_restart_resumes(
    distlaunch: Distlaunch, tmp_path: Path, where: str
) -> None:
    """`apart`: each process has a folder of its own for backups, of which only the first one's has files."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    rest = f"checkpoint_directory: {folder}\nrestart: {{max_restarts: 1}}\n"
    ran = distlaunch("up", write_spec(tmp_path, str(PROGRAMS / "jax_writers.py"), where, rest=rest))
    assert ran.status == 0, ran.stderr
    assert ran.report["attempts"][0]["verdict"]["reference"] == "task-killed"
    for index in range(2):
        lines = (ran.directory / "attempt-2" / f"worker-{index}.log").read_text().splitlines()
        assert [line for line in lines if line.startswith("epoch")] == ["epoch 2", "epoch 3"]
        assert lines[-1] == "loaded: the same predictions"
    assert [line.split(",")[0] for line in (folder / "log.csv").read_text().split()] == ["epoch", "0", "1", "2", "3"]
    made = {"best.keras", "last.keras", "last.weights.h5", "log.csv", "orbax"}
    assert {path.name for path in folder.iterdir() if not path.name.startswith("backup")} == made
    assert not [path for path in folder.rglob("*") if path.is_file() and path.parent.name.startswith("backup")]


def test_a_preempted_program_saves_and_the_restart_is_free(distlaunch: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    rest = f"checkpoint_directory: {tmp_path / 'checkpoints'}\nrestart: {{max_restarts: 1}}\n"
    spec = write_spec(tmp_path, str(PROGRAMS / "jax_saves.py"), rest=rest)
    ran = distlaunch("up", "--chaos", "preempt:worker:1@epoch=3", spec)
    assert ran.status == 0, ran.stderr
    first = ran.report["attempts"][0]
    assert first["verdict"]["reference"] == "preempted"
    assert {task["exit_code"] for task in first["tasks"]} == {42}
    assert "Restarting: attempt 2 (not counted)" in ran.stderr
    assert (ran.directory / "attempt-2" / "worker-0.log").read_text().splitlines()[-1] == "trained"

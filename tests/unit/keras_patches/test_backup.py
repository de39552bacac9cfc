"""A backup of BackupAndRestore is one: after a death at any moment, its files are all of one epoch."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker_entry.keras_patches.backup import PART, SEEDS, finish_backup, write_whole

NAMES = ("latest.weights.h5", "training_metadata.json")


class DeadError(Exception):
    """The process would have died here."""


class Seed:
    """The state of a layer's random generator."""

    path = "dropout/seed_generator_state"

    def __init__(self, value: int) -> None:
        self.value = [value]

    def numpy(self) -> Seed:
        return self

    def tolist(self) -> list[int]:
        return self.value


def back_up(folder: Path, epoch: int, *, seeded: bool = False) -> None:
    """Writes the backup of an epoch, as Keras does."""

    def save(callback: Any) -> None:
        for path in callback.paths:
            Path(path).write_text(str(epoch))

    # Keras keeps its paths in attributes of the callback, one for each.
    paths = {f"_path_{number}": str(folder / name) for number, name in enumerate(NAMES)}

    class Callback(SimpleNamespace):
        @property
        def paths(self) -> list[str]:
            return [getattr(self, name) for name in paths]

    model = SimpleNamespace(variables=[Seed(epoch)] if seeded else [])
    callback = Callback(backup_dir=str(folder), double_checkpoint=False, model=model, **paths)
    write_whole(save, callback)


def read(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in NAMES]


@pytest.mark.parametrize("moment", range(4))
def test_a_death_at_any_moment_leaves_the_files_of_one_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    back_up(tmp_path, 1, seeded=True)
    moves = 0

    def dying(move: Any) -> Any:
        def call(source: str, target: str) -> None:
            nonlocal moves
            if moves == moment:
                raise DeadError
            moves += 1
            move(source, target)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", dying(os.rename))
        patched.setattr(os, "replace", dying(os.replace))
        with pytest.raises(DeadError):
            back_up(tmp_path, 2, seeded=True)
    finish_backup(str(tmp_path))  # at the next start
    assert read(tmp_path) == (["1", "1"] if moment == 0 else ["2", "2"])
    assert (tmp_path / SEEDS).read_text() == ("[[1]]" if moment == 0 else "[[2]]")


@pytest.mark.parametrize("seeded", [False, True])
def test_a_complete_backup_leaves_only_its_files_and_those_of_random_layers_if_there_are_any(
    tmp_path: Path, seeded: bool
) -> None:
    for epoch in (1, 2):
        back_up(tmp_path, epoch, seeded=seeded)
    assert read(tmp_path) == ["2", "2"]
    assert {path.name for path in tmp_path.iterdir()} == {*NAMES, *([SEEDS] if seeded else [])}
    assert not seeded or (tmp_path / SEEDS).read_text() == "[[2]]"


def test_a_death_during_the_moves_of_the_first_backup_still_leaves_a_backup(tmp_path: Path) -> None:
    back_up(tmp_path, 1)
    complete = tmp_path / f"{PART}complete"
    complete.mkdir()
    for name in NAMES:
        (tmp_path / name).rename(complete / name)
    finish_backup(str(tmp_path))
    assert read(tmp_path) == ["1", "1"]
    assert not complete.exists()

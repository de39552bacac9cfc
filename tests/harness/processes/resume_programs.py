"""The programs in `programs/resume_flaws/`: what is wrong with each when it resumes, and what shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.harness.places import PROGRAMS

FOLDER = PROGRAMS / "resume_flaws"
Fault = Literal["in an epoch", "while a checkpoint is written", "at a preemption"]
"""A name of `launcher.proof.phases`."""


@dataclass(frozen=True)
class ResumeProgram:
    """A program that trains.

    Attributes:
        script: its name in FOLDER.
        flaw: the reference of its flaw; empty if it resumes exactly.
        words: what the right answer has to contain.
        shown_by: the fault after which the flaw shows.
        repeats: whether two runs without a fault have the same numbers.
    """

    script: str
    flaw: str = ""
    words: tuple[str, ...] = ()
    shown_by: Fault = "in an epoch"
    repeats: bool = True

    @property
    def path(self) -> Path:
        return FOLDER / self.script


FLAWED = (
    ResumeProgram("no_checkpoint.py", "no-checkpoint", ("28 steps were lost", "BackupAndRestore")),
    ResumeProgram("weights_only.py", "optimizer-lost", ("the optimizer's step is 0 instead of 24",)),
    ResumeProgram("epoch_forgotten.py", "epoch-lost", ("initial_epoch",)),
    ResumeProgram("backup_mid_epoch.py", "data-restarted", ("at the start of epoch 4", "save_freq")),
    ResumeProgram("shuffle_again.py", "data-order", ("the batches of epoch",)),
    ResumeProgram("own_epoch_counter.py", "learning-rate", ("learning rate",)),
    ResumeProgram("plateau_forgotten.py", "learning-rate", ("learning rate",)),
    ResumeProgram("rate_by_hand.py", "learning-rate", ("learning rate",)),
    ResumeProgram("early_stopping_forgotten.py", "ends-elsewhere", ("instead of 32", "EarlyStopping")),
    ResumeProgram("augmentation_again.py", "data-order", ("the batches of epoch 1 again",)),
    ResumeProgram("global_state_again.py", "random-state", ("NumPy",)),
    ResumeProgram("dropout_again.py", "random-state", ("Dropout",)),
    ResumeProgram(
        "written_in_place.py",
        "half-checkpoint",
        ("File is not a zip file", "rename it"),
        "while a checkpoint is written",
    ),
    ResumeProgram("log_appended.py", "file-twice", ("steps.csv",)),
    ResumeProgram("log_begun_again.py", "file-lost", ("log.csv lacks 3 lines",)),
    ResumeProgram("average_forgotten.py", "state-lost", ("neither in the model",)),
    ResumeProgram("preempted_unread.py", "old-checkpoint", ("although step",), "at a preemption"),
)
EXACT = (
    ResumeProgram("exact_arrays.py"),
    ResumeProgram("exact_normalization.py"),
    ResumeProgram("exact_dropout.py"),
    ResumeProgram("exact_shuffled_once.py"),
    ResumeProgram("exact_order_by_epoch.py"),
    ResumeProgram("exact_load_model.py"),
    ResumeProgram("exact_cosine.py"),
    ResumeProgram("exact_csv.py"),
    ResumeProgram("exact_own_loop.py"),
)
UNSEEDED = ResumeProgram("unseeded.py", repeats=False)

"""The programs in `programs/resume_flaws/`: what is wrong with each when it resumes, and what shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.harness.places import PROGRAMS

FOLDER = PROGRAMS / "resume_flaws"
Fault = Literal["in an epoch", "while saving", "preempted"]


@dataclass(frozen=True)
class ResumeProgram:
    """A program that trains.

    Attributes:
        script: its name in FOLDER.
        flaw: the reference of its flaw; empty if it resumes exactly.
        words: what the right answer has to contain.
        shown_by: the fault after which the flaw shows: a worker is killed in an epoch or while it saves, or all tasks
            get SIGTERM.
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
    ResumeProgram("no_checkpoint.py", "no-checkpoint", ("checkpoint",)),
    ResumeProgram("weights_only.py", "optimizer-lost", ("optimizer",)),
    ResumeProgram("epoch_forgotten.py", "epoch-lost", ("initial_epoch",)),
    ResumeProgram("backup_mid_epoch.py", "data-restarted", ("batch",)),
    ResumeProgram("shuffle_again.py", "data-order", ("order",)),
    ResumeProgram("own_epoch_counter.py", "learning-rate", ("learning rate",)),
    ResumeProgram("plateau_forgotten.py", "learning-rate", ("learning rate",)),
    ResumeProgram("rate_by_hand.py", "learning-rate", ("learning rate",)),
    ResumeProgram("early_stopping_forgotten.py", "ends-elsewhere", ("epoch 4",)),
    ResumeProgram("augmentation_again.py", "random-state", ("NumPy",)),
    ResumeProgram("global_state_again.py", "random-state", ("NumPy",)),
    ResumeProgram("dropout_again.py", "random-state", ("Dropout",)),
    ResumeProgram("written_in_place.py", "half-checkpoint", ("checkpoint.npz",), "while saving"),
    ResumeProgram("log_appended.py", "file-twice", ("steps.csv",)),
    ResumeProgram("log_begun_again.py", "file-lost", ("log.csv",)),
    ResumeProgram("average_forgotten.py", "state-lost", ("weights",)),
    ResumeProgram("preempted_unread.py", "old-checkpoint", ("preempted.keras",), "preempted"),
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

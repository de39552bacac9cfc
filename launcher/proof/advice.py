"""What to change in a program that does not resume exactly, and in which line."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence

from launcher.proof.models import Flaw, FlawName
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class Advice:
    """What helps against a flaw, in general.

    `hint`: what to do. `calls`: the functions in whose call the change is made, the most likely first; with a keyword,
    only calls that have it count: `BackupAndRestore(save_freq)`.
    """

    hint: str
    calls: Sequence[str] = ()


_BACKUP = "keras.callbacks.BackupAndRestore"
ADVICE: Mapping[FlawName, Advice] = {
    "no-checkpoint": Advice(
        f"give `fit` a `{_BACKUP}`, or save in a loop of your own, in the folder DISTLAUNCH_CHECKPOINT_DIR", ("fit",)
    ),
    "old-checkpoint": Advice(
        "load the newest checkpoint before training begins, and only a complete one",
        ("load_weights", "load_model", "restore", "BackupAndRestore", "fit"),
    ),
    "did-not-resume": Advice(
        "make the start of the program ready for what an earlier one has left",
        ("load_weights", "load_model", "restore"),
    ),
    "half-checkpoint": Advice(
        "write a checkpoint to another name, and rename it when it is complete",
        ("savez", "dump", "save_weights", "save", "load_weights", "load_model"),
    ),
    "state-lost": Advice(
        "save this state with the model: as a weight of a layer, or in the same checkpoint",
        ("load_weights", "load_model", "restore", "BackupAndRestore", "fit"),
    ),
    "optimizer-lost": Advice(
        "save and load the optimizer as well: `model.save`, a BackupAndRestore, or `tf.train.Checkpoint(model=…, "
        "optimizer=…)`",
        ("save_weights", "load_weights", "savez", "Checkpoint", "ModelCheckpoint(save_weights_only)"),
    ),
    "learning-rate": Advice(
        "compute the learning rate from the step or the epoch, as a LearningRateSchedule does, or save it",
        ("LearningRateScheduler", "ReduceLROnPlateau", "fit"),
    ),
    "epoch-lost": Advice("save the epoch, and pass it to `fit` as `initial_epoch`", ("fit",)),
    "data-restarted": Advice(
        "save at the ends of epochs (without `save_freq`), or save the position in the data as well",
        ("BackupAndRestore(save_freq)", "ModelCheckpoint(save_freq)", "fit"),
    ),
    "data-order": Advice(
        "shuffle and augment by a seed that is computed from the epoch, or save the iterator or the generator",
        ("shuffle", "default_rng", "fit(shuffle)", "fit"),
    ),
    "random-state": Advice(
        "save the state of the random generators; Keras leaves that of Dropout out of its checkpoints",
        ("Dropout", "SeedGenerator", "default_rng"),
    ),
    "metrics": Advice("save what the metric has counted, or save at the ends of epochs", ("compile", "fit")),
    "ends-elsewhere": Advice(
        "save the state of callbacks that end training, such as EarlyStopping", ("EarlyStopping", "fit")
    ),
    "file-twice": Advice(
        "write a file anew from what is known, or cut off the part that is repeated",
        ("CSVLogger(append)", "CSVLogger", "open"),
    ),
    "half-file": Advice("write a file to another name, and rename it when it is complete", ("savez", "dump", "open")),
    "file-lost": Advice(
        "append to a file after a restart (`append=True`), and write it after each restart as well",
        ("CSVLogger", "open"),
    ),
}


def advise(flaws: Sequence[Flaw], name: str, source: str) -> list[Flaw]:
    """The flaws with what to change, and where, if the program's text shows it.

    Args:
        flaws: the flaws of one run.
        name: the program's file, as the user named it.
        source: its text; empty if it is unknown.
    """
    calls = _find_calls(source)
    given = []
    for flaw in flaws:
        advice = ADVICE[flaw.reference]
        line = next((calls[call] for call in advice.calls if call in calls), None)
        given.append(flaw.model_copy(update={"hint": advice.hint, "place": f"{name}:{line}" if line else ""}))
    return given


def _find_calls(source: str) -> dict[str, int]:
    """The line of the first call of each function, by its name, and by its name with each of its keywords."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # then the program fails with it
        return {}
    found: dict[str, int] = {}
    for line, name, keywords in sorted(_read_calls(tree), key=lambda call: call[0]):
        for key in (name, *(f"{name}({keyword})" for keyword in keywords)):
            found.setdefault(key, line)
    return found


def _read_calls(tree: ast.AST) -> Iterator[tuple[int, str, Collection[str]]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name:
            yield node.lineno, name, [keyword.arg for keyword in node.keywords if keyword.arg]

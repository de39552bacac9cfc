"""Makes Keras 3's callbacks that write files right with several workers: of those that share a path, one writes.

A tutorial's script gives the same `ModelCheckpoint`, `TensorBoard` and `CSVLogger` to `fit` on every worker. In Keras
all workers then write the same files at once, and fail on each other's locks.

The rule: a path is shared by workers that give it alike and find the same folder there. When `fit` begins, they find
out by small files, which each leaves there for a moment. Of the workers that share a path, the chief writes, or, if it
is not among them, the first; the others take part in the same moments, since to read a variable may need all workers,
and write to a temporary folder of their own, which is removed. So each worker's own path stays its own, and of nodes
without a shared disk each gets the file. `fit` returns when all of it is written, so that any worker can read it.

A path of an object store (`gs://…`) is shared if it is the chief's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MODEL_CHECKPOINT = "keras.src.callbacks.model_checkpoint"
WRITERS = {
    (MODEL_CHECKPOINT, "ModelCheckpoint"): "filepath",
    ("keras.src.callbacks.tensorboard", "TensorBoard"): "log_dir",
    ("keras.src.callbacks.csv_logger", "CSVLogger"): "filename",
}
"""The callbacks that write, and their attributes that say where."""
REMOTE_LIMIT = 16
"""Paths of object stores that are compared with the chief's."""
WIDTH = 2 + REMOTE_LIMIT
"""Numbers that workers tell each other at once."""

_aside: set[int] = set()
"""The ids of the callbacks of a running `fit` that leave it to another worker to write."""


def patch_callbacks(trainer: Any, module: Any) -> list[str]:
    """Replaces what is faulty in `fit` and the callbacks; returns the names of what it replaced."""
    checkpoint = module.ModelCheckpoint
    fit = getattr(trainer.TensorFlowTrainer, "fit", None)
    if fit is None or not all(hasattr(checkpoint, name) for name in ("_save_model", "_get_file_path")):
        return []
    checkpoint._save_model = _patched_save(checkpoint._save_model)
    trainer.TensorFlowTrainer.fit = _patched_fit(trainer, fit)
    return [name for _, name in _writers().values()]


def _writers() -> dict[Any, tuple[str, str]]:
    """The classes that this Keras has, with the attribute and the name of each."""
    found = {}
    for (module, name), attribute in WRITERS.items():
        writer = getattr(sys.modules.get(module), name, None)
        if isinstance(writer, type):
            found[writer] = attribute, name
    return found


@dataclass(frozen=True)
class _Output:
    """Where a callback writes."""

    callback: Any
    kind: str
    attribute: str
    path: str

    @property
    def is_remote(self) -> bool:
        return "://" in self.path

    @property
    def digest(self) -> int:
        """Of what this worker was given, whatever folder that is."""
        return int(hashlib.sha256(f"{self.kind}\0{self.path}".encode()).hexdigest()[:12], 16)


def _patched_fit(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = self.distribute_strategy
        if strategy is None or not trainer._collective_all_reduce_multi_worker(strategy):
            return original(self, *args, **kwargs)
        try:
            callbacks = signature.bind(self, *args, **kwargs).arguments.get("callbacks")
        except TypeError:  # of which Keras tells better
            return original(self, *args, **kwargs)
        outputs = list(_outputs(trainer, callbacks))
        shared, others_wait = _agree(trainer, strategy, outputs)
        with contextlib.ExitStack() as during:
            for output in shared:
                during.enter_context(_written_aside(output))
            result = original(self, *args, **kwargs)
        if others_wait:
            _sum(trainer, strategy, [0])  # nobody goes on before everything is written
        return result

    return fit


def _outputs(trainer: Any, callbacks: Any) -> Iterator[_Output]:
    writers = _writers()
    for callback in trainer.tree.flatten(getattr(callbacks, "callbacks", callbacks)):
        for writer, (attribute, kind) in writers.items():
            path = getattr(callback, attribute, None) if isinstance(callback, writer) else None
            if isinstance(path, (str, os.PathLike)):
                yield _Output(callback, kind, attribute, os.fspath(path))


def _agree(trainer: Any, strategy: Any, outputs: Sequence[_Output]) -> tuple[list[_Output], bool]:
    """Called by all workers: this one's outputs that another writes, and whether any worker has such."""
    number = _number(strategy)
    remote = [output.digest for output in outputs if output.is_remote] if number == 0 else []
    nonce = secrets.randbits(48) if number == 0 else 0  # an earlier run's files may have been left
    remote = [*remote, *[0] * REMOTE_LIMIT][:REMOTE_LIMIT]
    count, nonce, *of_chief = _sum(trainer, strategy, [len(outputs), nonce, *remote])
    if not count:
        return [], False
    signs = [None if output.is_remote else _sign(output.path, nonce) for output in outputs]
    left = [path for sign in signs if sign is not None for path in _leave(f"{sign}-{number}")]
    _sum(trainer, strategy, [0])
    shared = [
        output
        for output, sign in zip(outputs, signs)  # noqa: B905 - Python 3.9 has no strict
        if (
            number > 0 and output.digest in of_chief
            if sign is None
            else any(os.path.exists(f"{sign}-{other}") for other in range(number))
        )
    ]
    (anywhere,) = _sum(trainer, strategy, [len(shared)])
    for path in left:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return shared, bool(anywhere)


def _number(strategy: Any) -> int:
    """This worker's, with the chief as 0."""
    resolver = strategy.cluster_resolver
    if resolver.task_type == "worker":
        return int(resolver.task_id) + ("chief" in resolver.cluster_spec().jobs)
    return 0


def _sign(path: str, nonce: int) -> str:
    """With a worker's number behind it, the file by which that worker shows that it has the path.

    Others see it if it is the same folder for them.
    """
    folder = os.path.realpath(path)
    if "{" in folder:  # filled in later
        folder = os.path.dirname(folder[: folder.index("{")])
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    rest = os.path.relpath(os.path.realpath(path), folder)
    return os.path.join(folder, f".distlaunch-{nonce:x}-{hashlib.sha256(rest.encode()).hexdigest()[:16]}")


def _leave(sign: str) -> Iterator[str]:
    # A folder to which nothing can be written is nobody's to share.
    with contextlib.suppress(OSError):
        os.close(os.open(sign, os.O_WRONLY | os.O_CREAT, 0o600))
        yield sign


def _sum(trainer: Any, strategy: Any, numbers: Sequence[int]) -> list[int]:
    """Called by all workers with as many numbers; returns their sums."""
    sums = _make_sum(trainer, strategy)(trainer.tf.constant([*numbers, *[0] * (WIDTH - len(numbers))], "int64"))
    local = strategy.experimental_local_results(sums)
    # Each replica of a worker has added its own.
    return [int(number) // len(local) for number in local[0].numpy()[: len(numbers)]]


@functools.cache
def _make_sum(trainer: Any, strategy: Any) -> Callable[[Any], Any]:
    tf = trainer.tf

    def share(numbers: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.identity(numbers))

    @tf.function(input_signature=[tf.TensorSpec([WIDTH], tf.int64)])  # type: ignore[untyped-decorator]
    def add_up(numbers: Any) -> Any:
        return strategy.run(share, args=(numbers,))

    return add_up  # type: ignore[no-any-return]


@contextlib.contextmanager
def _written_aside(output: _Output) -> Iterator[None]:
    """Within it, the callback does not write to its path, which another worker does."""
    if output.kind == "ModelCheckpoint":  # which may write a great many
        _aside.add(id(output.callback))
        try:
            yield
        finally:
            _aside.discard(id(output.callback))
        return
    with tempfile.TemporaryDirectory() as own, _directed_to(output.callback, output.attribute, own):
        yield


def _patched_save(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _save_model(self: Any, epoch: Any, batch: Any, logs: Any) -> None:
        if id(self) not in _aside:
            with contextlib.suppress(Exception):  # which Keras meets again, and tells of
                folder = os.path.dirname(self._get_file_path(epoch, batch, logs))
                if folder and "://" not in folder:
                    os.makedirs(folder, exist_ok=True)  # Keras fails if another worker makes it at the same time
            original(self, epoch, batch, logs)
            return
        verbose, self.verbose = self.verbose, 0
        try:
            # What cannot be written, on a full disk, say, nobody will miss.
            with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as own:
                with _directed_to(self, "filepath", own):
                    original(self, epoch, batch, logs)
        finally:
            self.verbose = verbose

    return _save_model


@contextlib.contextmanager
def _directed_to(callback: Any, attribute: str, folder: str) -> Iterator[None]:
    """Within it, the callback writes into another folder, under the same name."""
    before = getattr(callback, attribute)
    setattr(callback, attribute, os.path.join(folder, os.path.basename(os.path.normpath(before))))
    try:
        yield
    finally:
        setattr(callback, attribute, before)

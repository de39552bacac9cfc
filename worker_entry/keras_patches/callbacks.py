"""Makes Keras 3's callbacks write each file only once: of the workers that share a path, one writes.

A tutorial's script passes the same `ModelCheckpoint`, `TensorBoard` and `CSVLogger` to `fit` on every worker. In Keras,
all workers then write the same files at once, and fail on each other's locks.

Workers share a path if they use the same path and it leads to the same folder. When `fit` begins, they find that out
with small marker files, which exist only for a moment. Of the workers that share a path, the chief writes or, if the
chief is not among them, the first worker. The others write nothing. So a worker that shares its path with no other
writes there itself, and without a shared disk each node gets the file. `fit` returns when all files are written, so
that every worker can read them.

A path in an object store (`gs://…`) is shared if the chief has the same path.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from worker_entry.keras_patches.collectives import WIDTH
from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.peers import Peers, find_peers
from worker_entry.keras_patches.source import find_trainer, flatten_callbacks
from worker_entry.protocol.frozen import dataclass

MODEL_CHECKPOINT = "keras.src.callbacks.model_checkpoint"
TENSORBOARD = "keras.src.callbacks.tensorboard"
ORBAX_CHECKPOINT = "keras.src.callbacks.orbax_checkpoint"
WRITERS = {
    (MODEL_CHECKPOINT, "ModelCheckpoint"): "filepath",
    (TENSORBOARD, "TensorBoard"): "log_dir",
    ("keras.src.callbacks.csv_logger", "CSVLogger"): "filename",
    (ORBAX_CHECKPOINT, "OrbaxCheckpoint"): "directory",
}
"""The callbacks that write files, each with its attribute for the path."""
REMOTE_LIMIT = WIDTH - 2
"""Maximum number of object store paths that are compared with the chief's."""
MODELS = ("ModelCheckpoint", "OrbaxCheckpoint")
"""The callbacks that write models."""

_suppressed: set[int] = set()
"""The ids of callbacks of a running `fit` whose files another worker writes."""


def patch_callbacks(trainer: Any, module: Any, _: Any) -> Iterator[Finding]:
    """Replaces `fit` and the callbacks' faulty methods."""
    names = [name for _, name in _writers().values()]
    checkpoint = module.ModelCheckpoint
    trainer_class = find_trainer(trainer)
    fit = getattr(trainer_class, "fit", None)
    needed = ("_save_model", "_get_file_path", "_should_save_model")
    if fit is None or not all(hasattr(checkpoint, name) for name in needed):
        yield from (unpatched(name, fixed=False) for name in names)
        return
    checkpoint._save_model = _patched_save(checkpoint._save_model)
    orbax: Any = sys.modules.get(ORBAX_CHECKPOINT)
    read_state: Any = getattr(orbax, "_get_state_tree", None)
    if read_state is not None:
        orbax_class = orbax.OrbaxCheckpoint
        orbax_class._save_checkpoint = _patched_save_checkpoint(orbax_class._save_checkpoint, read_state)
    _patch_tensorboard()
    trainer_class.fit = _patched_fit(trainer, fit)
    for name in names:
        is_known = name != "OrbaxCheckpoint" or read_state is not None
        yield patched(name) if is_known else unpatched(name, fixed=False)


def _writers() -> dict[Any, tuple[str, str]]:
    """The classes of `WRITERS` that this Keras has, each with its attribute and name."""
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
        """A hash of the path as it was given to this worker."""
        return int(hashlib.sha256(f"{self.kind}\0{self.path}".encode()).hexdigest()[:12], 16)


def _patched_fit(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        peers = find_peers(trainer, self)
        if peers is None:
            return original(self, *args, **kwargs)
        try:
            callbacks = signature.bind(self, *args, **kwargs).arguments.get("callbacks")
        except TypeError:  # Keras reports the error better
            return original(self, *args, **kwargs)
        every = _outputs(trainer, callbacks)
        outputs = [output for output in every if output.kind not in peers.writes_together]
        shared, others_wait = _find_shared(peers, outputs)
        with contextlib.ExitStack() as during:
            for output in shared:
                during.enter_context(_redirected(output))
            result = original(self, *args, **kwargs)
        if others_wait:
            peers.add_up([0])  # no worker continues before all files are written
        return result

    return fit


def _outputs(trainer: Any, callbacks: Any) -> Iterator[_Output]:
    writers = _writers()
    for callback in flatten_callbacks(trainer, callbacks):
        for writer, (attribute, kind) in writers.items():
            path = getattr(callback, attribute, None) if isinstance(callback, writer) else None
            if isinstance(path, (str, os.PathLike)):
                yield _Output(callback, kind, attribute, os.fspath(path))


def _find_shared(peers: Peers, outputs: Sequence[_Output]) -> tuple[list[_Output], bool]:
    """Finds the outputs that another worker writes, and whether any worker has such outputs; all workers call it."""
    number = peers.number
    remote = [output.digest for output in outputs if output.is_remote] if number == 0 else []
    nonce = secrets.randbits(48) if number == 0 else 0  # marker files of an earlier run may still exist
    remote = [*remote, *[0] * REMOTE_LIMIT][:REMOTE_LIMIT]
    count, nonce, *of_chief = peers.add_up([len(outputs), nonce, *remote])
    if not count:
        return [], False
    markers = [None if output.is_remote else _marker(output.path, nonce) for output in outputs]
    written = [path for marker in markers if marker is not None for path in _write_marker(f"{marker}-{number}")]
    peers.add_up([0])
    shared = [
        output
        for output, marker in zip(outputs, markers)  # noqa: B905 - Python 3.9 has no strict
        if (
            number > 0 and output.digest in of_chief
            if marker is None
            else any(os.path.exists(f"{marker}-{other}") for other in range(number))
        )
    ]
    (anywhere,) = peers.add_up([len(shared)])
    for path in written:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return shared, bool(anywhere)


def _marker(path: str, nonce: int) -> str:
    """The marker file for a path; the caller appends the worker's number.

    Another worker sees the file if the path leads to the same folder on both.
    """
    folder = os.path.realpath(path)
    if "{" in folder:  # Keras fills it in later
        folder = os.path.dirname(folder[: folder.index("{")])
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    rest = os.path.relpath(os.path.realpath(path), folder)
    return os.path.join(folder, f".distlaunch-{nonce:x}-{hashlib.sha256(rest.encode()).hexdigest()[:16]}")


def _write_marker(marker: str) -> Iterator[str]:
    # A folder that is not writable does not count as shared.
    with contextlib.suppress(OSError):
        os.close(os.open(marker, os.O_WRONLY | os.O_CREAT, 0o600))
        yield marker


@contextlib.contextmanager
def _redirected(output: _Output) -> Iterator[None]:
    """Keeps the callback from writing to its path, because another worker writes there."""
    temporary = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - the place of a folder with a random name
    own = os.path.join(temporary, f".distlaunch-{secrets.token_hex(8)}")  # not made: that needs space on the disk
    _suppressed.add(id(output.callback))
    try:
        if output.kind in MODELS:
            yield
        elif output.kind == "CSVLogger":
            with _directed_to(output.callback, output.attribute, os.devnull):
                yield
        else:  # the folder is only made if a program's own kind of TensorBoard writes something else
            with _directed_to(output.callback, output.attribute, own):
                yield
    finally:
        _suppressed.discard(id(output.callback))
        shutil.rmtree(own, ignore_errors=True)


def _patch_tensorboard() -> None:
    """Makes a TensorBoard write nothing while it is suppressed."""
    board = getattr(sys.modules.get(TENSORBOARD), "TensorBoard", None)
    for name in ("_train_writer", "_val_writer"):
        writer = getattr(board, name, None)
        if isinstance(writer, property) and writer.fget is not None:
            setattr(board, name, property(_patched_writer(writer.fget)))
    for name in ("_configure_embeddings", "_start_profiler"):
        if hasattr(board, name):
            setattr(board, name, _unless_suppressed(getattr(board, name)))


def _patched_writer(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def writer(self: Any) -> Any:
        if id(self) not in _suppressed:
            return original(self)
        return sys.modules["tensorflow"].summary.create_noop_writer()  # which the callback has imported

    return writer


def _unless_suppressed(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if id(self) not in _suppressed:
            original(self, *args, **kwargs)

    return call


def _patched_save(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _save_model(self: Any, epoch: Any, batch: Any, logs: Any) -> None:
        if id(self) not in _suppressed:
            with contextlib.suppress(Exception):  # Keras fails again, and reports it
                folder = os.path.dirname(self._get_file_path(epoch, batch, logs))
                if folder and "://" not in folder:
                    os.makedirs(folder, exist_ok=True)  # Keras fails if another worker creates it at the same time
            original(self, epoch, batch, logs)
            return
        verbose, self.verbose = self.verbose, 0
        try:
            self._should_save_model(epoch, batch, logs, self._get_file_path(epoch, batch, logs))  # notes the best value
        finally:
            self.verbose = verbose

    return _save_model


def _patched_save_checkpoint(original: Callable[..., None], read_state: Callable[[Any], Any]) -> Callable[..., None]:
    @functools.wraps(original)
    def _save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        if id(self) not in _suppressed:
            original(self, *args, **kwargs)
        else:
            read_state(self.model)  # as the writer does: reading the metrics takes all workers

    return _save_checkpoint


@contextlib.contextmanager
def _directed_to(callback: Any, attribute: str, path: str) -> Iterator[None]:
    """Temporarily makes the callback write to another path."""
    before = getattr(callback, attribute)
    setattr(callback, attribute, path)
    try:
        yield
    finally:
        setattr(callback, attribute, before)

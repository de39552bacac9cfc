"""Checks that all replicas train the same model: a digest of all variables, at the ends of epochs.

Every worker computes the digests on its own devices from its own copies, and the controller compares them, so the check
needs no collective. It takes at most a hundredth of the time: if it would take longer, some epochs are left out, and
some calls of `fit` if there are many. Only the first digests may take more.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.keras_patches.findings import Finding
from worker_entry.keras_patches.news import News
from worker_entry.keras_patches.source import CALLBACK, change_callbacks, with_callback
from worker_entry.protocol.values import MOST_PARTS, ModelDigest

SHARE = 0.01
"""The part of the time that digests may take."""
SEEN_S = 2.0
"""The shortest time between digests: an agent reads the status of its tasks twice a second, and when they end."""
CHUNK = 1 << 22
"""How many elements are read at once, so that a large variable needs little memory."""

LONGEST_NAME = 150
"""Maximum length of a variable's path; only its end is kept."""


def patch_digests(trainer: Any, _: Any, news: News) -> Iterator[Finding]:
    """Adds a callback to each `fit` on several replicas; this fixes no fault, so there is no finding."""
    base = getattr(sys.modules.get(CALLBACK), "Callback", None)
    if base is not None:
        callback = _make_callback(trainer, base, news)

        def add(model: Any, callbacks: Any) -> Any:
            if not _has_copies(trainer.tf, model.distribute_strategy):
                return callbacks
            return with_callback(trainer, model, callbacks, callback())

        change_callbacks(trainer, add)
    yield from ()


def _has_copies(tf: Any, strategy: Any) -> bool:
    """Whether each replica has a copy of each variable."""
    return strategy.num_replicas_in_sync > 1 and isinstance(
        strategy, (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    )


def _make_callback(trainer: Any, base: Any, news: News) -> Any:
    fits, epochs = Rhythm(), Rhythm()

    class CompareModels(base):  # type: ignore[misc]  # a class of Keras
        epoch = 0

        def on_train_begin(self, logs: Any = None) -> None:
            fits.begin()

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs.begin()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epoch = int(epoch) + 1
            is_last = self.epoch == self.params.get("epochs")  # `on_train_end` follows
            epochs.end(self.epoch, lambda: self.send(ended=False), allowed=not is_last)

        def on_train_end(self, logs: Any = None) -> None:
            fits.end(fits.count, lambda: self.send(ended=True))

        def send(self, *, ended: bool) -> None:
            names, copies = digest_model(trainer, self.model)
            apart = next((name for name, digests in zip(names, copies) if len(set(digests)) > 1), "")  # noqa: B905
            if apart:
                news.say(f"the copies of {apart} on the devices of this process differ; only the first is saved")
            parts = [f"{digests[0] & 0xFFFFFFFF:08x}" for digests in copies]
            news.report_model(ModelDigest(fits.count, self.epoch, ended, *_grouped(names, parts)))

    return CompareModels


class Rhythm:
    """Decides after which epochs, or calls of `fit`, a digest is computed: after the first, and then every 2^n."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        """How many have begun."""
        self._clock = clock
        self._began = 0.0
        self._every = 1

    def begin(self) -> None:
        self.count += 1
        self._began = self._clock()

    def end(self, number: int, compute: Callable[[], None], *, allowed: bool = True) -> None:
        """Computes a digest if one is due. `number`: the epoch's or call's number, which is the same on all workers."""
        if not allowed or number % self._every:
            return
        ended = self._clock()
        compute()
        self._every = _find_stride(ended - self._began, self._clock() - ended)


def _find_stride(one_s: float, digest_s: float) -> int:
    """The number of epochs per digest: a power of two, so that workers have many digests of the same epochs.

    Args:
        one_s: the time that an epoch takes.
        digest_s: the time that a digest takes.
    """
    needed = math.ceil(max(SEEN_S, digest_s / SHARE) / max(one_s, 1e-3))
    return 1 << (needed - 1).bit_length()


def _grouped(names: list[str], parts: list[str]) -> tuple[list[str], list[str]]:
    """At most `MOST_PARTS` parts: consecutive variables share one, with the name of the first."""
    size = -(-len(parts) // MOST_PARTS) or 1
    if size == 1:
        return names, parts
    groups = [parts[first : first + size] for first in range(0, len(parts), size)]
    return names[::size], [hashlib.sha256("".join(group).encode()).hexdigest()[:8] for group in groups]


def digest_model(trainer: Any, model: Any) -> tuple[list[str], list[list[int]]]:
    """The names of the variables of a model and its optimizer, and the digests of each one's copies in this process."""
    tf, strategy = trainer.tf, model.distribute_strategy
    variables = list(_variables_of(model))
    digests = []
    for variable in variables:
        copies = [tf.convert_to_tensor(copy) for copy in strategy.experimental_local_results(variable.value)]
        digests.append([_digesting(tf, copy.dtype.name)(tf.reshape(copy, [-1])) for copy in copies])
    # Read only now, so that a device computes while the next variables are processed.
    return [variable.path[-LONGEST_NAME:] for variable in variables], [
        [int(digest) for digest in copies] for copies in digests
    ]


def _variables_of(model: Any) -> Iterator[Any]:
    optimizer = getattr(model, "optimizer", None)
    for variable in (*model.variables, *(getattr(optimizer, "variables", None) or ())):
        if variable.synchronization != "on_read" and variable.dtype not in ("string", "complex64", "complex128"):
            yield variable


@functools.cache
def _digesting(tf: Any, dtype: str) -> Callable[[Any], Any]:
    """A function that returns 64 bits that depend on each element of a vector of this type."""

    def mix(values: Any) -> Any:
        if not values.dtype.is_floating:
            bits = tf.cast(values, tf.int64)
        else:
            of_size = {2: tf.int16, 4: tf.int32, 8: tf.int64}
            bits = tf.cast(tf.bitcast(values, of_size[values.dtype.size]), tf.int64)
        bits = bits * 6364136223846793005 + 1442695040888963407  # modulo 2^64
        return tf.reduce_sum(bits * (bits // 65536))

    @tf.function(input_signature=[tf.TensorSpec([None], dtype)])  # type: ignore[untyped-decorator]
    def digest(values: Any) -> Any:
        count = tf.size(values, out_type=tf.int64)
        return tf.while_loop(
            lambda first, _: first < count,
            lambda first, total: (first + CHUNK, total + mix(values[first : first + CHUNK])),
            (tf.constant(0, tf.int64), tf.constant(0, tf.int64)),
            parallel_iterations=1,
        )[1]

    return digest  # type: ignore[no-any-return]

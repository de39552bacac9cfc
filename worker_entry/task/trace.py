"""Records what each step of training has done, for `distlaunch test-resume`, which compares runs.

The record is a file of JSON lines for each task and attempt. Each line is written before training goes on, so that it
outlives a process that is killed. Digests of values say whether two runs have the same state, to the last bit, without
storing it. Reading all variables after each step is slow, which matters to no test.

Lines are of these kinds: `begin` and `end` of a `fit`, `step`, `epoch` (its end), `save` (a checkpoint was written),
and `report` (a step of a program's own loop).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Optional, Union

from worker_entry.hooks.import_hooks import after_import
from worker_entry.keras_patches.source import find_trainer, is_random_state
from worker_entry.protocol import environment
from worker_entry.task import saves
from worker_entry.task.keras_progress import CALLBACK_LISTS
from worker_entry.task.meter import Meter

STEP_BYTES = 1 << 26
"""If all variables are larger, only small ones are read after a step; all are read where an epoch or `fit` begins or
ends."""
SMALL_BYTES = 1 << 20
TRAINERS = ("keras.src.backend.tensorflow.trainer", "keras.src.backend.jax.trainer")
FACTOR = 6364136223846793005
"""Knuth's multiplier of a linear congruential generator modulo 2^64."""
DIGEST_BYTES = 6


class Trace:
    """The record of this process.

    Args:
        folder: where the file is; relative to the working directory at the program's start.
        last_step: the step after which `fit` ends; None: as the program says.
    """

    def __init__(self, folder: str, last_step: Optional[int] = None) -> None:
        name = f"{os.environ[environment.TASK].replace(':', '-')}.{os.environ[environment.ATTEMPT]}.jsonl"
        os.makedirs(folder, mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(os.path.join(os.path.abspath(folder), name), flags, 0o600)
        self._process = os.getpid()
        self._last_step = last_step
        self._fits = self._epoch = self._batch = 0
        self._steps = 0
        """Of an epoch; 0 until it is known."""
        self._under_way = 0
        self._input: Union[_GraphInput, _HostInput, None] = None

    def install(self, meter: Meter) -> None:
        """Records from now on; to be called before other hooks of Keras's callbacks, which may end the process."""
        after_import(CALLBACK_LISTS[0], self._watch_callbacks)
        for trainer in TRAINERS:
            after_import(trainer, self._watch_batches)
        saves.watch(lambda path: self._write("save", path=os.path.abspath(path)))
        meter.recorders.append(self._note_report)

    def _write(self, kind: str, **values: Any) -> None:
        if os.getpid() == self._process:  # not in a child that the program has forked
            line = json.dumps({"kind": kind, **values}, separators=(",", ":"))
            os.write(self._descriptor, f"{line}\n".encode())

    def _note_report(self, step: Optional[int], epoch: Optional[int], metrics: dict[str, Any]) -> None:
        self._write("report", step=step, epoch=epoch, logs=_read_logs(metrics), random=_digest_random())

    def _watch_callbacks(self, module: Any) -> None:
        watched: dict[str, Callable[..., None]] = {
            "on_train_begin": self._begin_train,
            "on_epoch_begin": self._begin_epoch,
            "on_train_batch_end": self._end_step,
            "on_epoch_end": self._end_epoch,
            "on_train_end": self._end_train,
        }
        for name, then in watched.items():
            setattr(module.CallbackList, name, self._followed(getattr(module.CallbackList, name), then))

    def _followed(self, original: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(callback_list: Any, *args: Any, **kwargs: Any) -> Any:
            self._under_way += 1
            try:
                result = original(callback_list, *args, **kwargs)
            finally:
                self._under_way -= 1
            if not self._under_way:  # not what a callback trains
                then(callback_list.model, callback_list.params, *args, **kwargs)
            return result

        return call

    def _begin_train(self, model: Any, params: dict[str, Any], logs: Any = None) -> None:
        self._fits += 1
        self._steps = int(params.get("steps") or 0)
        self._write("begin", fit=self._fits, **_read_model(model, whole=True))

    def _begin_epoch(self, model: Any, params: dict[str, Any], epoch: Any, logs: Any = None) -> None:
        self._epoch = int(epoch) + 1
        if self._input is not None:
            self._input.take()

    def _end_step(self, model: Any, params: dict[str, Any], batch: Any, logs: Any = None) -> None:
        self._batch = int(batch) + 1
        read = self._input.take() if self._input is not None else None
        place = {"fit": self._fits, "epoch": self._epoch, "batch": self._batch}
        self._write("step", **place, logs=_read_logs(logs), input=read, **_read_model(model, whole=False))
        done = (self._epoch - 1) * self._steps + self._batch
        if self._last_step is not None and done >= self._last_step:
            model.stop_training = True

    def _end_epoch(self, model: Any, params: dict[str, Any], epoch: Any, logs: Any = None) -> None:
        self._steps = self._steps or self._batch
        place = {"fit": self._fits, "epoch": int(epoch) + 1}
        self._write("epoch", **place, logs=_read_logs(logs), **_read_model(model, whole=True))

    def _end_train(self, model: Any, params: dict[str, Any], logs: Any = None) -> None:
        self._write("end", fit=self._fits, **_read_model(model, whole=True))

    def _watch_batches(self, module: Any) -> None:
        trainer = find_trainer(module)
        original = getattr(trainer, "_make_function", None)
        if original is None:
            return

        @functools.wraps(original)
        def _make_function(model: Any, step_function: Callable[..., Any]) -> Any:
            if getattr(step_function, "__name__", "") == "train_step":
                tf = getattr(module, "tf", None)
                self._input = _HostInput() if tf is None else _GraphInput(tf, model.distribute_strategy)
                step_function = self._input.followed(step_function)
            return original(model, step_function)

        setattr(trainer, "_make_function", _make_function)  # noqa: B010 - a class that mypy does not know


class _HostInput:
    """A digest of the batches that this process has trained with since it was last taken, with JAX."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def followed(self, step_function: Callable[..., Any]) -> Callable[..., Any]:
        """The step function, which also adds its batch to the digest."""

        @functools.wraps(step_function)
        def train_step(state: Any, data: Any) -> Any:
            for value in sys.modules["jax"].tree_util.tree_leaves(data):
                shards = [shard.data for shard in getattr(value, "addressable_shards", ())] or [value]
                self._parts += [_to_numpy(shard).tobytes() for shard in shards]
            return step_function(state, data)

        return train_step

    def take(self) -> str:
        """The digest; the next one begins."""
        parts, self._parts = self._parts, []
        return _digest(parts)


class _GraphInput:
    """A digest of the batches that this process's replicas have trained with since it was last taken."""

    def __init__(self, tf: Any, strategy: Any) -> None:
        self._tf, self._strategy = tf, strategy
        with strategy.scope():
            self._sum = tf.Variable(
                tf.zeros([], tf.int64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

    def followed(self, step_function: Callable[..., Any]) -> Callable[..., Any]:
        """The step function, which also adds its batch to the digest."""

        @functools.wraps(step_function)
        def train_step(data: Any) -> Any:
            self._sum.assign(self._sum * FACTOR + self._digest(data))
            return step_function(data)

        return train_step

    def take(self) -> str:
        """The digest; the next one begins."""
        values = self._strategy.experimental_local_results(self._sum)
        found = [int(value.numpy()) for value in values]
        for value in values:
            value.assign(0)
        return ":".join(f"{value & 0xFFFFFFFFFFFF:x}" for value in found)

    def _digest(self, data: Any) -> Any:
        tf = self._tf
        total = tf.zeros([], tf.int64)
        for value in tf.nest.flatten(data, expand_composites=True):
            if isinstance(value, tf.Tensor):
                total = total * FACTOR + self._digest_tensor(value)
        return total

    def _digest_tensor(self, value: Any) -> Any:
        tf = self._tf
        flat = tf.reshape(value, [-1])
        if flat.dtype == tf.string:
            bits = tf.strings.to_hash_bucket_fast(flat, (1 << 62) - 1)
        elif flat.dtype.is_floating:
            of_size = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
            bits = tf.cast(tf.bitcast(flat, of_size[flat.dtype.size]), tf.int64)
        elif flat.dtype.is_integer or flat.dtype.is_bool:
            bits = tf.cast(flat, tf.int64)
        else:
            return tf.zeros([], tf.int64)
        places = tf.range(tf.size(bits, out_type=tf.int64), dtype=tf.int64) * 2 + 1
        mixed = (bits + 1) * FACTOR
        return tf.reduce_sum((mixed + mixed // 65536) * places)


def _variables(model: Any) -> Iterator[Any]:
    """The variables of a model and its optimizer, without metrics."""
    metrics = {id(variable) for variable in getattr(model, "metrics_variables", ())}
    yield from (variable for variable in model.variables if id(variable) not in metrics)
    yield from getattr(getattr(model, "optimizer", None), "variables", ())


def _read_state(model: Any, limit: Optional[int]) -> dict[str, dict[str, str]]:
    """A digest of each variable, by its path: those of the weights, of the optimizer, and of random generators.

    The optimizer's own step and its learning rate are left out: `_read_optimizer` reads them.

    Args:
        model: a model of Keras.
        limit: larger variables, in bytes, are left out.
    """
    optimizer = getattr(model, "optimizer", None)
    left_out = {id(getattr(optimizer, name, None)) for name in ("_iterations", "_learning_rate")}
    of_optimizer = {id(variable) for variable in getattr(optimizer, "variables", ())}
    groups: dict[str, dict[str, str]] = {"weights": {}, "optimizer": {}, "seeds": {}}
    for variable in _variables(model):
        if id(variable) in left_out or (limit is not None and _size_of(variable) > limit):
            continue
        of_model = "seeds" if is_random_state(variable) else "weights"
        group = groups["optimizer" if id(variable) in of_optimizer else of_model]
        path = variable.path
        group[path if path not in group else f"{path}#{len(group)}"] = _digest_value(variable)
    return groups


def _read_model(model: Any, *, whole: bool) -> dict[str, Any]:
    """What each line about a model has: digests of its state and of random generators, and the optimizer's numbers.

    `whole`: whether the line also has a digest of each variable.
    """
    limit = None if sum(map(_size_of, _variables(model))) <= STEP_BYTES else SMALL_BYTES
    read = _read_state(model, limit)
    state = {group: _join(parts) for group, parts in read.items()}
    found = {"state": state, "random": _digest_random(), **_read_optimizer(model)}
    if whole:
        found["parts"] = read if limit is None else _read_state(model, None)
    return found


def _read_optimizer(model: Any) -> dict[str, Any]:
    optimizer: Any = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    found: dict[str, Any] = {"iterations": None, "rate": None}
    with contextlib.suppress(Exception):  # an optimizer of the program may have neither
        found["iterations"] = int(_to_numpy(optimizer.iterations))
    with contextlib.suppress(Exception):
        found["rate"] = float(_to_numpy(optimizer.learning_rate))
    return found


def _to_numpy(value: Any) -> Any:
    return sys.modules["keras"].ops.convert_to_numpy(value)


def _size_of(variable: Any) -> int:
    size = 4
    for dimension in variable.shape:
        size *= int(dimension or 1)
    return size


def _digest_value(variable: Any) -> str:
    try:
        return _digest([_to_numpy(variable).tobytes()])
    except Exception as error:  # noqa: BLE001 - a variable of the program's own kind, which is then not compared
        return type(error).__name__


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _join(parts: dict[str, str]) -> str:
    """One digest for all; without the names, which may change when a model is loaded."""
    return _digest(digest.encode() for digest in parts.values())


def _digest_random() -> str:
    """The state of Python's and NumPy's global random generators."""
    parts = [repr(random.getstate()).encode()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        parts += [keys.tobytes(), repr((name, rest)).encode()]
    return _digest(parts)


def _read_logs(logs: Any) -> dict[str, float]:
    found = {}
    for name, value in (logs or {}).items():
        with contextlib.suppress(Exception):  # a value that is no number
            found[str(name)] = float(value)
    return found

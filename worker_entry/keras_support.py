"""Makes Keras 3's `model.fit` work under MultiWorkerMirroredStrategy, from outside.

With more than one worker, Keras 3 fails at two places of `keras/src/backend/tensorflow/trainer.py`
(tensorflow#72388, keras#20585, keras#21172):

- `TensorFlowTrainer._maybe_symbolic_build` hands a *tuple* of distributed values to `strategy.reduce`,
  which takes one value, to get a sample batch. One replica's part of the batch is all it needs.
- `reduce_per_replica` asks for the mean over axis 0 of every log value. The values are scalars, which
  have no axis 0: what is meant is the mean across the replicas.

Both are mended when Keras imports its trainer, and only where the faulty code is found, so that nothing
happens once Keras has mended them itself. A Keras that fails in some new way is left as it is.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Optional

TRAINER = "keras.src.backend.tensorflow.trainer"

Log = Callable[[str], None]


def install(log: Log) -> None:
    """Mends Keras' trainer when it is imported, or now if it has been; `log` gets one line that says what was done."""
    module = sys.modules.get(TRAINER)
    if module is None:
        sys.meta_path.insert(0, _TrainerFinder(log))
    else:
        _mend_and_log(module, log)


def mend(trainer: Any) -> list[str]:
    """Replaces the faulty functions of Keras' trainer module; returns the names of those it replaced."""
    mended = []
    trainer_class = trainer.TensorFlowTrainer
    build = getattr(trainer_class, "_maybe_symbolic_build", None)
    if build is not None and _calls_reduce(build, reduction="MEAN", axis=None):
        trainer_class._maybe_symbolic_build = _mended_build(trainer, build)
        mended.append("_maybe_symbolic_build")
    reduce = trainer.reduce_per_replica
    if _calls_reduce(reduce, reduction="MEAN", axis=0):
        trainer.reduce_per_replica = _mended_reduce(trainer, reduce)
        mended.append("reduce_per_replica")
    return mended


class _TrainerFinder:
    """A meta path finder that finds one module, the trainer, and mends it when it has run."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name != TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_mend(module: ModuleType) -> None:
            execute(module)
            _mend_and_log(module, self._log)

        # The loader was made for this one spec, so that the change ends with it.
        spec.loader.exec_module = execute_and_mend  # type: ignore[method-assign]
        return spec


def _mend_and_log(trainer: ModuleType, log: Log) -> None:
    version = getattr(sys.modules.get("keras.src.version"), "__version__", "(version unknown)")
    try:
        mended = mend(trainer)
    except Exception as error:  # noqa: BLE001 - a mend that fails must not fail the user's import of Keras
        log(f"could not look at Keras {version} to mend it ({error!r}); it runs as it is")
        return
    if mended:
        log(f"mended Keras {version} for multi-worker training: {', '.join(mended)} (--no-keras-mend turns this off)")
    else:
        log(f"Keras {version} needs no mend for multi-worker training")


def _mended_build(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    tf = trainer.tf

    def first_local(value: Any) -> Any:
        if isinstance(value, tf.distribute.DistributedValues):
            return tf.distribute.get_strategy().experimental_local_results(value)[0]
        return value

    @functools.wraps(original)
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self._distribute_strategy
        if iterator is not None and strategy is not None and _is_multi_worker(trainer, strategy):
            for _, _, batches in iterator:
                with strategy.scope():
                    data_batch = trainer.tree.map_structure(first_local, next(batches))
                break
            iterator = None
        original(self, iterator=iterator, data_batch=data_batch)

    return _maybe_symbolic_build


def _mended_reduce(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        # "auto" means "mean" here: Keras chooses otherwise for TPUs only.
        if reduction in ("auto", "mean") and _is_multi_worker(trainer, strategy):
            return trainer.tree.map_structure(lambda v: strategy.reduce("MEAN", v, axis=None), values)
        return original(values, strategy, reduction)

    return reduce_per_replica


def _is_multi_worker(trainer: Any, strategy: Any) -> bool:
    return bool(trainer._collective_all_reduce_multi_worker(strategy))


def _calls_reduce(function: Callable[..., Any], *, reduction: str, axis: Optional[int]) -> bool:
    """Whether the function's source has a call `….reduce(<reduction>, value, axis=<axis>)`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "reduce"
            and len(node.args) == 2
            and isinstance(node.args[0], ast.Constant)
            and node.args[0].value == reduction
            and any(
                keyword.arg == "axis" and isinstance(keyword.value, ast.Constant) and keyword.value.value == axis
                for keyword in node.keywords
            )
        ):
            return True
    return False

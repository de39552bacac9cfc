"""Schedules the steps of Keras 3's `fit` and `evaluate` on workers, under ParameterServerStrategy.

Variables of the model and the optimizer are on the parameter servers, where all workers read and update them. Metrics
cannot be there: Keras updates a metric by reading its variable and assigning a new value, so two workers at once would
lose updates. Therefore, each step begins with its own metrics, all zero, and returns them; the chief sums them up. A
step that is repeated because its worker was lost counts only once.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Optional

from worker_entry.hooks.remote_values import ScheduledLogs, has_ended, is_done, is_here, wait_for
from worker_entry.keras_patches.servers.data import Execution

AHEAD = 8
"""Executions per worker that are scheduled before the chief waits: enough to keep every worker busy."""
WAIT_S = 0.01
"""How long the chief waits for the oldest execution before it checks the others, too."""
LIVE_S = 1.0
"""Maximum age of the metrics that callbacks get during an epoch: computing them takes some calls to the servers."""


class Workers:
    """The workers of a strategy, and the steps that are scheduled on them."""

    def __init__(self, coordinator: Any, count: int) -> None:
        self.coordinator = coordinator
        self.count = count
        self._scheduled: deque[tuple[StepFunction, Any]] = deque()
        self._owners: dict[int, StepFunction] = {}

    def schedule(self, owner: StepFunction, function: Any, *args: Any) -> Any:
        """Schedules a call of the function on any worker; returns the remote value. `owner` gets the result."""
        self._collect()
        while len(self._scheduled) >= AHEAD * self.count:
            wait_for(self._scheduled[0][1], WAIT_S)
            self._collect()
        if id(owner) not in self._owners:
            self._owners[id(owner)] = owner
            owner.begin()
        result = self.coordinator.schedule(function, args=args)
        self._scheduled.append((owner, result))
        return result

    def wait_for(self, result: Any) -> None:
        """Waits until this step is done or has failed."""
        while not _is_over(result):
            wait_for(result, WAIT_S)
        self._collect()

    def join(self) -> None:
        """Waits until all steps are done; raises the error of a step that failed."""
        self.coordinator.join()
        self._collect()
        owners = self._owners
        self.forget()
        for owner in owners.values():
            owner.finish()

    def forget(self) -> None:
        """Ignores the results of all steps that are scheduled so far."""
        self._scheduled.clear()
        self._owners = {}

    def _collect(self) -> None:
        waiting: deque[tuple[StepFunction, Any]] = deque()
        for owner, result in self._scheduled:
            if not _is_over(result):
                waiting.append((owner, result))
            elif is_done(result):
                owner.add(*result.fetch())
        self._scheduled = waiting


def _is_over(result: Any) -> bool:
    return is_here(result) or (has_ended(result) and not is_done(result))


class StepFunction:
    """Replaces Keras's train function or test function.

    Args:
        tf: the TensorFlow module.
        model: the Keras model.
        step: the model's `train_step` or `test_step`, with a batch as the argument.
        workers: the workers that do the steps.
        local: Keras's own function, for batches that are not an `Execution`; it runs in this process.
    """

    def __init__(
        self, tf: Any, model: Any, step: Callable[[Any], Any], workers: Workers, local: Callable[..., Any]
    ) -> None:
        self._tf = tf
        self._model = model
        self._step = step
        self._workers = workers
        self._local = local
        self._variables: list[Any] = []
        self._names: tuple[str, ...] = ()
        self._sums: dict[str, Any] = {}
        self._newest: dict[str, Any] = {}
        self._last: Optional[ScheduledLogs] = None
        self._live: dict[str, Any] = {}
        self._looked = time.monotonic()
        # As in Keras, without AutoGraph.
        function = functools.partial(tf.function, autograph=False, reduce_retracing=True)
        self._train_one = function(tf.autograph.experimental.do_not_convert(self._trace_one))
        self._train_several = function(tf.autograph.experimental.do_not_convert(self._trace_several))
        self._evaluate = function(tf.autograph.experimental.do_not_convert(self._trace_evaluation))

    def __call__(self, what: Any) -> Any:
        """Schedules the execution and returns its logs at once; the logs are complete at the end of the epoch."""
        if not isinstance(what, Execution):
            return self._local(what)
        numbers = functools.partial(self._tf.constant, dtype=self._tf.int64)
        if what.dataset is not None:
            limits = (numbers(what.total), numbers(what.part), numbers(what.parts), numbers(what.steps))
            result = self._workers.schedule(self, self._evaluate, what.dataset, *limits)
        elif what.steps == 1:
            result = self._workers.schedule(self, self._train_one, what.iterator)
        else:
            result = self._workers.schedule(self, self._train_several, what.iterator, numbers(what.steps))
        if what.iterator is not None and not self._live:
            self._workers.wait_for(result)  # once per epoch, so that callbacks find all metrics' names
        if (self._newest and not self._live) or time.monotonic() - self._looked >= LIVE_S:
            self._live = self._update_metrics()
            self._looked = time.monotonic()
        self._last = ScheduledLogs(self._live, result)
        return self._last

    def add(self, metrics: dict[str, Any], logs: Any) -> None:
        """Adds the metrics and logs that an execution has returned."""
        for dtype, values in metrics.items():
            self._sums[dtype] = self._sums[dtype] + values if dtype in self._sums else values
        self._newest = logs if isinstance(logs, dict) and logs else dict.fromkeys(self._names, 0.0)

    def begin(self) -> None:
        """Resets the metrics; called when an epoch begins."""
        self._sums, self._newest, self._live, self._last = {}, {}, {}, None
        self._looked = time.monotonic()

    def finish(self) -> None:
        """Completes the logs; called when all steps of an epoch are done."""
        logs = self._update_metrics()
        if self._last is not None:
            self._last.update(logs)

    def _update_metrics(self) -> dict[str, Any]:
        sums, self._sums = self._sums, {}
        first = dict.fromkeys(sums, 0)
        for variable in self._variables if sums else ():
            dtype, size = variable.dtype, math.prod(variable.shape)
            value = sums[dtype][first[dtype] : first[dtype] + size].reshape(tuple(variable.shape))
            variable.assign(variable + self._tf.constant(value))
            first[dtype] += size
        # The metrics, unless the step returns its own logs.
        return dict(self._model._get_metrics_result_or_logs(self._newest)) if self._newest else {}

    def _trace_one(self, iterator: Any) -> tuple[dict[str, Any], Any]:
        return self._pack(*self._run(next(iterator), self._zeros()))

    def _trace_several(self, iterator: Any, steps: Any) -> tuple[dict[str, Any], Any]:
        tf = self._tf
        # The first step is outside the loop, because its result shows the structure of the logs.
        metrics, logs = self._run(next(iterator), self._zeros())

        def body(done: Any, metrics: list[Any], _: Any) -> tuple[Any, list[Any], Any]:
            return (done + 1, *self._run(next(iterator), metrics))

        first = (tf.constant(1, tf.int64), metrics, logs)
        _, metrics, logs = tf.while_loop(lambda done, *_: done < steps, body, first, parallel_iterations=1)
        return self._pack(metrics, logs)

    def _trace_evaluation(
        self, dataset: Any, total: Any, part: Any, parts: Any, steps: Any
    ) -> tuple[dict[str, Any], Any]:
        if not hasattr(dataset, "shard"):
            raise ValueError(
                "to evaluate, give the coordinator a function that returns a tf.data.Dataset, not a dataset that a "
                "strategy has distributed"
            )
        return self._trace_several(iter(dataset.take(total).shard(parts, part)), steps)

    def _pack(self, metrics: list[Any], logs: Any) -> tuple[dict[str, Any], Any]:
        """Packs all metrics of a dtype in one tensor, because each tensor that a step returns is fetched separately."""
        tf = self._tf
        packed: dict[str, Any] = {}
        for variable, value in zip(self._variables, metrics):  # noqa: B905 - Python 3.9 has no strict
            packed.setdefault(variable.dtype, []).append(tf.reshape(value, [-1]))
        return {dtype: tf.concat(values, 0) for dtype, values in packed.items()}, logs

    def _zeros(self) -> list[Any]:
        # Not earlier: Keras creates some metrics only when it has seen the first batch.
        self._variables = [v for v in self._model.metrics_variables if v.aggregation == "sum"]
        return [self._tf.zeros(variable.shape, variable.dtype) for variable in self._variables]

    def _run(self, batch: Any, metrics: list[Any]) -> tuple[list[Any], Any]:
        def run(batch: Any, metrics: list[Any]) -> tuple[list[Any], Any]:
            with _values_in_graph(self._tf, self._variables, metrics):
                logs = self._step(batch)
                if self._model._get_metrics_result_or_logs(logs) is not logs:  # the logs are the metrics
                    self._names, logs = tuple(logs), {}
                return [variable._value for variable in self._variables], logs

        returned: tuple[list[Any], Any] = self._model.distribute_strategy.run(run, args=(batch, metrics))
        return returned


@contextlib.contextmanager
def _values_in_graph(tf: Any, variables: list[Any], values: list[Any]) -> Iterator[None]:
    """Temporarily replaces the values of these variables with graph tensors, so that assign reaches no server."""
    servers = [variable._value for variable in variables]

    def assign(variable: Any, value: Any) -> None:
        variable._value = tf.cast(value, variable._value.dtype)

    try:
        for variable, value in zip(variables, values):  # noqa: B905 - Python 3.9 has no strict
            variable._value = value
            variable._direct_assign = functools.partial(assign, variable)
        yield
    finally:
        for variable, server in zip(variables, servers):  # noqa: B905 - as above
            variable._value = server
            vars(variable).pop("_direct_assign", None)

"""TF_CONFIG as TensorFlow reads it: the tasks of the cluster, and which of them this task is.

TensorFlow silently takes a missing or blank TF_CONFIG for a cluster of one task; so TF_CONFIG is written completely or
not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypedDict

from launcher.errors import TfConfigTooLongError
from launcher.tasks import TASK_TYPES, TaskId

LIMIT = (128 << 10) - len("TF_CONFIG=\0")
"""Bytes of the value. Linux starts no process with a longer one: a variable has at most 32 pages of 4 KiB."""


class TaskEntry(TypedDict):
    type: str
    index: int


class TfConfig(TypedDict):
    """The value of TF_CONFIG before it is written as JSON."""

    cluster: dict[str, list[str]]
    task: TaskEntry


def make_tf_configs(addresses: Mapping[TaskId, str]) -> dict[TaskId, TfConfig | None]:
    """The TF_CONFIG of every task; None if TF_CONFIG must be unset, as in a run of one task.

    The other tasks do not see the evaluator in their cluster; the evaluator sees itself in addition to them.

    Args:
        addresses: `host:port` for every task of the run; the indices of each type start at 0.
    """
    if len(addresses) == 1:
        return dict.fromkeys(addresses)
    # Shared: a thousand lists of a thousand addresses would be a million addresses.
    everyone = _cluster([*addresses], addresses)
    others = _cluster([task for task in addresses if task.type != "evaluator"], addresses)
    return {
        task: {
            "cluster": everyone if task.type == "evaluator" else others,
            "task": {"type": task.type, "index": task.index},
        }
        for task in addresses
    }


def render(config: TfConfig) -> str:
    """The variable's text."""
    return json.dumps(config, separators=(",", ":"))


def check_lengths(configs: Mapping[TaskId, TfConfig | None]) -> None:
    """Checks that each task can be started with its TF_CONFIG.

    Raises:
        TfConfigTooLongError: it is too long for an environment variable.
    """
    # Tasks share their cluster, so the longest name in it makes the longest text.
    by_length = sorted(configs, key=lambda task: len(str(task)))
    longest = {id(config["cluster"]): config for task in by_length if (config := configs[task]) is not None}
    length = max((len(render(config)) for config in longest.values()), default=0)
    if length > LIMIT:
        raise TfConfigTooLongError(
            f"TF_CONFIG with the addresses of {len(configs):,} tasks has {length:,} bytes; on Linux, a variable "
            f"can have {LIMIT:,}",
            hint=f"let the cluster have at most {len(configs) * LIMIT // length:,} tasks, or give the nodes shorter "
            "addresses; PyTorch and JAX (`framework:`) need no TF_CONFIG",
        )


def format_address(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _cluster(tasks: Sequence[TaskId], addresses: Mapping[TaskId, str]) -> dict[str, list[str]]:
    return {
        task_type: [addresses[task] for task in sorted(tasks) if task.type == task_type]
        for task_type in TASK_TYPES
        if any(task.type == task_type for task in tasks)
    }

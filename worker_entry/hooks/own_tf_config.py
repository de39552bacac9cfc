"""Gives TensorFlow this cluster's TF_CONFIG, even if the program has set or removed the variable.

Tutorials set TF_CONFIG for their own cluster, with the same task everywhere, or remove it first. Under a launcher,
either all tasks would then be the same task, or every task would train alone. The variable itself keeps the program's
value, as in plain Python; only TensorFlow's resolver, which reads it, gets the cluster's value.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Optional

from worker_entry.hooks.calling_line import calling_line
from worker_entry.hooks.import_hooks import after_import

NAME = "TF_CONFIG"
_RESOLVER = "tensorflow.python.distribute.cluster_resolver.tfconfig_cluster_resolver"
_READER = "_load_tf_config"


def install(report: Callable[[str, bool], None], *, keep: bool) -> None:
    """Starts to watch the program's changes to TF_CONFIG, and what TensorFlow reads.

    Args:
        report: called once, when TensorFlow first reads a TF_CONFIG that the program has changed: with the line that
            set or removed it last, such as `train.py:12`, and with `keep`.
        keep: whether the program's own TF_CONFIG takes effect.
    """
    ours, process = os.environ[NAME], os.getpid()
    lines = _watch_lines(ours)
    reported = False

    def is_changed() -> bool:
        nonlocal reported
        if os.environ.get(NAME) == ours:
            return False
        if not reported:
            reported = True
            report(lines[-1] if lines else "an unknown line", keep)
        return True

    def patch(module: ModuleType) -> None:
        load: Optional[Callable[[], Any]] = getattr(module, _READER, None)
        if load is None:
            return

        @functools.wraps(load)
        def load_ours() -> Any:
            # A child that the program has forked gets what the program has set, like any other child.
            is_meant = os.getpid() == process and is_changed() and not keep
            return json.loads(ours) if is_meant else load()

        setattr(module, _READER, load_ours)

    after_import(_RESOLVER, patch)


def read() -> dict[str, Any]:
    """The TF_CONFIG that TensorFlow reads in this process; empty if there is none, or if it is invalid."""
    load = getattr(sys.modules.get(_RESOLVER), _READER, None)
    try:
        config = json.loads(os.environ.get(NAME) or "{}") if load is None else load()
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _watch_lines(ours: str) -> list[str]:
    """Returns a list to which each line that sets TF_CONFIG to another value, or removes it, is appended."""
    environ: type[Any] = type(os.environ)
    lines: list[str] = []

    class Watched(environ):  # type: ignore[misc]  # its base is only known at run time
        def __setitem__(self, name: Any, value: Any) -> None:
            super().__setitem__(name, value)
            if name == NAME and value != ours:
                lines.append(calling_line())

        def __delitem__(self, name: Any) -> None:
            super().__delitem__(name)
            if name == NAME:
                lines.append(calling_line())

    Watched.__name__, Watched.__qualname__ = environ.__name__, environ.__qualname__
    os.environ.__class__ = Watched
    return lines

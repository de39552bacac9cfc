"""Makes TensorFlow's workers as patient with each other as the launcher is with their nodes.

MultiWorkerMirroredStrategy ends a run when a peer has not been heard of for 10 s, and offers nobody to say otherwise. A
peer that dies is seen by its own node, at once; what is left is a network that was away for a moment.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from worker_entry.hooks.import_hooks import after_import

CONTEXT = "tensorflow.python.eager.context"
NAME = "heartbeat_timeout_in_ms"


def lengthen(seconds: float) -> None:
    """From now on, a heartbeat that nobody has set may take so long; a TensorFlow without one is left alone."""

    def patch(module: ModuleType) -> None:
        context = getattr(module, "Context", None)
        configure = getattr(context, "configure_coordination_service", None)
        code = getattr(configure, "__code__", None)
        if context is None or configure is None or code is None or NAME not in code.co_varnames[: code.co_argcount]:
            return

        @functools.wraps(configure)
        def configure_patiently(self: Any, *args: Any, **settings: Any) -> Any:
            if len(args) < code.co_varnames.index(NAME) and not settings.get(NAME):
                settings[NAME] = int(seconds * 1000)
            return configure(self, *args, **settings)

        context.configure_coordination_service = configure_patiently

    after_import(CONTEXT, patch)

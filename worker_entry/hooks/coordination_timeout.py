"""Makes TensorFlow's workers wait as long for each other as the launcher waits for their nodes.

MultiWorkerMirroredStrategy ends a run when a peer has sent no heartbeat for 10 s, and offers no option to change that.
The agent on the peer's node notices at once when the peer dies. The only other cause of a missing heartbeat is a short
network outage.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from worker_entry.hooks.import_hooks import after_import

CONTEXT = "tensorflow.python.eager.context"
NAME = "heartbeat_timeout_in_ms"


def lengthen(seconds: float) -> None:
    """Sets TensorFlow's heartbeat timeout unless the program sets one; does nothing if TensorFlow has none."""

    def patch(module: ModuleType) -> None:
        context = getattr(module, "Context", None)
        configure = getattr(context, "configure_coordination_service", None)
        code = getattr(configure, "__code__", None)
        if context is None or configure is None or code is None or NAME not in code.co_varnames[: code.co_argcount]:
            return

        @functools.wraps(configure)
        def configure_with_timeout(self: Any, *args: Any, **settings: Any) -> Any:
            if len(args) < code.co_varnames.index(NAME) and not settings.get(NAME):
                settings[NAME] = int(seconds * 1000)
            return configure(self, *args, **settings)

        context.configure_coordination_service = configure_with_timeout

    after_import(CONTEXT, patch)

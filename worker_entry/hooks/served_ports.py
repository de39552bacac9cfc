"""Makes the chief of ParameterServerStrategy wait until the servers of its cluster listen, before it connects to them.

While a server does not listen, the agent of its node resets connections to its port (`agent/port_guards.py`).
TensorFlow then tries again; but TensorFlow before 2.20 aborts the chief.
"""

from __future__ import annotations

import functools
import time
from types import ModuleType
from typing import Any

from worker_entry.hooks.import_hooks import after_import
from worker_entry.protocol.addresses import split_address

STRATEGY = "tensorflow.python.distribute.parameter_server_strategy_v2"
SILENCE_S = 1.0
"""How long a connection has to stay open, if the server sends nothing: a guard resets a connection at once."""
PAUSE_S = 0.05
"""The time between two connections to a port."""


def install() -> None:
    """Waits when the program builds the strategy, as TensorFlow waits: until the launcher's time-outs end the run."""
    after_import(STRATEGY, _patch)


def _patch(module: ModuleType) -> None:
    strategy = getattr(module, "ParameterServerStrategyV2", None)
    connect = getattr(strategy, "_connect_to_cluster", None)
    if strategy is None or connect is None:
        return

    @functools.wraps(connect)
    def connect_when_served(self: Any, *args: Any, **kwargs: Any) -> Any:
        jobs = self._cluster_resolver.cluster_spec().as_dict()
        for job in ("ps", "worker"):
            for address in jobs.get(job, ()):
                while not is_served(address):
                    time.sleep(PAUSE_S)
        return connect(self, *args, **kwargs)

    strategy._connect_to_cluster = connect_when_served


def is_served(address: str) -> bool:
    """Whether a server listens at `host:port`: it greets, or at least does not close the connection."""
    import socket  # only now: a program's own module of this name must not be hidden

    host, port = split_address(address)
    try:
        with socket.create_connection((host, int(port)), SILENCE_S) as connection:
            connection.settimeout(SILENCE_S)
            try:
                return connection.recv(1) != b""
            except socket.timeout:  # noqa: UP041 - Python 3.9 raises no TimeoutError here
                return True
    except OSError:
        return False

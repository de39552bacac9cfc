"""Connects JAX's processes as the launcher has placed them, when a program calls `jax.distributed.initialize()`.

JAX reads only the coordinator's address from its environment. What else a call leaves open, JAX takes from the first
environment that it knows: in a job of Slurm or MPI, from their variables, although the launcher has placed the
processes. So this module adds an environment of its own before them.

It also sets what JAX has no variables for. JAX's time-outs abort all processes with an error that names no cause; the
launcher's end the run with one, so JAX's are longer. Only the cluster reaches the coordinator; gloo listens at the
cluster's address.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Optional

from worker_entry.hooks.import_hooks import after_import
from worker_entry.protocol import environment
from worker_entry.protocol.addresses import split_address

CLUSTERS = "jax._src.clusters.cluster"
DISTRIBUTED = "jax._src.distributed"
MULTIHOST = "jax.experimental.multihost_utils"
NATIVE = ("jaxlib._jax", "jaxlib.xla_extension")
"""The module of JAX's C++ code, by its name now and before jaxlib 0.6."""
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
LONG_S = 604_800
"""JAX's time-outs for a start and an end, which the launcher limits."""
_LISTENS = "0A"
"""The state of a listening socket, as Linux shows it."""
_failures: list[bool] = []
"""An entry for each failure of the program that its process has noted."""


def is_here() -> bool:
    """Whether the launcher has made this process part of a cluster of JAX."""
    return all(_is_set(name) for name in (environment.JAX_COORDINATOR, environment.JAX_PROCESSES))


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name))


class Joining(NamedTuple):
    """`begin` is called when the program connects its process, `end` when all processes are connected."""

    begin: Callable[[], None]
    end: Callable[[], None]


UNNOTED = Joining(lambda: None, lambda: None)


def install(heartbeat_s: float, joining: Joining = UNNOTED) -> None:
    """Changes JAX when it is imported.

    Args:
        heartbeat_s: how long the processes wait for each other's heartbeats; 0: JAX's default.
        joining: called when the program connects its process.
    """
    coordinator = os.environ[environment.JAX_COORDINATOR]
    count, number = int(os.environ[environment.JAX_PROCESSES]), int(os.environ[environment.JAX_PROCESS])
    own = os.environ.get(environment.ADDRESS, "")
    after_import(CLUSTERS, lambda module: _add_environment(module, coordinator, count, number))
    after_import(DISTRIBUTED, lambda module: _patch_state(module, coordinator, heartbeat_s, joining))
    for name in NATIVE:
        after_import(name, lambda module: _patch_gloo(module, own))


def note_failure() -> None:
    """Notes that the program has failed, and that its process ends."""
    _failures.append(True)


def _has_failed() -> bool:
    # `last_value`: Python's name for the exception that ends a program; it stays unset if that is SystemExit.
    return bool(_failures) or getattr(sys, "last_value", None) is not None


def watch_preemption(then: Callable[[], None]) -> None:
    """Calls `then` when the program first asks JAX whether it is preempted: it then saves, and ends by itself."""

    def patch(module: ModuleType) -> None:
        asks = getattr(module, "reached_preemption_sync_point", None)
        if asks is None:
            return
        waits = [then]

        @functools.wraps(asks)
        def note_and_ask(*args: Any, **kwargs: Any) -> Any:
            if waits:
                waits.pop()()
            return asks(*args, **kwargs)

        module.__dict__["reached_preemption_sync_point"] = note_and_ask

    after_import(MULTIHOST, patch)


def is_connected() -> bool:
    """Whether the program has connected its process with `jax.distributed`."""
    state = getattr(sys.modules.get(DISTRIBUTED), "global_state", None)
    return getattr(state, "client", None) is not None


def _add_environment(module: ModuleType, coordinator: str, count: int, number: int) -> None:
    base: Any = getattr(module, "ClusterEnv", None)
    known: Any = getattr(base, "_cluster_types", None)
    if not isinstance(known, list):
        return

    class DistlaunchCluster(base):  # type: ignore[misc]  # its base is only known at run time
        name = "distlaunch"

        @classmethod
        def is_env_present(cls) -> bool:
            return True

        @classmethod
        def get_coordinator_address(cls, *_: Any, **__: Any) -> str:  # its parameters differ between versions
            return coordinator

        @classmethod
        def get_process_count(cls) -> int:
            return count

        @classmethod
        def get_process_id(cls) -> int:
            return number

        @classmethod
        def get_local_process_id(cls) -> Optional[int]:
            return None  # the process uses all devices that it sees

    known[:] = [DistlaunchCluster, *(each for each in known if each is not DistlaunchCluster)]


def _patch_state(module: ModuleType, coordinator: str, heartbeat_s: float, joining: Joining) -> None:
    state: Any = getattr(module, "State", None)
    initialize, shutdown = getattr(state, "initialize", None), getattr(state, "shutdown", None)
    if initialize is None or shutdown is None:
        return
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def initialize_as_placed(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        ours = {"initialization_timeout": LONG_S, "shutdown_timeout_seconds": LONG_S}
        if heartbeat_s:
            ours["heartbeat_timeout_seconds"] = max(1, round(heartbeat_s))
        for name, value in ours.items():
            parameter = signature.parameters.get(name)
            if parameter is not None and given.arguments[name] == parameter.default:
                given.arguments[name] = value
        is_free = given.arguments.get("coordinator_bind_address", "") is None and not _is_set(BIND)
        is_ours = given.arguments["coordinator_address"] in (None, coordinator)
        if is_free and is_ours and not _is_guarded(coordinator) and _is_of_machine(coordinator):
            given.arguments["coordinator_bind_address"] = coordinator
        joining.begin()
        initialize(*given.args, **given.kwargs)
        joining.end()

    @functools.wraps(shutdown)
    def shut_down_unless_failed(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The others wait for this process in a step, so it must not wait for them at its exit.
        if not _has_failed():
            return shutdown(self, *args, **kwargs)
        for part in (self.client, self.service):
            _keep_for_ever(part)
        return None

    state.initialize, state.shutdown = initialize_as_placed, shut_down_unless_failed


def _keep_for_ever(part: Any) -> None:
    """Keeps Python from destroying the object when it exits: a client aborts the process when its service is gone."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))


def _patch_gloo(module: ModuleType, own: str) -> None:
    """Lets gloo listen at the address by which the others know this process, instead of that of the host's name."""
    make = getattr(module, "make_gloo_tcp_collectives", None)
    if make is None or not own:
        return

    @functools.wraps(make)
    def make_here(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 and not {"hostname", "interface"} & kwargs.keys() and _is_of_machine(f"{own}:0"):
            kwargs["hostname"] = own
        return make(*args, **kwargs)

    module.__dict__["make_gloo_tcp_collectives"] = make_here


def _is_guarded(coordinator: str) -> bool:
    """Whether the agent listens at the port, and lets only the cluster reach a server that shares it with the agent.

    The server then has to listen at all addresses, as the agent does: Linux prefers a socket with a specific address.
    """
    port = f":{int(split_address(coordinator)[1]):04X}"
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as rows:
            if any(row[1].endswith(port) and row[3] == _LISTENS for row in map(str.split, rows)):
                return True
    return False


def _is_of_machine(address: str) -> bool:
    """Whether this machine has the address, which others may reach through a translation only.

    A name that leads to the loopback interface does not count: other machines know it for another address.
    """
    import socket  # only now: a program's own module of this name must not be hidden

    host, _ = split_address(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return not str(place[0]).startswith("127.") or host == place[0]

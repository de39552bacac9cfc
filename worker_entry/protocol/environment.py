"""The names of all environment variables that distlaunch sets or reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping

TF_CONFIG = "TF_CONFIG"
OWN_PREFIX = "DISTLAUNCH_"
"""Prefix of our own variables, which no library reads at import."""

RUN_ID = "DISTLAUNCH_RUN_ID"
TASK = "DISTLAUNCH_TASK"
ATTEMPT = "DISTLAUNCH_ATTEMPT"
STRATEGY = "DISTLAUNCH_STRATEGY"
DEVICES = "DISTLAUNCH_DEVICES"
COMMUNICATION = "DISTLAUNCH_COMMUNICATION"
CROSS_DEVICE = "DISTLAUNCH_CROSS_DEVICE"
LOG_DIR = "DISTLAUNCH_LOG_DIR"
CHECKPOINT_DIR = "DISTLAUNCH_CHECKPOINT_DIR"
ADDRESS = "DISTLAUNCH_ADDRESS"
OF_TASKS = (RUN_ID, TASK, ATTEMPT, STRATEGY, DEVICES, COMMUNICATION, CROSS_DEVICE, LOG_DIR, CHECKPOINT_DIR, ADDRESS)
"""Variables that users' programs may read."""

JAX_COORDINATOR = "JAX_COORDINATOR_ADDRESS"
JAX_PROCESSES = "JAX_NUM_PROCESSES"
JAX_PROCESS = "JAX_PROCESS_ID"
JAX_DEVICES = "JAX_LOCAL_DEVICE_IDS"
OF_JAX = (JAX_COORDINATOR, JAX_PROCESSES, JAX_PROCESS, JAX_DEVICES)
"""Variables that connect JAX's processes; JAX itself reads the first and the last."""

WEBHOOK = "DISTLAUNCH_WEBHOOK"
"""Where `distlaunch resume` finds the URL of the spec's webhook: the run's files do not contain the URL."""
RUN = "DISTLAUNCH_RUN"
RUN_NAME = "DISTLAUNCH_RUN_NAME"
EVENT = "DISTLAUNCH_EVENT"
REFERENCE = "DISTLAUNCH_REFERENCE"
MESSAGE = "DISTLAUNCH_MESSAGE"
DIRECTORY = "DISTLAUNCH_DIRECTORY"
OF_NOTIFICATIONS = (EVENT, RUN, RUN_NAME, ATTEMPT, REFERENCE, MESSAGE, TASK, DIRECTORY)
"""Variables that the command of `notify` may read. It gets the run's id in RUN, not RUN_ID: every process with RUN_ID
counts as a process of the run."""

RESTARTS = "DISTLAUNCH_RESTARTS"
"""How often Kubernetes has restarted the cluster; the first process of a pod derives ATTEMPT from it."""
CACHE = "DISTLAUNCH_CACHE"
"""The folder of compile caches; a node's agent derives the libraries' variables from it."""
CHILDREN = "DISTLAUNCH_CHILDREN"
"""The order for the Python processes that a task starts; `children` reads it."""
TRACE = "DISTLAUNCH_TRACE"
"""The folder of the record of training that `test-resume` compares, relative to the working directory."""
TRACE_STEPS = "DISTLAUNCH_TRACE_STEPS"
"""The step after which a recorded `fit` ends."""
ROOM = "DISTLAUNCH_ROOM"
"""Padding after RUN_ID in the forkserver's environment, so that a longer run id can overwrite RUN_ID in /proc."""
ROOM_LENGTH = 128
CLOCK = "DISTLAUNCH_CLOCK"
"""The offset of `system.clock` in this run on this machine; our own processes inherit it."""
OWNER_NAME = "DISTLAUNCH_OWNER_NAME"
OWNER_UID = "DISTLAUNCH_OWNER_UID"
"""The Kubernetes job in which distlaunch runs; it owns the created objects, so they are deleted with the job."""
SLURM_STEPS = "DISTLAUNCH_SLURM_STEPS"
"""The largest number of nodes of a Slurm job that get a step each; set by tests."""
PORTABLE = "DISTLAUNCH_PORTABLE"
"""If set, only portable calls are used, even on Linux: for tests of the fall-backs."""

DEFAULTS = (
    *("TF_CPP_MIN_LOG_LEVEL", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
    *("KERAS_BACKEND", "JAX_NUM_CPU_DEVICES"),
)
"""Variables that distlaunch sets by default; a value in the user's shell, or in the node's environment, wins."""

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables from which gRPC takes a proxy, in gRPC's order of precedence."""


def merge(
    environ: Mapping[str, str], env: Mapping[str, str], unset: Collection[str], defaults: Collection[str]
) -> dict[str, str]:
    """Merges `env` over `environ` without the names in `unset`; names in `defaults` keep their value in `environ`."""
    merged = {name: value for name, value in environ.items() if name not in unset}
    return merged | {name: value for name, value in env.items() if name not in defaults or name not in merged}

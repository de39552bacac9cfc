"""The names of all environment variables that distlaunch sets or reads."""

from __future__ import annotations

TF_CONFIG = "TF_CONFIG"
OWN_PREFIX = "DISTLAUNCH_"
"""Prefix of our own variables; no library reads one when it is imported."""

RUN_ID = "DISTLAUNCH_RUN_ID"
TASK = "DISTLAUNCH_TASK"
ATTEMPT = "DISTLAUNCH_ATTEMPT"
STRATEGY = "DISTLAUNCH_STRATEGY"
DEVICES = "DISTLAUNCH_DEVICES"
COMMUNICATION = "DISTLAUNCH_COMMUNICATION"
CROSS_DEVICE = "DISTLAUNCH_CROSS_DEVICE"
LOG_DIR = "DISTLAUNCH_LOG_DIR"
CHECKPOINT_DIR = "DISTLAUNCH_CHECKPOINT_DIR"
OF_TASKS = (RUN_ID, TASK, ATTEMPT, STRATEGY, DEVICES, COMMUNICATION, CROSS_DEVICE, LOG_DIR, CHECKPOINT_DIR)
"""Variables that users' programs may read."""

WEBHOOK = "DISTLAUNCH_WEBHOOK"
"""From it, `distlaunch resume` takes the URL of a webhook that the spec itself has: the run's files do not have it."""
RUN = "DISTLAUNCH_RUN"
RUN_NAME = "DISTLAUNCH_RUN_NAME"
HAPPENING = "DISTLAUNCH_HAPPENING"
REFERENCE = "DISTLAUNCH_REFERENCE"
MESSAGE = "DISTLAUNCH_MESSAGE"
DIRECTORY = "DISTLAUNCH_DIRECTORY"
OF_NOTIFICATIONS = (HAPPENING, RUN, RUN_NAME, ATTEMPT, REFERENCE, MESSAGE, TASK, DIRECTORY)
"""Variables that the command of `notify` may read. The run's id has another name than for tasks: what has that one is
a process of the run."""

RESTARTS = "DISTLAUNCH_RESTARTS"
"""How often Kubernetes has restarted the cluster; from it, the first process of a pod makes ATTEMPT."""
CACHE = "DISTLAUNCH_CACHE"
"""The folder of compile caches; a node's agent makes the variables of the libraries from it."""
CHILDREN = "DISTLAUNCH_CHILDREN"
"""The order for Python processes that a task starts; `children` reads it."""
ROOM = "DISTLAUNCH_ROOM"
"""Behind RUN_ID in the forkserver's environment: /proc can show another run's id there."""
ROOM_LENGTH = 128
CLOCK = "DISTLAUNCH_CLOCK"
"""The machine's clock when the run began; our own processes inherit it."""
OWNER_NAME = "DISTLAUNCH_OWNER_NAME"
OWNER_UID = "DISTLAUNCH_OWNER_UID"
"""The job of Kubernetes in which distlaunch runs, by which what it makes is deleted with that job."""
SLURM_STEPS = "DISTLAUNCH_SLURM_STEPS"
"""How many nodes of a Slurm job have a step of their own; set by tests."""
PORTABLE = "DISTLAUNCH_PORTABLE"
"""If set, Linux is used like any other system: for tests of the portable fall-backs."""

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables from which gRPC takes a proxy, the strongest first."""

"""The names of all environment variables that distlaunch sets or reads, once."""

from __future__ import annotations

TF_CONFIG = "TF_CONFIG"
OWN_PREFIX = "DISTLAUNCH_"
"""How the names of our own variables begin; no import of a library reads one."""

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
"""What programs may read."""

CHILDREN = "DISTLAUNCH_CHILDREN"
"""What the Pythons do that a task starts; `children` reads it."""
CLOCK = "DISTLAUNCH_CLOCK"
"""The machine's clock when the run began; our own processes inherit it."""
PORTABLE = "DISTLAUNCH_PORTABLE"
"""Set, Linux is used like any other system: for tests of the portable fall-backs."""

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""What gRPC takes a proxy from."""

"""Process 1 of a pod: keeps the pod alive for the agents that are started in it, and exits once nothing else runs.

The pod gets only this module's text: `python3 -c TEXT FIRST_S IDLE_S`. It exits with status 0 if no other process has
run for `IDLE_S` seconds, or for `FIRST_S` from the start: the controller is gone then. After SIGTERM it waits for the
other processes, which may be saving, and exits with 143, so that Kubernetes makes another pod.
"""

from __future__ import annotations

import os
import signal
import sys
import time

POLL_S = 2.0
HURRIED_POLL_S = 0.05


def has_others() -> bool:
    """Whether any other process lives in the pod."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(os.path.join("/proc", name, "stat"), "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] != b"Z":
                    return True
        except OSError:
            continue
    return False


def keep(first_s: float, idle_s: float) -> int:
    """Waits; returns the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # otherwise the kernel drops it for process 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
    last, limit_s, asked = time.monotonic(), first_s, False
    while True:
        if has_others():
            last, limit_s = time.monotonic(), idle_s
        elif asked:
            return 143
        elif time.monotonic() - last > limit_s:
            return 0
        taken = signal.sigtimedwait([signal.SIGTERM], HURRIED_POLL_S if asked else POLL_S)
        asked = asked or taken is not None


if __name__ == "__main__":
    sys.exit(keep(float(sys.argv[1]), float(sys.argv[2])))

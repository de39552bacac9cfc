"""Real runs that fail, in each way."""

from __future__ import annotations

from tests.harness.places import PROGRAMS

FAIL = str(PROGRAMS / "fail_in_training.py")
KEY_ERROR = "KeyError: 'bad sample 20'"
WAYS = {
    "kill": ("task-killed", "was killed by SIGKILL (signal 9) after"),
    "segfault": ("task-killed", "was killed by SIGSEGV (signal 11"),
    "os-exit": ("task-failed", "exited with status 5 after"),
    "raise": ("task-failed", KEY_ERROR),
    "raise-in-map": ("task-failed", KEY_ERROR),
    "raise-in-thread": ("task-failed", f"{KEY_ERROR} (in the thread loader)"),
    "raise-early": ("task-failed", "KeyError: 'bad sample 0'"),
    "exit-text": ("task-failed", "sys.exit('the data ran out')"),
    "exit-0": ("ended-early", "ended with status 0 after"),
}

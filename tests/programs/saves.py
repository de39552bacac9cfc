"""Does ten steps a second, and saves every tenth; after a saved step, it does 20 more steps at most.

Saves on SIGTERM, which takes SAVE_S; if SAVE_S is negative, it ignores SIGTERM.

saves.py STEPS [SAVE_S [STATUS]]: exits with STATUS after a save on SIGTERM.
"""

import os
import signal
import sys
import time
from pathlib import Path

from worker_entry import progress

steps = int(sys.argv[1])
SAVE_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0.5
STATUS = int(sys.argv[3]) if len(sys.argv) > 3 else 143
name = os.environ["DISTLAUNCH_TASK"].replace(":", "-")
saved = Path(os.environ["DISTLAUNCH_CHECKPOINT_DIR"], name)


def save(step: int) -> None:
    temporary = saved.with_suffix(".new")
    temporary.write_text(str(step))
    temporary.replace(saved)


def end(signum: int, frame: object) -> None:
    print(f"got {signal.Signals(signum).name}", flush=True)
    if SAVE_S < 0:  # does not react
        return
    begun = time.monotonic()
    while time.monotonic() - begun < SAVE_S:
        time.sleep(0.05)
    save(step)
    print(f"saved {step} for the end", flush=True)
    os._exit(STATUS)


first = int(saved.read_text()) if saved.exists() else 0
steps = min(steps, first + 20) if first else steps
print(f"begins at {first}", flush=True)
step = first
signal.signal(signal.SIGTERM, end)
for step in range(first + 1, steps + 1):
    time.sleep(0.1)
    progress.report(step)
    if step % 10 == 0:
        save(step)
print(f"ends at {step}", flush=True)

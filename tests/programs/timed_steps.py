"""60 steps, with a checkpoint after every tenth; prints the time of each. The first attempt fails after step 37."""

import os
import time
from pathlib import Path

from worker_entry import progress

saved = Path(os.environ["DISTLAUNCH_CHECKPOINT_DIR"], "step")
begun = int(saved.read_text()) if saved.exists() else 0
for step in range(begun + 1, 61):
    time.sleep(0.06)
    if step % 10 == 0:
        saved.write_text(str(step))
    progress.report(step=step, total_steps=60)
    print(f"step {step} {time.time():.4f}", flush=True)
    if step == 37 and not begun:
        raise ValueError("on purpose")
print(f"end {time.time():.4f}", flush=True)

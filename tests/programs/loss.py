"""Trains nothing and reports it: STEPS [SECONDS] [what worker:1 does at half of the steps of attempt 1: fail, or hold].

Prints hostile text, reports a loss and images per second, and saves a checkpoint now and then. Needs no TensorFlow.
"""

import os
import sys
import time
from pathlib import Path

from worker_entry import progress

steps, seconds, what = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
task, attempt = os.environ["DISTLAUNCH_TASK"], int(os.environ["DISTLAUNCH_ATTEMPT"])
checkpoints = Path(os.environ["DISTLAUNCH_CHECKPOINT_DIR"])
first = steps // 4 if attempt > 1 else 0

print("</script><img src=x onerror=alert(1)> \x1b[31mred\x1b[0m \x00 \u202edesrever", flush=True)
for step in range(first + 1, steps + 1):
    time.sleep(seconds)
    progress.report(step=step, epoch=1 + step * 4 // steps, loss=10 / step, images_per_s=32 / max(seconds, 0.001))
    if step % 20 == 0:
        print(f"step {step}", flush=True)
    if step == steps // 4 and task == "worker:0":
        (checkpoints / f"ckpt-{step}").write_text("saved")
    if attempt == 1 and task == "worker:1" and step == steps // 2:
        if what == "fail":
            raise ValueError("batch <b>20</b> has no label")
        if what == "hold":
            while True:
                time.sleep(60)
print("done", flush=True)

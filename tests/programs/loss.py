"""Reports progress without training: STEPS SECONDS [fail].

Prints hostile text, reports a loss and images per second, and saves a checkpoint; with `fail`, worker:1 fails in the
middle of the first attempt. Needs no TensorFlow.
"""

import os
import sys
import time
from pathlib import Path

from worker_entry import progress

steps, seconds, fails = int(sys.argv[1]), float(sys.argv[2]), "fail" in sys.argv
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
    if fails and attempt == 1 and task == "worker:1" and step == steps // 2:
        raise ValueError("batch <b>20</b> has no label")
print("done", flush=True)

"""Prints its attempt; in attempts before N, the named tasks exit with STATUS: N TASKS STATUS."""

import os
import sys
import time

attempt = int(os.environ["DISTLAUNCH_ATTEMPT"])
good, culprits, status = int(sys.argv[1]), sys.argv[2].split(), int(sys.argv[3])
checkpoints = os.environ.get("DISTLAUNCH_CHECKPOINT_DIR")
print(f"attempt {attempt} of {os.environ['DISTLAUNCH_RUN_ID']}, checkpoints in {checkpoints}", flush=True)
time.sleep(0.3)
if attempt < good and os.environ["DISTLAUNCH_TASK"] in culprits:
    sys.exit(status)
time.sleep(0.5)

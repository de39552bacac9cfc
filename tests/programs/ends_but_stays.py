"""Ends in a way (`raises` or `returns`), but its process stays in an exit handler: WAY TASK; others wait."""

import atexit
import os
import sys
import time

way, task = sys.argv[1:]
if os.environ["DISTLAUNCH_TASK"] != task:
    time.sleep(600 if way != "returns" else 0)
    sys.exit(0)
atexit.register(time.sleep, 600)
print("ends now", flush=True)
if way == "raises":
    raise ValueError("row 3 has 7 columns, not 8")

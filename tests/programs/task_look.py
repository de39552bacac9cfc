"""Prints a task's view of itself as one line of JSON, then exits with its first argument as the status, or with 0."""

import json
import os
import sys

descriptors = {}
for name in os.listdir("/proc/self/fd"):
    try:
        descriptors[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # the descriptor that listed the folder
        continue
print(
    json.dumps(
        {
            "pid": os.getpid(),
            "session": os.getsid(0),
            "group": os.getpgrp(),
            "descriptors": descriptors,
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "argv": sys.argv[1:],
        }
    ),
    flush=True,
)
sys.exit(int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 0)

"""Prints, as one line of JSON, what a task can see of itself, then ends with the status it is told, or with 0."""

import json
import os
import sys

descriptors = {}
for name in os.listdir("/proc/self/fd"):
    try:
        descriptors[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # the one that this listing used
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

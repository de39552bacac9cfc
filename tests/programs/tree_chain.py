"""A chain of processes: each forks its successor and exits; with `setsid`, each runs in its own session.

It ends by itself after a while, so that a failed test does not leave it loading the machine for ever.
"""

import os
import sys
import time

END = time.monotonic() + 20

while time.monotonic() < END:
    if os.fork() != 0:
        os._exit(0)
    if "setsid" in sys.argv:
        os.setsid()

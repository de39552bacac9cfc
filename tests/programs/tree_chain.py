"""Never the same process for long: each forks its successor and exits; with `setsid`, each in a session of its own.

It ends by itself in the end: what a failed test leaves running must not load the machine for ever.
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

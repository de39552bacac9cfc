"""Prints files unchanged: the content of DIR/worker-0.1, then of DIR/worker-0.2, and so on.

`chatty_puppet.py DIR`; each file must appear complete. DIR/end ends the program.
"""

import itertools
import os
import pathlib
import sys
import time

directory = pathlib.Path(sys.argv[1])
task = os.environ["DISTLAUNCH_TASK"].replace(":", "-")

for number in itertools.count(1):
    order = directory / f"{task}.{number}"
    while not order.exists():
        if (directory / "end").exists():
            sys.exit()
        time.sleep(0.01)
    sys.stdout.buffer.write(order.read_bytes())
    sys.stdout.flush()

"""The named task raises; every other task waits to be stopped."""

import os
import sys
import time


def load_batch(size: int) -> None:
    raise ValueError(f"no batch of {size}")


if os.environ["DISTLAUNCH_TASK"] == sys.argv[1]:
    print("about to fail")
    load_batch(32)
time.sleep(600)

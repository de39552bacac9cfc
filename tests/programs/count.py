"""Prints a numbered line every few milliseconds for SECONDS, then a last line: `count.py SECONDS`."""

import itertools
import sys
import time

ends = time.monotonic() + float(sys.argv[1])
for number in itertools.count():
    print(f"line {number} {'x' * (number % 200)}", flush=True)
    if time.monotonic() > ends:
        break
    time.sleep(0.002)
print("the last line", flush=True)

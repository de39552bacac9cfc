"""Prints COUNT numbered lines as fast as it can, and half way one line on stderr: `chatty_lines.py COUNT`."""

import sys

count = int(sys.argv[1])
for start in range(0, count, 1000):
    sys.stdout.write("".join(f"line {number}\n" for number in range(start, min(start + 1000, count))))
    if start == 1000 * (count // 2000):
        sys.stdout.flush()
        sys.stderr.write("half of it\n")
        sys.stderr.flush()

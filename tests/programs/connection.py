"""Connects to a node: runs the command that follows, and connects it to this process's stdin and stdout by pipes.

The command outlives this process, as it would on another machine.
"""

import os
import subprocess
import sys
import threading

process = subprocess.Popen(
    sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
)
assert process.stdin is not None
assert process.stdout is not None


def send() -> None:
    while data := os.read(0, 1 << 16):
        process.stdin.write(data)  # type: ignore[union-attr]  # as above
    process.stdin.close()  # type: ignore[union-attr]  # as above


threading.Thread(target=send, daemon=True).start()
while data := process.stdout.read(1 << 16):
    os.write(1, data)
sys.exit(process.wait())

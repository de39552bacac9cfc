"""A task that echoes on its port of TF_CONFIG, sends a word to each other task, reads the echo, and prints the result.

usage: meet.py WORD [SECONDS]: sends the word again and again for SECONDS.
"""

import json
import os
import socket
import sys
import threading
import time

config = json.loads(os.environ["TF_CONFIG"])
addresses = [address.rpartition(":") for group in config["cluster"].values() for address in group]
task = config["task"]
me = config["cluster"][task["type"]][task["index"]]
word, until = sys.argv[1].encode(), time.monotonic() + float(sys.argv[2] if len(sys.argv) > 2 else 0)


def echo(call: socket.socket) -> None:
    with call:
        while heard := call.recv(1 << 16):
            call.sendall(heard)


def serve(server: socket.socket) -> None:
    while True:
        threading.Thread(target=echo, args=[server.accept()[0]], daemon=True).start()


def meet(host: str, port: int) -> None:
    while True:
        try:
            with socket.create_connection((host, port), timeout=10) as call:
                while True:
                    call.sendall(word)
                    heard = b""
                    while len(heard) < len(word):
                        piece = call.recv(1 << 16)
                        if not piece:
                            raise ConnectionError("ended")
                        heard += piece
                    if heard != word:
                        sys.exit(f"heard {heard[:80]!r}")
                    if time.monotonic() > until:
                        return
                    time.sleep(0.05)
        except OSError:
            time.sleep(0.05)


server = socket.create_server(
    ("", int(me.rpartition(":")[2])), family=socket.AF_INET6, reuse_port=True, dualstack_ipv6=True
)
threading.Thread(target=serve, args=[server], daemon=True).start()
others = [(host.strip("[]"), int(port)) for host, _, port in addresses if f"{host}:{port}" != me]
for other in others:
    meet(*other)
print(f"met {len(others)} at {' '.join(sorted({host for host, _ in others}))}", flush=True)
time.sleep(1)  # the others may not have met this task yet

"""Tries ports of a host again and again until its stdin ends; prints the ports that answered in HTTP/2.

usage: scan.py HOST FIRST LAST
"""

import json
import select
import socket
import sys

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes from an HTTP/2 client."""
SETTINGS = b"\4"
"""The type of the frame with which a server answers."""

host, ports = sys.argv[1], range(int(sys.argv[2]), int(sys.argv[3]) + 1)
tries = connected = 0
answered: set[int] = set()
print("scanning", flush=True)
while not select.select([sys.stdin], [], [], 0.005)[0]:
    for port in ports:
        tries += 1
        try:
            with socket.create_connection((host, port), timeout=0.1) as caller:
                connected += 1
                caller.sendall(HELLO)
                if caller.recv(100)[3:4] == SETTINGS:
                    answered.add(port)
        except OSError:
            continue
print(json.dumps({"tries": tries, "connected": connected, "answered": sorted(answered)}))

"""Connects an agent to its controller when one step of a Slurm job has started the agents of all nodes.

All agents get the same bytes on stdin: this module's text, the controller's addresses, and a secret. Each calls the
controller, both sides prove that they know the secret, and the connection replaces stdin and stdout. It also carries
`install` and the archive, which other agents get on stdin: srun would need a minute to send them to many nodes.

The node's Python reads this module from stdin before distlaunch is installed, so it imports no other module of ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

CALL_S = 20.0
"""How long an answer may take."""
PAUSE_S = 2.0
"""The longest pause between two tries."""
FAILED = "the agent cannot reach its controller"
"""An agent's error message, after its node's name."""
CONNECT_S = 5.0
"""How long a connection to one address may take."""
LINE_LIMIT = 1 << 16
"""Bytes of a line, with its end."""
CONTROLLER, AGENT = "controller", "agent"
"""The sides, as their proofs name them."""


def main() -> None:
    # The bootstrap installs what follows it, as if it had come first on stdin.
    exec(compile(call_back(), "bootstrap", "exec"), {"__name__": "__main__"})  # noqa: S102 - it is ours


def call_back() -> bytes:
    """Connects stdin and stdout to the controller whose addresses are on stdin; returns the bootstrap's text."""
    try:
        order = json.loads(read_line(lambda: os.read(0, 1)))
        # srun is on the controller's machine, and listens at an address that the nodes can reach.
        known = os.environ.get("SLURM_SRUN_COMM_HOST", "")
        addresses = [*([known] if known else []), *order["addresses"]]
        with contextlib.closing(_call(addresses, order["port"], order["secret"], order["within_s"])) as connection:
            bootstrap = _receive(connection, receive_line(connection)["bootstrap"])
            connection.settimeout(None)
            os.dup2(connection.fileno(), 0)
            os.dup2(connection.fileno(), 1)
            return bootstrap
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{os.environ.get('SLURMD_NODENAME', 'a node')}: {FAILED}: {error}")


def _call(addresses: list[str], port: int, secret: str, within_s: float) -> socket.socket:
    """Connects to the controller; tries again until it answers, because it is busy while hundreds of nodes call."""
    until = time.monotonic() + within_s
    while True:
        try:
            connection = _connect(addresses, port)
            try:
                _introduce(connection, secret)
            except BaseException:
                connection.close()
                raise
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(random.uniform(0.5, 1.0) * PAUSE_S)  # noqa: S311 - only spreads the tries
        else:
            return connection


def _connect(addresses: list[str], port: int) -> socket.socket:
    problems = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), CONNECT_S)
        except OSError as error:
            problems.append(f"{address}: {error.strerror or error}")
        else:
            connection.settimeout(CALL_S)
            return connection
    raise OSError("; ".join(problems))


def _introduce(connection: socket.socket, secret: str) -> None:
    """Raises ValueError if the other side does not know the secret."""
    name, own = os.environ["SLURMD_NODENAME"], secrets.token_hex(16)
    other = str(receive_line(connection)["nonce"])
    send_line(connection, {"node": name, "nonce": own, "proof": prove(secret, AGENT, name, own, other)})
    if not hmac.compare_digest(str(receive_line(connection)["proof"]), prove(secret, CONTROLLER, name, own, other)):
        raise ValueError("the answer does not come from the controller")


def prove(secret: str, side: str, node: str, of_agent: str, of_controller: str) -> str:
    """The proof that one side knows the secret, for these two random texts."""
    text = "\n".join((side, node, of_agent, of_controller)).encode()
    return hmac.new(bytes.fromhex(secret), text, hashlib.sha256).hexdigest()


def send_line(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive_line(connection: socket.socket) -> dict[str, Any]:
    """Reads the next line, and no byte more; returns its JSON object, or an empty one for any other value.

    Raises:
        OSError: the connection has ended, or no answer came.
        ValueError: the line is not JSON.
    """
    message = json.loads(read_line(lambda: _receive_of_line(connection)))
    return message if isinstance(message, dict) else {}


def read_line(read: Callable[[], bytes]) -> bytes:
    """The bytes up to a line break; `read` returns some of them, at least one."""
    line = b""
    while not line.endswith(b"\n"):
        piece = read()
        if not piece or len(line) + len(piece) > LINE_LIMIT:
            raise OSError("the connection has ended")
        line += piece
    return line


def _receive_of_line(connection: socket.socket) -> bytes:
    """As much of the next line as has arrived; what follows the line stays in the socket."""
    seen = connection.recv(LINE_LIMIT, socket.MSG_PEEK)
    return _receive(connection, seen.find(b"\n") + 1 or len(seen))


def _receive(connection: socket.socket, length: int) -> bytes:
    """Exactly `length` bytes; raises OSError if the connection ends before that."""
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise OSError("the connection has ended")
        data += piece
    return data


if __name__ == "__main__":
    main()

"""The processes that answer other nodes while those measure their links to this one."""

from __future__ import annotations

import os
import socket

from worker_entry.system import processes

AT_ONCE = 4
"""Only one node measures this one at a time, but earlier processes may still be ending."""


class LinkServers:
    """Children of the agent; `pids` contains them."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def begin(self, connection: socket.socket, mode: str) -> None:
        """Serves the connection in a child; the caller closes its own end of it."""
        if len(self.pids) >= AT_ONCE:
            return
        try:
            pid = os.fork()
        except OSError:  # no more processes: the caller is told that nobody measures
            return
        if pid:
            self.pids.add(pid)
            return
        try:
            os.dup2(connection.detach(), 0)
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            processes.become_independent()
            from worker_entry.agent.checks.link_speed import serve_link

            serve_link(socket.socket(fileno=0), mode)
        finally:
            os._exit(0)

    def end(self) -> None:
        """Kills the children and waits until they are gone."""
        processes.end_children(self.pids)

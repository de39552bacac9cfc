"""What each thread of a process waits for, from /proc; Linux on x86-64 and ARM64 only."""

from __future__ import annotations

import enum
import os
from typing import Optional

from worker_entry.protocol.frozen import dataclass
from worker_entry.system.process_use import read_small


class Wait(enum.Enum):
    NOTHING = "it runs, or is about to"
    LOCK = "a lock, as long as it takes"
    TIMED_LOCK = "a lock, with a time limit"
    EVENTS = "events of any of several files"
    TIME = "a time"
    OTHER = "something else: a file, a connection, a child"


_CALLS = {
    "x86_64": {202: Wait.LOCK, 232: Wait.EVENTS, 281: Wait.EVENTS, 441: Wait.EVENTS, 35: Wait.TIME, 230: Wait.TIME},
    "aarch64": {98: Wait.LOCK, 22: Wait.EVENTS, 441: Wait.EVENTS, 101: Wait.TIME, 115: Wait.TIME},
}
"""The numbers of the system calls futex, epoll_wait, epoll_pwait, epoll_pwait2, nanosleep and clock_nanosleep."""
_TIMEOUT = 4
"""The word of a thread's line that has the time limit of futex."""


@dataclass(frozen=True)
class ThreadWait:
    """What a thread waits for; `stack_pointer`: where its stack ends now, None while it runs."""

    wait: Wait
    stack_pointer: Optional[int] = None


def read_waits(pid: int) -> dict[int, ThreadWait]:
    """The waits of a process's threads, by their ids; empty if they are unknown."""
    calls = _CALLS.get(os.uname().machine)
    if calls is None:
        return {}
    found = {}
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                found[int(thread)] = _parse(read_small(f"/proc/{pid}/task/{thread}/syscall").split(), calls)
            except FileNotFoundError:  # the thread has ended
                continue
    except (OSError, ValueError):  # the kernel does not say, or not to us
        return {}
    return found


def _parse(words: list[bytes], calls: dict[int, Wait]) -> ThreadWait:
    """proc(5): `running`, or the number of the system call (-1: none), its arguments, and two registers."""
    if words == [b"running"]:
        return ThreadWait(Wait.NOTHING)
    wait = calls.get(int(words[0]), Wait.OTHER)
    if wait is Wait.LOCK and int(words[_TIMEOUT], 16):
        wait = Wait.TIMED_LOCK
    return ThreadWait(wait, int(words[-2], 16))

"""Overwrites a variable where other processes see it: in the memory that /proc shows as this process's environment.

That memory holds the environment with which the process was started. Neither `os.environ` nor a fork changes it, so
a forked task would show the variables of its parent.
"""

from __future__ import annotations

import ctypes
from typing import Optional

from worker_entry.system import kernel

ENV_START = 50
"""The field of /proc/PID/stat with the address of the environment, counted from 1; see proc(5)."""


def overwrite(name: str, value: Optional[str] = None, *, room: str = "") -> bool:
    """Replaces the variable's value, or blanks it with dashes for None; returns whether the new value fits.

    Args:
        name: the variable.
        value: its new value.
        room: the next variable in memory, whose value may be shortened or lengthened.
    """
    try:
        with open("/proc/self/environ", "rb") as stream:
            block = stream.read()
        with open("/proc/self/stat", "rb") as stream:
            # The second field, the program's name, may contain spaces.
            start = int(stream.read().rpartition(b")")[2].split()[ENV_START - 3])
    except (OSError, ValueError, IndexError):
        return False
    entries = block.split(b"\0")
    names = [entry.partition(b"=")[0].decode(errors="replace") for entry in entries]
    if not kernel.LINUX or name not in names:
        return False
    index = names.index(name)
    old = [entries[index]]
    if value is None:
        value = "-" * (len(old[0]) - len(name) - 1)
    if room and names[index + 1 : index + 2] == [room]:
        old.append(entries[index + 1])
    new = f"{name}={value}".encode()
    spare = len(b"\0".join(old)) - len(new)
    if spare:
        head = f"\0{room}=".encode()
        if len(old) == 1 or spare < len(head):
            return False
        new += head + b"-" * (spare - len(head))
    offset = sum(len(entry) + 1 for entry in entries[:index])
    ctypes.memmove(start + offset, new, len(new))
    return True

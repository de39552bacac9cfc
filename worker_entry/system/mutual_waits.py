"""Finds the tasks that only another task can wake.

A task that waits in a collective or for a lock may go on by itself: a download arrives, a timer fires, a child process
or a device finishes, a disk answers. A task for which all of this is excluded waits for another task, or for ever. If
this is true of all tasks of a cluster, none of them will ever go on.

Each thread that runs Python has to wait for a lock without a time limit, in a place where Python or TensorFlow is known
to wait for other threads. Elsewhere, a library may wait in the same way for something that is not seen here: TensorFlow
waits for up to a minute when it drops an iterator. Threads of libraries wait for each other and for connections.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Optional

from worker_entry.system import connections, kernel
from worker_entry.system.thread_waits import ThreadWait, Wait, read_waits

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/vfio/")
"""Devices that compute: a step may take as long as it likes there."""
_LIBRARY_WAITS = (Wait.NOTHING, Wait.LOCK, Wait.TIMED_LOCK, Wait.EVENTS, Wait.TIME)
"""What threads without Python may do: those of gRPC and tf.data wake up from time to time, in a hang as well. Whether
they work is measured."""
_SHOWN = 100
"""The most threads that faulthandler shows: the others are not known."""
_STACK = 1 << 20
"""Bytes; no waiting thread uses more of its stack."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]{1,16})\b.*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d{1,9}) in (.*)$', re.MULTILINE)
_OURS = re.compile(r"/worker_entry/(?!demo/)(?:\w+/)*\w+\.py$")
_BELOW = "/threading.py"
"""Where every thread of Python begins."""
_POOL = "/multiprocessing/pool.py"
_LOCKS = ("/threading.py", "/queue.py", "/concurrent/futures/thread.py", _POOL)
"""Modules of the standard library whose functions wait for other threads."""
_EXECUTES = (
    ("/tensorflow/python/eager/execute.py", "quick_execute"),
    ("/tensorflow/python/eager/context.py", "call_function"),
    ("/tensorflow/python/ops/gen_dataset_ops.py", "iterator_get_next"),
    ("/tensorflow/python/ops/gen_dataset_ops.py", "iterator_get_next_as_optional"),
)
"""Functions that wait for operations of TensorFlow, among them collectives."""
_COLLECTIVES = "/tensorflow/python/ops/gen_collective_ops.py"
_LOCKING = re.compile(r"\bwith\b|\bacquire\(")
"""A line of a program on which it waits for a lock itself."""
_Frame = tuple[str, int, str]


def find_waiting(texts: Mapping[int, str], ports: Collection[int]) -> set[int]:
    """The processes that only other tasks can wake.

    Args:
        texts: the stacks of the tasks of this machine, as faulthandler has just written them, by pid.
        ports: the ports of all tasks of the cluster.
    """
    files = {pid: set(kernel.open_files(pid).values()) for pid in texts}
    sockets = {pid: connections.find_sockets(names) for pid, names in files.items()}
    everyone = set().union(*sockets.values())
    found = set()
    for pid, text in texts.items():
        known = connections.read_connections(pid)
        if known is None or connections.leads_outside(sockets[pid], everyone, known, ports):
            continue
        if not any(name.startswith(DEVICES) for name in files[pid]) and _waits_for_threads(pid, text):
            found.add(pid)
    return found


def _waits_for_threads(pid: int, text: str) -> bool:
    """Whether all threads of a process wait for others, as far as its stacks and the kernel show."""
    parts = _THREAD.split(text)
    threads = [(int(ident, 16), _parse(frames)) for ident, frames in zip(parts[1::2], parts[2::2])]  # noqa: B905 - Python 3.9 has no `strict`
    waits = read_waits(pid)
    main = waits.get(pid)
    if not 0 < len(threads) < _SHOWN or main is None:
        return False
    *others, (_, main_frames) = threads  # the newest thread is first
    if main.wait is not Wait.LOCK or not _is_known(main_frames):
        return False
    libraries = {thread: wait for thread, wait in waits.items() if thread != pid}
    for ident, frames in others:
        thread = _find_thread(ident, libraries)
        if thread is None:
            return False
        wait = libraries.pop(thread).wait
        if not _is_periodic(frames) and (wait is not Wait.LOCK or not _is_known(frames)):
            return False
    return all(wait.wait in _LIBRARY_WAITS for wait in libraries.values())


def _parse(text: str) -> list[_Frame]:
    return [(file, int(line), function) for file, line, function in _FRAME.findall(text)]


def _find_thread(ident: int, waits: Mapping[int, ThreadWait]) -> Optional[int]:
    """The thread that Python knows by this number, which is an address just above the thread's stack."""
    below = {
        ident - wait.stack_pointer: thread
        for thread, wait in waits.items()
        if wait.stack_pointer is not None and 0 < ident - wait.stack_pointer < _STACK
    }
    return below[min(below)] if below else None


def _is_periodic(frames: list[_Frame]) -> bool:
    """Whether the thread is one of ours, or one that only replaces ended workers of a pool."""
    own = [(file, function) for file, _, function in frames if not file.endswith(_BELOW)]
    is_ours = bool(own) and all(_OURS.search(file) for file, _ in own)
    return is_ours or any(file.endswith(_POOL) and function == "_handle_workers" for file, function in own)


def _is_known(frames: list[_Frame]) -> bool:
    """Whether the innermost function is known to wait for other threads only."""
    if not frames:
        return False
    file, line, function = frames[0]
    if file.endswith(_LOCKS):
        return True
    if file.endswith(_COLLECTIVES) or any(file.endswith(module) and function == name for module, name in _EXECUTES):
        return True
    return _LOCKING.search(_read_line(file, line)) is not None


def _read_line(file: str, number: int) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as source:
            return next((text for count, text in enumerate(source, 1) if count == number), "")
    except OSError:
        return ""

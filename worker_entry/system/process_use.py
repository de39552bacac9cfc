"""Measures the CPU time, memory, I/O and network traffic of processes and their node, from /proc and control groups."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Optional

from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.samples import GpuSample, NodeSample
from worker_entry.system import cgroups, hardware

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
QUIET = 3
"""A thread that has not run for this many readings in a row is read rarely."""
RARELY = 8
"""A reading covers every running thread, and one eighth of the others in turn."""
_WAITS = (
    *(
        "futex",
        "pipe_",
        "anon_pipe",
        "unix_",
        "sk_",
        "tcp_",
        "inet_",
        "poll",
        "do_poll",
        "do_select",
        "ep_",
        "do_epoll",
    ),
    *("do_wait", "wait_"),
)
"""Prefixes of kernel functions in which a thread waits for a lock, for another process or for a child."""
_GONE = (FileNotFoundError, ProcessLookupError)
INTERFACES = "/sys/class/net"


@dataclass(frozen=True)
class ProcessUse:
    """The resources that one process has used.

    `cpu_s`: seconds on a core. `read`, `written`: bytes through files, pipes and sockets. These three include ended
    children that the process has waited for. `memory`: resident bytes.
    """

    cpu_s: float = 0.0
    memory: int = 0
    threads: int = 0
    read: int = 0
    written: int = 0


def read_use(pid: int) -> ProcessUse:
    """Returns a process's use; all zeros if it is gone. Another user's process has unknown I/O, which counts as 0."""
    try:
        # proc(5): the second field is the command's name in parentheses, which may contain any character.
        fields = read_small(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        cpu_s, threads, memory = sum(map(int, fields[11:15])) * TICK_S, int(fields[17]), int(fields[21]) * _PAGE
    except (OSError, ValueError, IndexError):
        return ProcessUse()
    try:
        lines = read_small(f"/proc/{pid}/io").split(b"\n", 2)
        read, written = int(lines[0].removeprefix(b"rchar: ")), int(lines[1].removeprefix(b"wchar: "))
    except (OSError, ValueError, IndexError):
        read = written = 0
    return ProcessUse(cpu_s, memory, threads, read, written)


def waits(pid: int) -> bool:
    """Whether the process's main thread waits for a lock, another process or a child."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii") as stream:
            return stream.read().startswith(_WAITS)
    except (OSError, ValueError):
        return False


def read_swapped(pid: int) -> int:
    """Returns the bytes of a process in swap; 0 if the process is gone."""
    try:
        found = read_small(f"/proc/{pid}/status").partition(b"\nVmSwap:")[2]
        return int(found.split(None, 1)[0]) << 10
    except (OSError, ValueError, IndexError):
        return 0


def read_own_memory(pid: int) -> int:
    """Returns a process's bytes of anonymous memory, with its part of shared memory; 0 if unknown."""
    try:
        found = re.search(rb"^Pss_Anon:\s+(\d+)", read_small(f"/proc/{pid}/smaps_rollup"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found is not None else 0


class StarvedTime:
    """The time in which threads were ready to run but had no core, including threads that have ended.

    Most threads of a TensorFlow process never run. A thread that has not run for some readings is read less often from
    then on; its waiting time is not lost, but may be counted some samples later.
    """

    def __init__(self) -> None:
        self._threads: dict[str, _Thread] = {}
        self._ended = 0
        self._readings = 0
        self._has_run = False

    def update(self, pids: Iterable[int]) -> Optional[float]:
        """Returns the seconds so far of all threads of these processes; None if the kernel does not count them."""
        threads: dict[str, _Thread] = {}
        self._readings += 1
        # If no descriptor is left for reading them all, the last values of all threads are kept.
        with contextlib.suppress(OSError):
            for pid in pids:
                with contextlib.suppress(*_GONE):
                    self._read(pid, threads)
            self._ended += sum(thread.waited for name, thread in self._threads.items() if name not in threads)
            self._threads = threads
        waited = self._ended + sum(thread.waited for thread in self._threads.values())
        return round(waited / 1e9, 6) if self._has_run else None

    def _read(self, pid: int, threads: dict[str, _Thread]) -> None:
        """Reads the threads of a process, and adds them to `threads`."""
        folder = os.open(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in os.listdir(folder):
                thread = self._threads.get(name) or _Thread()
                if thread.quiet < QUIET or (self._readings + int(name)) % RARELY == 0:
                    try:
                        text = read_small(f"{name}/schedstat", folder)
                    except _GONE:  # the thread is gone, or the kernel has no such file
                        continue
                    self._note(thread, text)
                threads[name] = thread
        finally:
            os.close(folder)

    def _note(self, thread: _Thread, text: bytes) -> None:
        if text == thread.text:
            thread.quiet += 1
            return
        ran, waited, _ = text.split()
        # A kernel that can count waiting times but does not shows zeros for all threads.
        self._has_run = self._has_run or ran != b"0"
        if int(waited) < thread.waited:  # a later thread with the same number
            self._ended += thread.waited
        thread.text, thread.waited, thread.quiet = text, int(waited), 0


class _Thread:
    """The last reading of a thread: `waited` in nanoseconds; `quiet`: how many readings in a row it has not run."""

    __slots__ = ("quiet", "text", "waited")

    def __init__(self) -> None:
        self.text, self.waited, self.quiet = b"", 0, 0


class NodeMeter:
    """Measures this node. Limits are looked up once: they do not change during a run."""

    def __init__(self, *, proc: str = "/proc", groups: str = cgroups.ROOT, interfaces: str = INTERFACES) -> None:
        self._proc, self._interfaces = proc, interfaces
        self._groups = {"root": groups, "own": f"{proc}/self/cgroup"}
        self._cores = hardware.cores()
        usable = os.sched_getaffinity(0)
        self._of_group = cgroups.cores_limit(**self._groups) < len(usable)
        self._usable = (
            {f"cpu{number}".encode() for number in usable} if len(usable) < (os.cpu_count() or 1) else {b"cpu"}
        )
        self._memory = cgroups.memory_limit(**self._groups)
        self._counted: dict[bytes, bool] = {}
        self.swaps = False
        """Whether swap was in use at the last `read`."""

    def read(self, gpus: list[GpuSample]) -> Optional[NodeSample]:
        """Returns the node's current use; None if /proc cannot be read."""
        try:
            busy_s = cgroups.cpu_seconds(**self._groups) if self._of_group else None
            used, total = self._read_memory()
            received, sent = self._read_network()
            return NodeSample(
                self._read_busy() if busy_s is None else busy_s, self._cores, used, total, received, sent, gpus
            )
        except (OSError, ValueError, IndexError, KeyError):
            return None

    def _read_busy(self) -> float:
        """Seconds in which the cores that we may use were busy, summed over the cores."""
        busy = 0
        for line in read_whole(f"{self._proc}/stat").splitlines():
            name, *fields = line.split()
            if not name.startswith(b"cpu"):
                break
            if name in self._usable:
                # user, nice, system, idle, iowait, irq, softirq; not steal, in which other virtual machines ran
                ticks = [int(field) for field in fields[:7]]
                busy += sum(ticks) - ticks[3] - ticks[4]
        return round(busy * TICK_S, 2)

    def _read_memory(self) -> tuple[int, int]:
        """The bytes in use, and the total bytes."""
        lines = (line.split() for line in read_small(f"{self._proc}/meminfo").splitlines())
        sizes = {fields[0]: int(fields[1]) << 10 for fields in lines if len(fields) > 1}
        total = sizes[b"MemTotal:"]
        self.swaps = sizes.get(b"SwapTotal:", 0) > sizes.get(b"SwapFree:", 0)
        if self._memory is not None and self._memory.size < total:
            return self._memory.used(), self._memory.size
        return max(total - sizes[b"MemAvailable:"], 0), total

    def _read_network(self) -> tuple[int, int]:
        """The bytes received and sent."""
        counts = dict(self._read_interfaces())
        if counts.keys() != self._counted.keys():
            self._counted = self._choose([*counts])
        chosen = [counts[name] for name, counted in self._counted.items() if counted]
        return sum(received for received, _ in chosen), sum(sent for _, sent in chosen)

    def _read_interfaces(self) -> Iterator[tuple[bytes, tuple[int, int]]]:
        for line in read_whole(f"{self._proc}/self/net/dev").splitlines()[2:]:
            name, _, rest = line.partition(b":")
            fields = rest.split()
            yield name.strip(), (int(fields[0]), int(fields[8]))

    def _choose(self, names: list[bytes]) -> dict[bytes, bool]:
        """Decides which interfaces to count: only hardware, because bridges and bonds would count the same bytes again.

        If none is hardware, as in a container, all interfaces but the loopback count.
        """
        hardware = {name for name in names if self._is_hardware(os.fsdecode(name))}
        return {name: name in hardware if hardware else name != b"lo" for name in names}

    def _is_hardware(self, name: str) -> bool:
        folder = f"{self._interfaces}/{name}"
        # In a virtual machine, a network card may be a slave of another card, which counts the same bytes.
        return os.path.exists(f"{folder}/device") and not os.path.exists(f"{folder}/master/device")


def read_small(path: str, folder: Optional[int] = None) -> bytes:
    """Reads a file of at most 4 KiB with a single read, at half the cost of `open`.

    Args:
        path: the file.
        folder: the descriptor of an open folder, to which the path is relative.

    Raises:
        OSError: the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def read_whole(path: str) -> bytes:
    """Reads a file of any length.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as stream:
        return stream.read()

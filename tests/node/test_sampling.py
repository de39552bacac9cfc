"""What a node measures of its tasks and of itself, from real processes and from copies of kernel files."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
import pytest

from tests.harness.apart import linux
from tests.harness.polling import eventually
from worker_entry.agent.gpus.watch import GpuWatch
from worker_entry.agent.tasks import sampling
from worker_entry.agent.tasks.sampling import Sampler
from worker_entry.agent.tasks.task import StartedTask
from worker_entry.protocol.messages import Sampled
from worker_entry.protocol.samples import GpuSample
from worker_entry.system import kernel, process_use
from worker_entry.system.process_use import (
    QUIET,
    RARELY,
    NodeMeter,
    ProcessUse,
    StarvedTime,
    read_small,
    read_swapped,
    read_use,
)

pytestmark = linux
CHILD = """
import os, sys, threading, time
exec(sys.argv[1])
print("up", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def child(source: str, cores: set[int] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A Python that has run `source` and then waits; `cores`: the only cores that it uses."""
    pin = f"os.sched_setaffinity(0, {cores})\n" if cores else ""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, pin + source], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            yield process
        finally:
            process.kill()


class TestProcessUse:
    def test_process_use_matches_the_real_usage_of_a_process(self) -> None:
        source = (
            "kept = bytearray(os.urandom(1) * (100 << 20))\n"
            "threads = [threading.Thread(target=time.sleep, args=(600,), daemon=True) for _ in range(6)]\n"
            "[thread.start() for thread in threads]\n"
            "open('/dev/zero', 'rb', 0).read(3_000_000), open('/dev/null', 'wb', 0).write(bytes(5_000_000))\n"
            "while time.process_time() < 0.3: pass"
        )
        with child(source) as process:
            use, other = read_use(process.pid), psutil.Process(process.pid)
            assert use.threads == 7
            assert use.cpu_s == pytest.approx(sum(other.cpu_times()), abs=0.05)
            assert use.cpu_s > 0.25
            assert use.memory == pytest.approx(other.memory_info().rss, rel=0.1)
            assert use.memory > 100 << 20
            assert 3_000_000 < use.read < 20_000_000
            assert 5_000_000 < use.written < 6_000_000

    def test_process_use_includes_ended_children(self) -> None:
        burn = "import time; open('/dev/zero', 'rb', 0).read(9_000_000)\nwhile time.process_time() < 0.3: pass"
        with child(f"import subprocess; subprocess.run([sys.executable, '-c', {burn!r}])") as process:
            assert read_use(process.pid).cpu_s > 0.25
            assert read_use(process.pid).read > 9_000_000

    def test_process_use_of_an_ended_process_is_empty(self) -> None:
        ended = subprocess.Popen(["true"])
        ended.wait()
        assert read_use(ended.pid) == ProcessUse()
        assert read_swapped(ended.pid) == 0
        assert StarvedTime().update([ended.pid]) is None

    def test_a_process_name_cannot_imitate_usage_figures(self) -> None:
        with child("open('/proc/self/comm', 'w').write(') R 1 2 3 (')") as process:
            assert read_use(process.pid).threads == 1
            assert read_use(process.pid).memory > 1 << 20

    def test_swapped_memory_is_read_from_the_process_status(self, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = iter([b"Name:\tx\nVmSwap:\t     384 kB\nThreads:\t1\n", b"Name:\tkthread\n", b"Name:\tVmSwap: 3 kB\n"])
        monkeypatch.setattr(process_use, "read_small", lambda _: next(texts))
        assert [read_swapped(1) for _ in range(3)] == [384 << 10, 0, 0]


class TestStarvedTime:
    def test_two_processes_that_share_a_core_are_both_starved(self) -> None:
        [core, *_] = os.sched_getaffinity(0)
        burn = "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()"
        with child(burn, {core}) as one, child(burn, {core}) as other:
            times = [StarvedTime(), StarvedTime()]

            def starved() -> None:
                for time, process in zip(times, (one, other), strict=True):
                    assert (time.update([process.pid]) or 0) > 0.2

            eventually(starved)

    def test_the_starved_time_of_a_thread_still_counts_after_its_end(self) -> None:
        [core, *_] = os.sched_getaffinity(0)
        source = (
            "end = threading.Event()\n"
            "def burn():\n"
            "    while not end.is_set(): pass\n"
            "thread = threading.Thread(target=burn); thread.start()\n"
            "print('up', flush=True); sys.stdin.readline(); end.set(); thread.join()"
        )
        with child("threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()", {core}):
            with child(source, {core}) as process:
                starved, seen = StarvedTime(), list[float]()

                def waits() -> None:
                    seen.append(starved.update([process.pid]) or 0.0)
                    assert seen[-1] > 0.2

                eventually(waits)
                assert process.stdin is not None
                process.stdin.write(b"\n")
                process.stdin.flush()

                def joined() -> None:
                    assert read_use(process.pid).threads == 1

                eventually(joined)
                seen.append(starved.update([process.pid]) or 0.0)
                assert seen == sorted(seen)

    def test_starved_time_includes_a_thread_that_was_idle_for_long(self) -> None:
        [core, *_] = os.sched_getaffinity(0)
        burn = "[None for _ in iter(int, 1)]"
        source = f"threading.Thread(target=lambda: (sys.stdin.readline(), {burn}), daemon=True).start()"
        with child(f"threading.Thread(target=lambda: {burn}, daemon=True).start()", {core}):
            with child(source, {core}) as process:
                starved = StarvedTime()
                rested = [starved.update([process.pid]) for _ in range(5 * RARELY)][-1]
                assert rested is not None
                assert process.stdin is not None
                process.stdin.write(b"\n")
                process.stdin.flush()

                def waits() -> None:
                    assert (starved.update([process.pid]) or 0.0) > rested + 0.2

                eventually(waits)

    def test_idle_threads_are_read_rarely(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reads = list[str]()

        def read(path: str, folder: int) -> bytes:
            reads.append(path)
            return read_small(path, folder)

        monkeypatch.setattr(process_use, "read_small", read)
        rest = "[threading.Thread(target=time.sleep, args=(600,), daemon=True).start() for _ in range(63)]"
        with child(rest) as process:
            starved = StarvedTime()
            for _ in range(QUIET + 2 * RARELY):
                starved.update([process.pid])
            assert len(reads) <= 64 * (QUIET + 1) + 2 * 64 + 64
            later = reads[64 * (QUIET + 1) :]
            assert {path.partition("/")[0] for path in later} == {*os.listdir(f"/proc/{process.pid}/task")}

    def test_starved_time_includes_ended_processes(self) -> None:
        starved = StarvedTime()
        with child("while time.process_time() < 0.1: pass") as process:
            before = starved.update([process.pid, os.getpid()])
        assert before is not None
        after = starved.update([process.pid, os.getpid()])
        assert after is not None
        assert after >= before

    def test_starved_time_keeps_its_last_value_without_free_descriptors(self) -> None:
        starved = StarvedTime()
        before = starved.update([os.getpid()])
        _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            assert starved.update([os.getpid()]) == before
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        after = starved.update([os.getpid()])
        assert before is not None
        assert after is not None
        assert after < before + 60

    @pytest.mark.parametrize("text", [b"0 0 0\n", b""])
    def test_starved_time_is_unknown_if_the_kernel_does_not_count_it(
        self, monkeypatch: pytest.MonkeyPatch, text: bytes
    ) -> None:
        def read(_: str, __: int) -> bytes:
            if not text:
                raise FileNotFoundError
            return text

        monkeypatch.setattr(process_use, "read_small", read)
        assert StarvedTime().update([os.getpid()]) is None


# --- the node ---

STAT = """\
cpu  1000 200 300 90000 500 40 60 7000 80 0
cpu0 600 100 200 50000 300 20 30 4000 40 0
cpu1 400 100 100 40000 200 20 30 3000 40 0
intr 12345 0 0
"""
MEMINFO = """\
MemTotal:       16000000 kB
MemFree:         1000000 kB
MemAvailable:   12000000 kB
SwapTotal:             0 kB
SwapFree:              0 kB
HugePages_Total:       0
"""
NETWORK = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0
  eth0:5000 1 0 0 0 0 0 0 70 1 0 0 0 0 0 0
  eth1: 300 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0
 bond0: 5300 1 0 0 0 0 0 0 90 1 0 0 0 0 0 0
"""


@dataclass
class Machine:
    """A folder with files of /proc and /sys."""

    root: Path

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def meter(self) -> NodeMeter:
        proc, groups, net = (str(self.root / name) for name in ("proc", "groups", "net"))
        return NodeMeter(proc=proc, groups=groups, interfaces=net)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine of two cores with 16,000,000 KiB, not in a container."""
    made = Machine(tmp_path)
    made.write({"proc/stat": STAT, "proc/meminfo": MEMINFO, "proc/self/net/dev": NETWORK, "proc/self/cgroup": "0::/\n"})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return made


class TestNodeMeter:
    def test_a_node_sample_without_limits_covers_the_whole_machine(self, machine: Machine) -> None:
        gpu = GpuSample("0", 0.5)
        sample = machine.meter().read([gpu])
        assert sample is not None
        assert sample.cpu_s == pytest.approx((1000 + 200 + 300 + 40 + 60) * process_use.TICK_S)
        assert (sample.memory, sample.memory_total) == (4_000_000 << 10, 16_000_000 << 10)
        assert sample.gpus == [gpu]

    def test_a_node_sample_omits_cores_outside_of_the_cpu_affinity(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
        sample = machine.meter().read([])
        assert sample is not None
        assert sample.cpu_s == pytest.approx((400 + 100 + 100 + 20 + 30) * process_use.TICK_S)

    @pytest.mark.parametrize(
        ("own", "files"),
        [
            (
                "0::/pod\n",
                {"pod/cpu.max": "150000 100000\n", "pod/cpu.stat": "nr 1\nusage_usec 7250000\nuser_usec 3\n"},
            ),
            (
                "4:cpu,cpuacct:/pod\n",
                {
                    "cpu/pod/cpu.cfs_quota_us": "150000\n",
                    "cpu/pod/cpu.cfs_period_us": "100000\n",
                    "cpuacct/pod/cpuacct.usage": "7250000000\n",
                },
            ),
        ],
        ids=["v2", "v1"],
    )
    def test_with_a_cpu_quota_the_cpu_time_of_the_container_is_sampled(
        self, machine: Machine, own: str, files: dict[str, str]
    ) -> None:
        machine.write({"proc/self/cgroup": own, **{f"groups/{name}": text for name, text in files.items()}})
        sample = machine.meter().read([])
        assert sample is not None
        assert sample.cpu_s == 7.25

    @pytest.mark.parametrize(
        ("own", "files", "used"),
        [
            (
                "0::/pod/job\n",
                {
                    "pod/memory.max": "8000000\n",
                    "pod/memory.current": "5000000\n",
                    "pod/memory.stat": "anon 1\ninactive_file 1000000\nactive_file 7\n",
                    "pod/job/memory.max": "max\n",
                    "pod/job/memory.current": "3\n",
                },
                4_000_000,
            ),
            (
                "7:memory:/pod\n",
                {
                    "memory/pod/memory.limit_in_bytes": "8000000\n",
                    "memory/pod/memory.usage_in_bytes": "5000000\n",
                    "memory/pod/memory.stat": "inactive_file 1\ntotal_inactive_file 1000000\n",
                    "memory/memory.limit_in_bytes": "9223372036854771712\n",
                },
                4_000_000,
            ),
        ],
        ids=["v2, limit of the parent group", "v1"],
    )
    def test_with_a_memory_limit_the_memory_of_the_container_is_sampled(
        self, machine: Machine, own: str, files: dict[str, str], used: int
    ) -> None:
        machine.write({"proc/self/cgroup": own, **{f"groups/{name}": text for name, text in files.items()}})
        sample = machine.meter().read([])
        assert sample is not None
        assert (sample.memory, sample.memory_total) == (used, 8_000_000)

    def test_a_memory_limit_above_the_memory_of_the_machine_is_ignored(self, machine: Machine) -> None:
        machine.write(
            {"proc/self/cgroup": "7:memory:/\n", "groups/memory/memory.limit_in_bytes": "9223372036854771712\n"}
        )
        sample = machine.meter().read([])
        assert sample is not None
        assert sample.memory_total == 16_000_000 << 10

    @pytest.mark.parametrize(
        ("links", "received", "sent"),
        [
            ([], 10_600, 180),
            (["eth0/device", "eth1/device", "eth0/master", "eth1/master"], 5300, 90),
            (["eth0/device", "eth1/device", "eth1/master/device"], 5000, 70),
        ],
        ids=["container without loopback", "bond", "card behind a virtual card"],
    )
    def test_network_bytes_of_a_node_are_counted_once(
        self, machine: Machine, links: list[str], received: int, sent: int
    ) -> None:
        for link in links:
            (machine.root / "net" / link).mkdir(parents=True, exist_ok=True)
        sample = machine.meter().read([])
        assert sample is not None
        assert (sample.received, sample.sent) == (received, sent)

    def test_a_network_interface_that_appears_later_is_counted(self, machine: Machine) -> None:
        meter = machine.meter()
        meter.read([])
        machine.write({"proc/self/net/dev": f"{NETWORK}wg0: 7 1 0 0 0 0 0 0 8 1 0 0 0 0 0 0\n"})
        sample = meter.read([])
        assert sample is not None
        assert sample.sent == 188

    def test_a_node_meter_detects_swap_that_is_added_later(self, machine: Machine) -> None:
        meter = machine.meter()
        meter.read([])
        assert not meter.swaps
        machine.write({"proc/meminfo": MEMINFO.replace("SwapTotal:             0", "SwapTotal:             9")})
        meter.read([])
        assert meter.swaps

    @pytest.mark.parametrize("name", ["stat", "meminfo", "self/net/dev"])
    @pytest.mark.parametrize("text", [None, "", "cpu x\neth0\n\nlo: 1"])
    def test_an_unreadable_kernel_file_yields_no_node_sample(
        self, machine: Machine, name: str, text: str | None
    ) -> None:
        path = machine.root / "proc" / name
        path.unlink() if text is None else path.write_text(text)
        meter = machine.meter()
        assert meter.read([]) is None or (name, text) in {("stat", ""), ("self/net/dev", "")}

    def test_a_node_sample_of_this_machine_agrees_with_psutil(self) -> None:
        sample = NodeMeter().read([])
        assert sample is not None
        assert 0 < sample.memory <= sample.memory_total <= psutil.virtual_memory().total
        assert sample.cores >= 1
        assert sample.cpu_s > 0
        assert os.path.exists(process_use.INTERFACES)
        everything = psutil.net_io_counters(nowrap=False)
        assert sample.received <= everything.bytes_recv


# --- when samples are taken ---


@dataclass
class Task:
    """A task, as far as a sampler needs it."""

    pid: int
    running: bool = True


def poll(sampler: Sampler, tasks: Mapping[str, Task], now: float, sample_s: float = 2.0) -> Sampled | None:
    return sampler.poll(cast("Mapping[str, StartedTask]", tasks), now, sample_s)


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    with selectors.DefaultSelector() as selector:
        yield Sampler(GpuWatch(selector))


class TestSampler:
    def test_a_sample_includes_all_processes_of_each_running_task(self, sampler: Sampler) -> None:
        below = (
            "import subprocess; below = [sys.executable, '-c', 'print(flush=True); input()']\n"
            "subprocess.Popen(below, stdin=0, stdout=subprocess.PIPE).stdout.readline()"
        )
        with child(below) as process:
            sampled = poll(sampler, {"worker:0": Task(process.pid), "worker:1": Task(1, running=False)}, 1.0)
            assert sampled is not None
            assert sampled.node is not None
            [task] = sampled.tasks
            assert (task.task, task.threads) == ("worker:0", 2)
            assert task.starved_s is not None
            assert task.memory > read_use(process.pid).memory
            for pid in kernel.below([process.pid])[process.pid]:
                os.kill(pid, 9)

    def test_samples_are_taken_at_the_requested_interval(
        self, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sampling, "SHARE", 1.0)  # on a slow machine, their cost would stretch the interval
        tasks = {"worker:0": Task(os.getpid())}
        due = [now for now in range(0, 60, 1) if poll(sampler, tasks, float(now), 3.0) is not None]
        assert due == [*range(0, 60, 3)]

    def test_no_sample_is_taken_without_an_interval_or_a_running_task(self, sampler: Sampler) -> None:
        assert poll(sampler, {"worker:0": Task(os.getpid())}, 1.0, 0.0) is None
        assert poll(sampler, {"worker:0": Task(os.getpid(), running=False)}, 2.0) is None
        assert poll(sampler, {}, 5.0) is None

    def test_expensive_samples_are_taken_less_often(self, sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
        tasks = {"worker:0": Task(os.getpid())}
        monkeypatch.setattr(sampling, "SHARE", 1e-9)
        due = [now for now in range(0, 40, 2) if poll(sampler, tasks, float(now)) is not None]
        assert due == [0, 10, 20, 30]
        assert poll(sampler, tasks, 1000.0, 30.0) is not None
        assert poll(sampler, tasks, 1029.0, 30.0) is None
        assert poll(sampler, tasks, 1030.0, 30.0) is not None

    def test_a_sample_without_a_node_part_still_has_swapped_memory(
        self, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sampling, "read_swapped", lambda _: 7)
        tasks = {"worker:0": Task(os.getpid())}
        poll(sampler, tasks, 0.0)
        assert sampler._node is not None
        swaps = bool(psutil.swap_memory().used)
        monkeypatch.setattr(NodeMeter, "read", lambda self, _: setattr(self, "swaps", True))
        sampled = poll(sampler, tasks, 100.0)
        assert sampled is not None
        assert (sampled.node, sampled.tasks[0].swapped >= 7, swaps in (True, False)) == (None, True, True)

    def test_the_usage_of_a_restarted_task_starts_from_zero(self, sampler: Sampler) -> None:
        with child("while time.process_time() < 0.5: pass") as process:
            first = poll(sampler, {"worker:0": Task(process.pid)}, 0.0)
        with child("") as process:
            second = poll(sampler, {"worker:0": Task(process.pid)}, 100.0)
        assert first is not None
        assert second is not None
        assert second.tasks[0].cpu_s < first.tasks[0].cpu_s

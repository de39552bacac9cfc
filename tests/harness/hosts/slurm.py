"""A Slurm cluster on this machine: its own munged, slurmctld and several slurmds, each node at its own address."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.harness.hosts.loopback import address, ports
from tests.harness.witness import wait_until

CORES = 8
"""Configured cores of each node."""
MEMORY_MB = 8000
"""Configured memory of each node."""
MANY_PORTS = range(22000, 23000)
"""For a cluster with more nodes than `loopback.ports()` has ports."""
MEASURED = 64
"""In a cluster of up to this many nodes, Slurm measures and limits the memory of steps."""
KILL_WAIT_S = 8
"""From Slurm's TERM to its KILL."""
LOST_S = 6
"""How long slurmctld waits for a node."""
PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "srun", "sbatch")


def skip_without_slurm() -> None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here; install slurmctld, slurmd, slurm-client and munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts steps as root only")


@dataclass
class SlurmCluster:
    """A running cluster. `nodes`: the names of its nodes, in the order of the configuration."""

    folder: Path
    nodes: list[str]
    env: Mapping[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, *words: str, check: bool = True, timeout: float = 60.0, env: Mapping[str, str] | None = None) -> str:
        """The output of one of Slurm's programs."""
        done = subprocess.run(
            words,
            env={**os.environ, **self.env, **(env or {})},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        shown = self.run("scontrol", "show", "job", "-o", job, check=False)
        return next((word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}=")), "")

    def address(self, index: int) -> str:
        """The address of a node, by its index in `nodes`."""
        return _address(index + 1)

    def start_daemon(self, name: str) -> None:
        """Starts `slurmctld`, or the slurmd of a node."""
        log = self.folder / f"{name}.out"
        words = ["slurmctld", "-D"] if name == "slurmctld" else ["slurmd", "-D", "-N", name]
        path = f"{os.environ.get('PATH', '')}:/usr/sbin"
        program = shutil.which(words[0], path=path)
        assert program is not None
        with log.open("ab") as stream:
            self.daemons[name] = subprocess.Popen(
                [program, *words[1:], "-f", self.env["SLURM_CONF"]],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def stop_daemon(self, name: str, signum: int = signal.SIGTERM) -> None:
        process = self.daemons.pop(name)
        process.send_signal(signum)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:  # slurmctld may wait for lost nodes
            process.kill()
            process.wait()

    def await_idle(self) -> None:
        """Waits until every node can take a job."""

        def idle() -> bool:
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:  # its log says why, such as a port that is taken
                    pytest.fail(f"{name} has ended: {self._last_words(name)}\n{_describe_listeners()}")
            states = self.run("sinfo", "-h", "-N", "-o", "%N %t", check=False).split("\n")
            return {line.split()[0] for line in states if line.endswith(" idle")} >= set(self.nodes)

        wait_until(idle, "all nodes are idle")

    def _last_words(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return log.read_text(errors="replace")[-500:] if log.exists() else "it has no log"

    def steps(self, node: str = "") -> list[psutil.Process]:
        """The processes that supervise steps, with all their descendants, of one node or of all."""
        logs = [str(self.folder / f"{name}.log") for name in ([node] if node else self.nodes)]
        watchers = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "slurmstepd"]
        own = [watcher for watcher in watchers if _has_open(watcher, logs)]
        return [each for watcher in own for each in (watcher, *_children(watcher))]


def _has_open(process: psutil.Process, paths: Sequence[str]) -> bool:
    try:
        return any(file.path in paths for file in process.open_files())
    except psutil.Error:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _describe_listeners() -> str:
    """The processes that listen on the ports of these tests."""
    lines = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        with contextlib.suppress(psutil.Error):
            listens = [each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
            if own := sorted(set(listens) & set(ports())):
                lines.append(f"{process.pid} listens on {own}: {shlex.join(process.cmdline())}")
    return "\n".join(lines)


def _address(index: int) -> str:
    """The address of a node by its number, from 1."""
    return address(9 + index // 250, index % 250)


def write_configuration(folder: Path, nodes: int) -> list[str]:
    # Each step scans all processes of its machine every second; here, hundreds of steps share one machine.
    gather = "linux" if nodes <= MEASURED else "none"
    names = [f"node{index}" for index in range(1, nodes + 1)]
    own = ports() if nodes < len(ports()) else MANY_PORTS
    machine = os.uname().nodename
    lines = [
        f"NodeName={name} NodeHostname={machine} NodeAddr={_address(index)} Port={own[index]} "
        f"CPUs={CORES} RealMemory={MEMORY_MB} State=UNKNOWN"
        for index, name in enumerate(names, 1)
    ]
    (folder / "slurm.conf").write_text(
        textwrap.dedent(f"""\
            ClusterName=tests
            SlurmctldHost={machine}({address(9, 0)})
            SlurmctldPort={own[0]}
            SlurmUser=root
            AuthType=auth/munge
            AuthInfo=socket={folder}/munge.socket
            CredType=cred/munge
            StateSaveLocation={folder}/state
            SlurmdSpoolDir={folder}/spool/%n
            SlurmctldPidFile={folder}/slurmctld.pid
            SlurmdPidFile={folder}/%n.pid
            SlurmctldLogFile={folder}/slurmctld.log
            SlurmdLogFile={folder}/%n.log
            SlurmdParameters=config_overrides
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            JobAcctGatherType=jobacct_gather/{gather}
            JobAcctGatherFrequency=1
            JobAcctGatherParams=OverMemoryKill
            MpiDefault=none
            SelectType=select/cons_tres
            SelectTypeParameters=CR_Core_Memory
            DefMemPerNode=2500
            SchedulerParameters=sched_interval=2,bf_interval=2
            PreemptType=preempt/partition_prio
            PreemptMode=REQUEUE
            KillWait={KILL_WAIT_S}
            SlurmdTimeout={LOST_S}
            ReturnToService=2
            MinJobAge=3600
            UnkillableStepTimeout=120
            BatchStartTimeout=20
            CompleteWait=0
            """)
        + "\n".join(lines)
        + "\n"
        + textwrap.dedent("""\
            PartitionName=batch Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE
            PartitionName=graceful Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
            PartitionName=cancelled Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=20
            PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
            """)
    )
    return names


@contextlib.contextmanager
def running_slurm(folder: Path, nodes: int = 4) -> Iterator[SlurmCluster]:
    """A cluster with the partitions batch, graceful, cancelled and urgent; urgent preempts the others."""
    skip_without_slurm()
    folder.chmod(0o755)  # munged wants a socket that every user can reach
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    names = write_configuration(folder, nodes)
    env = {"SLURM_CONF": str(folder / "slurm.conf")}
    cluster = SlurmCluster(folder, names, env)
    subprocess.run(["mungekey", "-c", "-k", str(folder / "munge.key")], check=True)
    munged = shutil.which("munged", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    assert munged is not None
    places = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    options = [f"--{option}={folder / name}" for option, name in {**places, "log-file": "munge.log"}.items()]
    cluster.daemons["munged"] = subprocess.Popen(
        [munged, "-F", "--force", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until((folder / "munge.socket").exists, "munged listens")
        cluster.start_daemon("slurmctld")
        for name in names:
            (folder / "spool" / name).mkdir()
            cluster.start_daemon(name)
        cluster.await_idle()
        yield cluster
        cluster.run("scancel", "--signal=KILL", "--full", "-u", "root", check=False)
        cluster.run("scancel", "-u", "root", check=False)
        deadline = time.monotonic() + 20
        while cluster.steps() and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for process in cluster.steps():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for name in reversed([*cluster.daemons]):
            cluster.stop_daemon(name, signal.SIGTERM if name != "munged" else signal.SIGKILL)

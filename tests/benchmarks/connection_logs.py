"""A worker that prints a large file, over connections that are programs, against `cat` over the same."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.pairs import Pair, Row, time_pairs
from tests.benchmarks.ssh_logs import LINE, MEGABYTES, time_log
from tests.harness.hosts.containers import running_container
from tests.harness.hosts.kubernetes import FOLDER, find_cluster
from tests.harness.hosts.slurm import running_slurm

DOCKER, SRUN, SHELL = (
    Row(f"a log over `{name}`, with both ends on the same cores", "`cat` by the same program")
    for name in ("docker exec", "srun", "sh -c")
)


@dataclass(frozen=True)
class Tried:
    """A connection to a node, as YAML, and the command words with which a user runs a program there."""

    connection: str
    host: str
    words: Sequence[str]
    python: str
    env: Mapping[str, str]


def measure(runs: int) -> Iterator[Pair]:
    """Yields a pair for each connection; docker needs an engine, Slurm its daemons and root."""
    print(f"a worker prints {MEGABYTES} MB, first byte to last; rival: `cat file > log` by the same program")
    with tempfile.TemporaryDirectory() as folder:
        big = Path(folder) / "big"
        big.write_bytes(LINE * (MEGABYTES * 1_000_000 // len(LINE)))
        for name, place, row in (
            ("sh -c", _by_shell, SHELL),
            ("docker exec", _by_docker, DOCKER),
            ("kubectl exec", _by_kubernetes, None),
            ("srun", _by_slurm, SRUN),
        ):
            with place(Path(folder)) as tried:
                if tried is not None:
                    ours, rival = _compare(tried, big, runs)
                    yield Pair(name, ours, rival, "MB/s", row)


@contextlib.contextmanager
def _by_shell(_: Path) -> Iterator[Tried]:
    yield Tried("{command: [sh, -c, '{command}']}", "node", ("sh", "-c", 'exec "$@"', "sh"), sys.executable, {})


@contextlib.contextmanager
def _by_docker(folder: Path) -> Iterator[Tried | None]:
    if shutil.which("docker") is None or not os.environ.get("DOCKER_HOST"):
        print("  docker exec: DOCKER_HOST is not set")
        yield None
        return
    with running_container(folder) as name:
        yield Tried("docker", name, ("docker", "exec", "-i", name), "python3", {})


@contextlib.contextmanager
def _by_kubernetes(folder: Path) -> Iterator[Tried | None]:
    if not os.environ.get(FOLDER):
        print(f"  kubectl exec: {FOLDER} is not set")
        yield None
        return
    cluster = find_cluster()
    with cluster.running_pod(folder) as name:
        yield Tried("kubernetes", name, ("kubectl", "exec", "-i", name, "--"), sys.executable, cluster.env)


@contextlib.contextmanager
def _by_slurm(folder: Path) -> Iterator[Tried]:
    own = folder / "slurm"
    own.mkdir()
    with running_slurm(own, nodes=1) as cluster:
        cluster.run("salloc", "--no-shell", "-N1")
        job = cluster.run("squeue", "-h", "-o", "%i").strip()
        env = {**cluster.env, "SLURM_JOB_ID": job}
        yield Tried("slurm", "node1", ("srun", "--overlap", "-n1"), sys.executable, env)


def _compare(tried: Tried, big: Path, runs: int) -> tuple[list[float], list[float]]:
    """MB/s of both sides."""

    def ours() -> float:
        with tempfile.TemporaryDirectory(dir=big.parent) as folder:
            spec = Path(folder) / "spec.yaml"
            spec.write_text(
                f"connection: {tried.connection}\n"
                f"nodes: [{{host: {tried.host}, address: 127.0.0.1, python: {tried.python}}}]\n"
                f"program: {{command: [cat, {big}]}}\nworking_directory: {big.parent}\n"
            )
            up = [sys.executable, "-m", "launcher", "up", "--no-check", "--run-dir", f"{folder}/run", str(spec)]
            log = Path(folder) / "run" / "attempt-1" / "worker-0.log"
            return time_log(up, tried.env, log, big, lambda _: None)

    def rival() -> float:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            words = ["sh", "-c", 'log=$1; shift; exec "$@" >"$log"', "sh", str(log), *tried.words, "cat", str(big)]
            return time_log(words, tried.env, log, big, lambda _: None)

    mine, theirs = time_pairs(ours, rival, runs)
    return [MEGABYTES / seconds for seconds in mine], [MEGABYTES / seconds for seconds in theirs]

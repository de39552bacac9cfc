"""The job in which a run starts: its nodes, from the environment of the job."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.errors import UsageError
from launcher.slurm.calls import JOB_ID, show_job
from launcher.spec.models import ClusterSpec
from worker_entry.protocol.frozen import dataclass

LIMIT = 100_000
"""The most hosts in a list; more hosts are an error."""
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


@dataclass(frozen=True)
class Allocation:
    """A job's nodes in Slurm's order, and how many tasks the job has on each of them."""

    job: str
    hosts: tuple[str, ...]
    tasks: tuple[int, ...]


def find_job(environ: Mapping[str, str]) -> str:
    """The id of the job that this process belongs to.

    Raises:
        UsageError: this process belongs to no job.
    """
    job = environ.get(JOB_ID, "")
    if not job.isdigit():
        raise UsageError(
            "this process is not in a Slurm job, which would name the nodes",
            hint="run distlaunch within `salloc` or `sbatch`, or queue a job with `distlaunch submit`",
        )
    return job


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """The job's nodes; asks Slurm if only the job's id is known.

    Raises:
        UsageError: this process belongs to no job, or the variables of the job cannot be read.
        SlurmError: Slurm does not know the job, or does not answer.
    """
    job = find_job(environ)
    hosts: list[str] = []
    tasks: list[int] = []
    try:
        for suffix in _suffixes(environ) or [""]:
            own = parse_host_list(_listed(environ, suffix) or show_job(job).get("NodeList", ""))
            counts = parse_counts(environ.get(f"SLURM_TASKS_PER_NODE{suffix}") or f"1(x{len(own)})")
            hosts += own
            # Within a step, the variable describes the step.
            tasks += counts if len(counts) == len(own) else [1] * len(own)
    except ValueError as error:
        raise UsageError(f"cannot read the nodes of job {job}: {error}") from None
    return Allocation(job, tuple(hosts), tuple(tasks))


def expect_nodes(spec: ClusterSpec) -> list[dict[str, Any]]:
    """The fields of nodes like those of the job that `submit` asks for."""
    count = spec.slurm.nodes + spec.slurm.spares
    hosts = tuple(f"node{number}" for number in range(1, count + 1))
    return make_nodes(Allocation("", hosts, (spec.slurm.tasks_per_node,) * count), spec)


def find_group(environ: Mapping[str, str], host: str) -> int | None:
    """The component of a heterogeneous job that the node belongs to; None for a job of one kind."""
    for group, suffix in enumerate(_suffixes(environ)):
        with contextlib.suppress(ValueError):
            if host in parse_host_list(_listed(environ, suffix)):
                return group
    return None


def _suffixes(environ: Mapping[str, str]) -> list[str]:
    """The suffix of each component's variables in a heterogeneous job; empty for any other job."""
    size = environ.get("SLURM_HET_SIZE", "")
    return [f"_HET_GROUP_{group}" for group in range(int(size))] if size.isdigit() else []


def _listed(environ: Mapping[str, str], suffix: str) -> str:
    return environ.get(f"SLURM_JOB_NODELIST{suffix}") or environ.get(f"SLURM_NODELIST{suffix}") or ""


def make_nodes(allocation: Allocation, spec: ClusterSpec) -> list[dict[str, Any]]:
    """The fields of the nodes: a worker for each task of the job, and the other task types that the strategy needs."""
    spares = spec.slurm.spares
    if spares >= len(allocation.hosts):
        raise UsageError(
            f"job {allocation.job} has {len(allocation.hosts)} nodes, all of which would be spare",
            hint="lower `slurm.spares`, or ask for more nodes",
        )
    nodes: list[dict[str, Any]] = []
    for index, (host, count) in enumerate(zip(allocation.hosts, allocation.tasks, strict=True)):
        if index >= len(allocation.hosts) - spares:
            nodes.append({"host": host, "connection": "slurm", "spare": True})
            continue
        nodes.append({"host": host, "connection": "slurm", "tasks": spec.tasks_for(count, index)})
    return nodes


def parse_host_list(text: str) -> list[str]:
    """The hosts of `rack[1-2]n[01-03,7],gpu9-ib`, in Slurm's order; leading zeros of numbers are kept.

    Raises:
        ValueError: the text is not such a list.
    """
    hosts: list[str] = []
    for part in _split(text):
        hosts += _expand(part)
        if len(hosts) > LIMIT:
            raise ValueError(f"more than {LIMIT:,} hosts")
    return hosts


def _split(text: str) -> Iterator[str]:
    """The parts between the commas that are not within brackets."""
    depth, start = 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"brackets within brackets in {text[:80]!r}")
        if char == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise ValueError(f"a bracket is not closed in {text[:80]!r}")
    yield text[start:]


def _expand(part: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)
    if not any(pieces):
        raise ValueError("a host without a name")
    choices = [[piece] if index % 2 == 0 else [*_numbers(piece)] for index, piece in enumerate(pieces)]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"expected numbers like 1-4,07, got {text[:80]!r}")
        first, last = found[1], found[2] or found[1]
        if int(last) - int(first) > LIMIT:
            raise ValueError(f"more than {LIMIT:,} hosts")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def parse_counts(text: str) -> list[int]:
    """`2(x3),1` → [2, 2, 2, 1]: a number for each node.

    Raises:
        ValueError: the text is not such a list.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        times = int(found[2] or 1) if found is not None else 0
        if found is None or len(counts) + times > LIMIT:
            raise ValueError(f"expected numbers like 2(x3),1, got {text[:80]!r}")
        counts += [int(found[1])] * times
    return counts

"""Asks Slurm through its own programs."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from launcher.errors import DistlaunchError
from launcher.program_calls import call_program

JOB_ID = "SLURM_JOB_ID"
"""The variable that names the job of a process."""
ANSWER_S = 20.0
"""How long one of Slurm's programs may take; slurmctld may be busy."""

Fields = Mapping[str, str]


class SlurmError(DistlaunchError):
    """One of Slurm's programs is missing, failed, or did not answer in time."""

    reference = "slurm"


def call(
    words: Sequence[str],
    *,
    stdin: str | None = None,
    environ: Mapping[str, str] | None = None,
    limit_s: float = ANSWER_S,
) -> str:
    """Runs the program and returns its output; `environ`: its environment, by default ours.

    Raises:
        SlurmError: the program cannot be run, failed, or was too slow.
    """
    return call_program(
        words,
        SlurmError,
        stdin=stdin,
        environ=environ,
        limit_s=limit_s,
        missing="is this a machine of a Slurm cluster?",
    )


def show_job(job: str) -> Fields:
    """The fields of a job, as `scontrol show job` names them.

    Raises:
        SlurmError: there is no such job, or Slurm does not answer.
    """
    return parse_fields(call(["scontrol", "show", "job", "-o", job]).partition("\n")[0])


def show_configuration() -> Fields:
    """Slurm's configuration.

    Raises:
        SlurmError: Slurm does not answer.
    """
    lines = call(["scontrol", "show", "config"]).splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def show_partition(name: str) -> Fields:
    """The fields of a partition.

    Raises:
        SlurmError: there is no such partition, or Slurm does not answer.
    """
    return parse_fields(call(["scontrol", "show", "partition", "-o", name]).partition("\n")[0])


def find_addresses(hosts: Sequence[str]) -> dict[str, str]:
    """The address of each node at which Slurm's own daemons reach it.

    Raises:
        SlurmError: Slurm does not answer.
    """
    lines = call(["scontrol", "show", "node", "-o", ",".join(hosts)]).splitlines()
    nodes = map(parse_fields, lines)
    return {fields["NodeName"]: fields["NodeAddr"] for fields in nodes if {"NodeName", "NodeAddr"} <= fields.keys()}


def parse_fields(line: str) -> Fields:
    """`JobId=1 JobState=RUNNING …` → the fields; a value may contain spaces."""
    found = [*re.finditer(r"(?:^|\s)([A-Za-z][A-Za-z0-9:/]*)=", line)]
    ends = [each.start() for each in found[1:]] + [len(line)]
    return {each[1]: line[each.end() : end].strip() for each, end in zip(found, ends, strict=True)}


@functools.cache
def version() -> tuple[int, int]:
    """Slurm's version, such as (22, 5).

    Raises:
        SlurmError: srun is missing, or prints no version.
    """
    text = call(["srun", "--version"])
    found = re.search(r"([0-9]+)\.([0-9]+)", text)
    if found is None:
        raise SlurmError(f"srun --version prints no version: {text[:80]!r}")
    return int(found[1]), int(found[2])

"""The script of a job that runs distlaunch, for `sbatch`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import UsageError
from launcher.printable import has_control
from launcher.spec.models import ClusterSpec

OUTPUT = "slurm-%j.log"
"""The file for distlaunch's output in the job, in the run's folder."""


def render_script(spec: ClusterSpec, directory: Path, command: Sequence[str], cwd: str) -> str:
    """The script.

    Args:
        spec: a spec with `nodes: slurm`.
        directory: the run's folder.
        command: the job's command.
        cwd: the folder in which the command runs.

    Raises:
        UsageError: a text has a control character, which could begin a new line of the script.
    """
    for text in (cwd, str(directory), *command):
        if has_control(text):
            raise UsageError(f"{text!r} has control characters, so it cannot be written into a job's script")
    lines = [f"#SBATCH {_quote(option)}" for option in _options(spec, directory, cwd)]
    # With `exec`, a signal to the job's shell reaches distlaunch.
    return "\n".join(["#!/bin/sh", *lines, f"exec {shlex.join(command)}", ""])


def _options(spec: ClusterSpec, directory: Path, cwd: str) -> list[str]:
    slurm = spec.slurm
    given = {
        "job-name": spec.name,
        "nodes": slurm.nodes + slurm.spares,
        "ntasks-per-node": slurm.tasks_per_node,
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "gpus-per-node": slurm.gpus_per_node,
        "chdir": cwd,
        "output": f"{str(directory).replace('%', '%%')}/{OUTPUT}",
    }
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    options.append("--open-mode=append")
    options.append("--requeue" if spec.restart.max_restarts else "--no-requeue")
    options += ["--no-kill"] if slurm.spares else []
    return [*options, *slurm.extra]


def _quote(option: str) -> str:
    """The option as written in a script: sbatch knows quotes and backslashes, and ends an option at a space."""
    return option if option.isascii() and not set(option) & set(" \t\"'\\#") else _escape(option)


def _escape(option: str) -> str:
    name, _, value = option.partition("=")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}="{escaped}"'

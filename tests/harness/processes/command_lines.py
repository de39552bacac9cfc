"""Runs that are described on the command line."""

from __future__ import annotations

import shlex
from pathlib import Path

from launcher.spec.loading import load_spec
from launcher.spec.models import ClusterSpec
from tests.harness.processes.commands import Distlaunch

SHOW = "import json, os, sys\nprint('SHOWN', json.dumps([sys.argv[1:], os.environ.get('A'), os.environ.get('B')]))\n"


def programs(in_process: Distlaunch, *words: str) -> list[list[str]]:
    """What `up --dry-run` shows of each task: its node, and the words of its program."""
    ran = in_process("up", "--dry-run", *words)
    assert (ran.status, ran.stderr) == (0, "")
    nodes = [line.split()[2] for line in ran.stdout.splitlines() if line.startswith("worker:")]
    commands = [shlex.split(line) for line in ran.stdout.splitlines() if line.startswith("  by hand ")]
    ends = [command[command.index("run") + 1 :] for command in commands]
    return [[node, *end] for node, end in zip(nodes, ends, strict=True)]


def make_folder(folder: Path) -> Path:
    """A folder with a program and its spec."""
    (folder / "show.py").write_text(SHOW)
    (folder / "spec.yaml").write_text("nodes: [{host: local}]\nprogram: {script: show.py, args: [first]}\n")
    return folder


def init(in_process: Distlaunch, *words: str) -> ClusterSpec:
    """The spec that `init` writes."""
    ran = in_process("init", *words, run_dir=False)
    assert (ran.status, ran.stdout) == (0, "")
    assert ran.stderr == "Wrote cluster.yaml; `distlaunch check cluster.yaml` checks it\n"
    return load_spec(ran.directory.parent / "cluster.yaml")

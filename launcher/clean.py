"""`distlaunch clean`: ends what is left on nodes of runs whose controller is gone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import RunDirectoryError, UsageError
from launcher.run_dir import RunDir, find_run, runs_directory
from launcher.spec import ClusterSpec, NodeSpec
from launcher.spec_file import load_spec
from launcher.transports.base import LinkError
from launcher.ways import find_target
from worker_entry import cleaning
from worker_entry.messages import Cleaned
from worker_entry.orders import VERSION, Clean

AT_ONCE = 32
ANSWER_S = 60.0


@dataclass(frozen=True)
class CleanedNode:
    """What came of a node; `problem` is empty if it could be asked."""

    node: str
    ended: int = 0
    left: tuple[int, ...] = ()
    problem: str = ""

    @property
    def good(self) -> bool:
        return not self.problem and not self.left

    def __str__(self) -> str:
        if self.problem:
            return f"{self.node}: cannot be asked: {self.problem}"
        if self.left:
            return f"{self.node}: {self.ended} ended; cannot be ended: {', '.join(map(str, self.left))}"
        return f"{self.node}: {self.ended or 'no'} process{'es'[: 2 * (self.ended != 1)]} ended, 0 left"


def clean(what: str) -> Iterator[CleanedNode]:
    """Cleans the nodes of a run, or of a spec.

    Args:
        what: a run's folder or name; or a spec file, which stands for all runs of this user from this machine.

    Raises:
        DistlaunchError: there is no such run or spec, or the run is still under way.
    """
    spec, run_ids = _find(what)
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        yield from pool.map(lambda node: clean_node(spec, node, run_ids), spec.nodes)


def _find(what: str) -> tuple[ClusterSpec, list[str]]:
    if Path(what).is_file():
        return load_spec(Path(what), os.environ), [*_ended_runs(runs_directory(os.environ))]
    files = find_run(what)
    run_id, controller = files.read_run()
    if controller is not None:
        raise UsageError(f"run {run_id} is still under way (pid {controller.pid})", cure="end it with Ctrl-C")
    try:
        return ClusterSpec.model_validate_json(files.spec.read_bytes()), [run_id]
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"cannot read {files.spec}: {error}") from None


def _ended_runs(runs: Path) -> Iterator[str]:
    for folder in sorted(runs.iterdir()) if runs.is_dir() else ():
        try:
            run_id, controller = RunDir(folder).read_run()
        except (RunDirectoryError, UsageError):  # it is no run, or may be under way on another machine
            continue
        if controller is None:
            yield run_id


def clean_node(spec: ClusterSpec, node: NodeSpec, run_ids: Sequence[str], meeting: str | None = None) -> CleanedNode:
    """Cleans one node of the spec of what is left there of these runs, or of the agent of this meeting place."""
    if node.is_local:
        # The one agent here is a child of ours, and was seen to its end when its link was closed.
        answer = cleaning.clean(run_ids) if meeting is None else Cleaned(0, [])
        return CleanedNode(node.host, answer.ended, tuple(answer.left))
    from launcher.transports.ssh import open_stream
    from launcher.transports.streams import ask

    try:
        stream = open_stream(find_target(spec, node), node.python or "python3", "clean")
        message = ask(stream, Clean(VERSION, list(run_ids), meeting), ANSWER_S)
    except (LinkError, UsageError) as error:
        return CleanedNode(node.host, problem=str(error))
    if not isinstance(message, Cleaned):
        return CleanedNode(node.host, problem=f"it answered {type(message).__name__}")
    return CleanedNode(node.host, message.ended, tuple(message.left))

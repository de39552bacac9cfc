"""What a run leaves on nodes: processes by accident, and agents that stay warm for the next run.

psutil counts the processes on this machine, independent of the agent. The state directory has a record of each other
machine with a warm agent; on this machine, the agents themselves are found.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.console.writer import Console
from launcher.controller.context import RunContext
from launcher.errors import RunDirectoryError
from launcher.report.models import WarmNode
from launcher.rundir.directory import replace_text
from launcher.rundir.names import runs_directory
from launcher.spec.nodes import LOCAL
from launcher.wording import count_of
from worker_entry.agent.warm.rendezvous import find_waiting
from worker_entry.protocol import environment
from worker_entry.protocol.file_names import make_private_directory
from worker_entry.protocol.frozen import asdict, dataclass
from worker_entry.protocol.messages import KeptWarm


def find_left_processes(run_id: str) -> list[int]:
    """Returns the processes of this machine that have the run's id in a readable environment."""
    import psutil  # only at the end of a run

    found = []
    for process in psutil.process_iter(["environ"]):
        variables = process.info["environ"] or {}  # None: another user's process, a zombie, or a process that has ended
        if variables.get(environment.RUN_ID) == run_id and process.pid != os.getpid():
            found.append(process.pid)
    return sorted(found)


def confirm_left(left: Mapping[str, int | None], run_id: str, console: Console) -> dict[str, int | None]:
    """Checks this machine's count against psutil's; if they differ, warns and returns the larger one."""
    counted = left.get(LOCAL)
    if counted is None:
        return dict(left)
    found = find_left_processes(run_id)
    if len(found) != counted:
        pids = f": {', '.join(map(str, found))}" if found else ""
        agents = count_of(counted, "process", "processes")
        console.warn(f"the agent on this machine counts {agents} left, but psutil counts {len(found)}{pids}")
    return {**left, LOCAL: max(counted, len(found))}


@dataclass(frozen=True)
class KnownWarmNode:
    """A node on which an agent waits; `run` is the folder of the run that left the agent there, if known."""

    node: str
    bytes: int
    until: float
    run: str = ""


def note_kept(kept: Mapping[str, KeptWarm], context: RunContext, now: float) -> list[WarmNode]:
    """Records which nodes stay warm, and notes on the console which could not; `now` is in Unix seconds."""
    found = []
    for node, each in kept.items():
        if each.problem:
            context.console.note(f"{node}: TensorFlow is not kept warm: {each.problem}")
            continue
        found.append(WarmNode(node=node, pids=each.pids, bytes=each.bytes, until=now + each.seconds))
        if node != LOCAL:
            with contextlib.suppress(OSError, RunDirectoryError):  # the agent ends by itself, even without a record
                _write(KnownWarmNode(node, each.bytes, now + each.seconds, str(context.files.root)))
    return found


def find_warm_nodes() -> Iterator[KnownWarmNode]:
    """The nodes where agents wait: on this machine, and on other machines according to the records."""
    for _, facts in find_waiting():
        yield KnownWarmNode(LOCAL, facts.bytes, facts.until)
    with contextlib.suppress(RunDirectoryError):
        for path in sorted(_folder().glob("*.json")):
            try:
                known = KnownWarmNode(**json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                continue
            if known.until > time.time():
                yield known
            else:
                path.unlink(missing_ok=True)


def forget(node: str) -> None:
    """Removes the record of a node on which an agent no longer waits."""
    _path(node).unlink(missing_ok=True)


def _write(known: KnownWarmNode) -> None:
    path = _path(known.node)
    make_private_directory(str(path.parent))
    replace_text(path, json.dumps(asdict(known)))


def _path(node: str) -> Path:
    return _folder() / f"{hashlib.sha256(node.encode()).hexdigest()[:16]}.json"


def _folder() -> Path:
    return runs_directory(os.environ).with_name("warm")

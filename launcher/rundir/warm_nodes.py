"""The nodes on which agents stay warm for the next run.

On this machine, the agents themselves are found. The state directory has a record of each other machine with one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import RunDirectoryError
from launcher.rundir.directory import replace_text
from launcher.rundir.names import runs_directory
from launcher.tasks import LOCAL
from worker_entry.agent.warm.rendezvous import find_waiting
from worker_entry.protocol.file_names import make_private_directory
from worker_entry.protocol.frozen import asdict, dataclass


@dataclass(frozen=True)
class KnownWarmNode:
    """A node on which an agent waits; `run` is the folder of the run that left the agent there, if known."""

    node: str
    bytes: int
    until: float
    run: str = ""


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


def remember(known: KnownWarmNode) -> None:
    """Writes the record of a node.

    Raises:
        OSError, RunDirectoryError: it cannot be written.
    """
    path = _path(known.node)
    make_private_directory(str(path.parent))
    replace_text(path, json.dumps(asdict(known)))


def _path(node: str) -> Path:
    return _folder() / f"{hashlib.sha256(node.encode()).hexdigest()[:16]}.json"


def _folder() -> Path:
    return runs_directory(os.environ).with_name("warm")

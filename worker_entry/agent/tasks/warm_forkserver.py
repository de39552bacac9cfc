"""A forkserver between two runs, and the variables that must not differ in the next run."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Mapping
from typing import Optional

from worker_entry.program.import_variables import LATE, READ
from worker_entry.protocol import environment
from worker_entry.protocol.frozen import dataclass
from worker_entry.system import processes

ALSO_READ = re.compile(
    r"(PYTHON|LC_|MALLOC_|NVIDIA_|GOMP_|GOTO_|BLIS_|HDF5_|TCMALLOC_|MIOPEN_)|(LANG|LANGUAGE|TZ|HOME)$"
)
"""Variables that Python or native libraries read, besides those that a program sets before an import (`READ`)."""


@dataclass(frozen=True)
class WarmForkserver:
    """A forkserver between two runs, with its imports done."""

    pid: int
    control: socket.socket
    env: dict[str, str]
    """The environment with which it was started."""
    framework: str
    modules: list[str]
    """What `preload` has named."""
    imported: frozenset[str]
    """What it was asked to import."""
    reads: frozenset[str]
    """The variables that its imports have read."""

    def explain_difference(self, env: Mapping[str, str], framework: str, modules: list[str]) -> str:
        """Why it cannot serve a run with this environment, framework and `preload`; empty if it can."""
        if framework != self.framework:
            return "`framework` differs"
        if modules != self.modules:
            return "`preload` differs"
        name = find_difference(self.env, env, self.reads)
        return "" if name is None else f"{name} differs"

    def end(self) -> None:
        self.control.close()
        processes.end_children({self.pid})


def find_difference(
    one: Mapping[str, str], other: Mapping[str, str], reads: Optional[Collection[str]] = None
) -> Optional[str]:
    """The first differing variable that an import may read (without `reads`: any); None if there is none."""
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) == other.get(name) or name in LATE or name.startswith(environment.OWN_PREFIX):
            continue
        if reads is None or name in reads or READ.match(name) or ALSO_READ.match(name):
            return name
    return None

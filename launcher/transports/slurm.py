"""Connects to a node of a Slurm job by a step of the job there."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence

from launcher.slurm.calls import SlurmError
from launcher.slurm.step import make_environment, make_step
from launcher.transports.base import LinkError
from launcher.transports.connector import Opening
from launcher.transports.gathering import Gathering
from launcher.transports.payload import Payload
from launcher.transports.programs import ProgramConnector
from launcher.transports.streams import Stream
from worker_entry.protocol import environment
from worker_entry.protocol.frozen import dataclass, field, replace

STEPS = int(os.environ.get(environment.SLURM_STEPS) or 64)
"""Up to this many nodes have a step each."""
SAID = 1000
"""The number of last lines of srun that are kept, because they say why steps have ended."""
_UNBOUND = "lacks support for cpu binding"
"""Part of srun's message on clusters that bind no tasks anyway."""


@dataclass(frozen=True)
class SlurmConnector:
    """Connects to a node by a step. `job`: the job's id. `group`: the node's component of a heterogeneous job.

    `said`: the messages of srun and Slurm's daemons about our steps. `gathering`: the step that starts the first agents
    of many nodes; None if each node has its own step.
    """

    job: str
    host: str
    address: str | None = None
    group: int | None = None
    said: deque[str] = field(default_factory=lambda: deque(maxlen=SAID))
    gathering: Gathering | None = None

    def open(self, payload: Payload, python: str, opening: Opening) -> Stream:
        if self.gathering is not None and payload.verb == "node" and self.gathering.wants(self.host):
            return self.gathering.take(self.host, python, opening)
        try:
            words = make_step(self.job, self.host, group=self.group)
        except SlurmError as error:
            raise LinkError(error.message) from None
        environ = make_environment(os.environ)
        connector = ProgramConnector(tuple(words), self.host, self.address, environ=environ, heard=listen(self.said))
        return connector.open(payload, python, opening)


def gather(connectors: Sequence[SlurmConnector], limit: int = STEPS) -> list[SlurmConnector]:
    """The same connectors; more than `limit` of them share one step at first.

    Raises:
        SlurmError: srun is missing.
    """
    if len(connectors) <= limit or any(connector.group is not None for connector in connectors):
        return [*connectors]
    said: deque[str] = deque(maxlen=SAID)
    hosts = [connector.host for connector in connectors]
    gathering = Gathering(make_step(connectors[0].job, *hosts), make_environment(os.environ), hosts, listen(said))
    return [replace(connector, said=said, gathering=gathering) for connector in connectors]


def listen(said: deque[str]) -> Callable[[str], bool]:
    """A function that adds srun's lines to `said`, and returns whether the user may see them."""

    def hear(line: str) -> bool:
        said.append(line)
        return _UNBOUND not in line

    return hear

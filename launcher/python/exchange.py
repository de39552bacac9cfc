"""The messages between a Python process and the controller that it has started: one JSON array per line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from launcher.errors import EXIT_USAGE, DistlaunchError, RunDirectoryError, SpecError, TooFewGpusError, UsageError
from launcher.spec.models import ClusterSpec
from worker_entry.protocol.frozen import asdict, dataclass

_KINDS = (SpecError, UsageError, TooFewGpusError, RunDirectoryError)
"""Errors that keep their class; others arrive as UsageError or DistlaunchError, with their reference."""


@dataclass(frozen=True)
class Order:
    """The order to run a spec. It contains secrets, so it never appears on a command line.

    `parent`: the process whose end stops the run. `chaos`: faults to inject, as the option takes them.
    """

    spec: str
    run_dir: str
    checks: bool
    parent: int
    chaos: list[str]

    @classmethod
    def of(cls, spec: ClusterSpec, run_dir: Path | None, *, checks: bool, parent: int, chaos: Sequence[str]) -> Order:
        return cls(spec.model_dump_json(exclude_defaults=True), str(run_dir or ""), checks, parent, [*chaos])

    def read_spec(self) -> ClusterSpec:
        return ClusterSpec.model_validate_json(self.spec)


@dataclass(frozen=True)
class Began:
    """The run has its folder."""

    directory: str


@dataclass(frozen=True)
class Ended:
    """The run is over; `report` is the JSON of its RunReport."""

    report: str


@dataclass(frozen=True)
class NotStarted:
    """The run could not be started, and has no report."""

    message: str
    reference: str
    evidence: list[str]
    hint: str
    exit_status: int

    @classmethod
    def of(cls, error: DistlaunchError) -> NotStarted:
        return cls(error.message, error.reference, list(error.evidence), error.hint, error.exit_status)

    def make_error(self) -> DistlaunchError:
        other = UsageError if self.exit_status == EXIT_USAGE else DistlaunchError
        kind = next((kind for kind in _KINDS if kind.reference == self.reference), other)
        error = kind(self.message, evidence=self.evidence, hint=self.hint)
        error.reference, error.exit_status = self.reference, self.exit_status
        return error


News = Began | Ended | NotStarted
_CLASSES = {cls.__name__: cls for cls in (Order, Began, Ended, NotStarted)}


def send(file: IO[bytes], message: Order | News) -> None:
    file.write(json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n")
    file.flush()


def parse(line: bytes) -> Any:
    """Returns the message of a complete line.

    Raises:
        ValueError: the line is not complete.
    """
    name, facts = json.loads(line)
    return _CLASSES[name](**facts)

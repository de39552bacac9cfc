"""Names of a run's files."""

from __future__ import annotations

from pathlib import Path

from launcher.tasks import TaskId
from worker_entry.protocol.file_names import AttemptFiles
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class RunPaths:
    """The files of the run whose folder is `root`."""

    root: Path

    @property
    def run(self) -> Path:
        """Identifies the process that controls the run."""
        return self.root / "run.json"

    @property
    def lock(self) -> Path:
        """Held by the run's controller."""
        return self.root / "lock"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def spec(self) -> Path:
        return self.root / "spec.json"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def page(self) -> Path:
        """The page that `distlaunch report` writes."""
        return self.root / "report.html"

    @property
    def events(self) -> Path:
        """The journal: all events of the run, one JSON object per line."""
        return self.root / "events.jsonl"

    @property
    def stdin(self) -> Path:
        """The tasks' input from stdin; missing if they read nothing."""
        return self.root / "stdin"

    @property
    def partial_stdin(self) -> Path:
        """The same file before the end of the input has been read."""
        return self.root / "stdin.partial"

    @property
    def stacks(self) -> Path:
        return self.root / "stacks.txt"

    @property
    def agent_errors(self) -> Path:
        """stderr of this machine's agent."""
        return self.root / "agent.stderr"

    @property
    def model(self) -> Path:
        """The folder in which the demo saves its model."""
        return self.root / "model"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints from which programs resume; all attempts share this folder."""
        return self.root / "checkpoints"

    @property
    def collected(self) -> Path:
        """The files that tasks wrote on their nodes: a folder for each node."""
        return self.root / "collected"

    def log(self, attempt: int, task: TaskId) -> Path:
        return Path(AttemptFiles(str(self.root), attempt).log(str(task)))

    def samples(self, attempt: int, task: TaskId) -> Path:
        """The measurements of a task; see `report.samples`."""
        return self.attempt(attempt) / f"{str(task).replace(':', '-')}.samples.jsonl"

    def node_samples(self, attempt: int) -> Path:
        """The measurements of the nodes."""
        return self.attempt(attempt) / "nodes.samples.jsonl"

    def attempt(self, number: int) -> Path:
        return Path(AttemptFiles(str(self.root), number).directory)

    def relative(self, path: Path) -> str:
        return str(path.relative_to(self.root))

"""Names of files on a node: the package itself, and the files of one attempt of a run."""

from __future__ import annotations

import contextlib
import errno
import os

from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.log_index import SUFFIX

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder of `worker_entry`: `python PACKAGE VERB` starts it."""
LOCK = ".lock"
"""Suffix of a lock file; the child process that writes the status file holds the lock as long as it lives."""


def make_private_directory(path: str) -> None:
    """Makes the folder and its parents, accessible only to this user; does not change folders that exist."""
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        make_private_directory(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def remove_empty_directory(path: str) -> None:
    """Removes the folder if it is empty."""
    with contextlib.suppress(OSError):
        os.rmdir(path)


@dataclass(frozen=True)
class AttemptFiles:
    """`<root>/attempt-<n>/worker-0.log` and its siblings; a task `worker:0` is `worker-0` in file names."""

    root: str
    attempt: int

    @property
    def directory(self) -> str:
        return os.path.join(self.root, f"attempt-{self.attempt}")

    def log(self, task: str) -> str:
        """stdout and stderr of the task, byte for byte."""
        return self._path(task, "log")

    def log_index(self, task: str) -> str:
        """The times at which the log reached each recorded size (`log_index`)."""
        return self.log(task) + SUFFIX

    def crash(self, task: str) -> str:
        """The crash record, if the program raised."""
        return self._path(task, "crash.json")

    def finished(self, task: str) -> str:
        """Written when the program ends without a failure; contains the time, by `clock.now`."""
        return self._path(task, "finished")

    def status(self, task: str) -> str:
        """The progress of the program."""
        return self._path(task, "status.json")

    def child(self, task: str) -> str:
        """The progress of a child process of the program."""
        return self._path(task, "child.json")

    def child_crash(self, task: str) -> str:
        """The crash record of a child process of the program, if the child raised."""
        return self._path(task, "child-crash.json")

    def stacks(self, task: str) -> str:
        """The stacks that faulthandler writes at the agent's signal."""
        return self._path(task, "stacks")

    def handler(self, task: str) -> str:
        """Created before the program sets a handler for SIGTERM."""
        return self._path(task, "handler")

    def interrupted(self, task: str) -> str:
        """Created when SIGINT raises KeyboardInterrupt in the program, or before the program sets a handler for it."""
        return self._path(task, "interrupted")

    def order(self, task: str) -> str:
        """The task runner's order: a file, so that no user data is on a command line."""
        return self._path(task, "order.json")

    def forget(self, task: str) -> None:
        """Removes the files of the task's earlier process, but not the log, to which the next process appends."""
        own = (self.crash, self.finished, self.status, self.stacks, self.handler, self.interrupted)
        for path in (file(task) for file in (*own, self.child, self.child_crash)):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _path(self, task: str, ending: str) -> str:
        return os.path.join(self.directory, f"{task.replace(':', '-')}.{ending}")

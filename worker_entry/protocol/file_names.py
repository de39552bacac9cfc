"""Names of files on a node: the package itself, and what an agent writes for one attempt of a run."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder of `worker_entry`: `python PACKAGE VERB` starts it."""
LOCK = ".lock"
"""The suffix of the file that the process holds locked that writes a child's status, for as long as it lives."""


def make_private_directory(path: str) -> None:
    """Makes the folder and those around it, for this user alone; one that exists is left as it is."""
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        make_private_directory(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def remove_empty_directory(path: str) -> None:
    """Leaves a folder that holds anything as it is."""
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

    def crash(self, task: str) -> str:
        """The crash record, if the program raised."""
        return self._path(task, "crash.json")

    def finished(self, task: str) -> str:
        """There once the program has come to its end without a failure; holds the moment, by `clock.now`."""
        return self._path(task, "finished")

    def status(self, task: str) -> str:
        """How far the program has come."""
        return self._path(task, "status.json")

    def child(self, task: str) -> str:
        """How far a process has come that the program has started."""
        return self._path(task, "child.json")

    def child_crash(self, task: str) -> str:
        """What has ended such a process, if it raised."""
        return self._path(task, "child-crash.json")

    def stacks(self, task: str) -> str:
        """What faulthandler writes when the agent asks for it."""
        return self._path(task, "stacks")

    def order(self, task: str) -> str:
        """What the task runner is told, so that nothing of the user's is on its command line."""
        return self._path(task, "order.json")

    def forget(self, task: str) -> None:
        """Removes what an earlier process of the task has told of itself, if there was one; its log goes on."""
        told = (self.crash, self.finished, self.status, self.child, self.child_crash, self.stacks)
        for path in (file(task) for file in told):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _path(self, task: str, ending: str) -> str:
        return os.path.join(self.directory, f"{task.replace(':', '-')}.{ending}")

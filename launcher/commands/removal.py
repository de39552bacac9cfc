"""`distlaunch rm` and `distlaunch prune`: remove the folders of runs that have ended."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.errors import RunDirectoryError, UsageError
from launcher.rundir.directory import RunDir
from launcher.rundir.names import runs_directory
from launcher.rundir.owner import find_left_processes
from launcher.rundir.record import RecordedRun, last_written
from launcher.rundir.select import find_runs, select_run
from launcher.rundir.summary import RunSummary, summarize
from launcher.wording import count_of
from worker_entry.protocol.frozen import dataclass

KEEP = 20
OLDER_THAN_S = 30 * 86_400.0
LEFT_OVER_S = 3600.0
"""A removal that has not ended after this time was interrupted."""

_DOOMED = re.compile(r"\.removing-[0-9a-f]{16}")
_LEASE_S = 60.0


@dataclass(frozen=True)
class Removal:
    """A folder to remove, or a removed folder."""

    name: str
    directory: str
    bytes: int
    """The space that the folder takes on the disk."""


def find_removable(runs: Sequence[str]) -> list[RunDir]:
    """The folders of the named runs, each once.

    Raises:
        DistlaunchError: one of them must not be removed; the caller should then remove none.
    """
    found = {files.root: files for files in map(select_run, runs)}
    for files in found.values():
        _check_removable(files)
    return [*found.values()]


def find_prunable(environ: Mapping[str, str], *, keep: int, older_than_s: float) -> list[Path]:
    """The folders of runs that ended `older_than_s` ago or earlier, without the latest `keep` that have ended.

    Returns only folders in the runs directory that are certainly this user's runs. Follows no symbolic link. Keeps a
    lost run while its nodes may hold its tasks. Includes the leftovers of an interrupted removal.
    """
    now = time.time()
    summaries = [summarize(files) for files, _ in find_runs() if _is_own_run(files)]
    ended = [summary for summary in summaries if not summary.running]
    old = [summary for summary in ended[keep:] if summary.ended is None or now - summary.ended >= older_than_s]
    found = [Path(summary.directory) for summary in old if summary.state != "lost" or not _may_train(summary, now)]
    return [*found, *_left_over(runs_directory(environ), now)]


def measure(folder: Path) -> Removal:
    """The removal of the folder, with the space that it would free."""
    return Removal(folder.name, str(folder), sum(_sizes(folder)))


def remove(folder: Path) -> None:
    """Removes a run's folder.

    Raises:
        RunDirectoryError: the folder cannot be removed, or only in part.
        UsageError: the run is running again.
    """
    doomed = folder.with_name(f".removing-{secrets.token_hex(8)}")
    try:
        # Rename first: then no command sees half a run, and none can resume it.
        folder.rename(doomed)
        if not _DOOMED.fullmatch(folder.name) and (summary := summarize(RunDir(doomed))).running:
            doomed.rename(folder)
            raise _running(folder.name, summary)
        shutil.rmtree(doomed)
    except OSError as error:
        raise RunDirectoryError(f"cannot remove {error.filename or folder}: {error.strerror}") from None


def _check_removable(files: RunDir) -> None:
    name = files.root.name
    summary = summarize(files)
    if summary.running:
        raise _running(name, summary)
    status = files.root.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UsageError(f"{files.root} is a symbolic link", hint="name the folder that the link points to")
    if summary.state == "lost" and (left := find_left_processes(summary.run_id)):
        raise UsageError(
            f"{count_of(len(left), 'process', 'processes')} of run {name} still running on this machine",
            hint=f"stop them with `distlaunch clean {name}`",
        )


def _running(name: str, summary: RunSummary) -> UsageError:
    if summary.controller:
        return UsageError(
            f"run {name} may be running: its controller is {summary.controller}", hint="run the command there"
        )
    return UsageError(f"run {name} is running", hint=f"stop it with `distlaunch down {name}`")


def _is_own_run(files: RunDir) -> bool:
    """Whether the folder and its run.json belong to this user and are not links."""
    try:
        folder, record = files.root.lstat(), files.run.lstat()
    except OSError:
        return False
    mine = folder.st_uid == record.st_uid == os.geteuid()
    return mine and stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(record.st_mode)


def _may_train(lost: RunSummary, now: float) -> bool:
    """Whether tasks of a run without a controller may be running: on nodes that hold a lease, or on this machine."""
    files = RunDir(Path(lost.directory))
    try:
        lease_s = float(RecordedRun(files).spec_fields["timeouts"]["lease_s"])
    except (RunDirectoryError, ValueError, KeyError, TypeError):
        lease_s = _LEASE_S
    return now <= last_written(files) + lease_s or bool(find_left_processes(lost.run_id))


def _left_over(runs: Path, now: float) -> list[Path]:
    try:
        with os.scandir(runs) as entries:
            found = [(entry, entry.stat(follow_symlinks=False)) for entry in entries if _DOOMED.fullmatch(entry.name)]
    except OSError:
        return []
    return [
        Path(entry.path)
        for entry, status in found
        if status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode) and now - status.st_ctime > LEFT_OVER_S
    ]


def _sizes(folder: Path) -> Iterator[int]:
    """The sizes on the disk of everything in the folder; a file with several names counts once."""
    seen = set()
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            try:
                status = Path(place, name).lstat()
            except OSError:
                continue
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                yield status.st_blocks * 512

"""`distlaunch report`: the page of a run, which may still be running."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from launcher.commands.requests import ask_status
from launcher.errors import UsageError
from launcher.exporters.page_writing import make_page, write_page
from launcher.report.status_report import RunStatus
from launcher.rundir.directory import RunDir
from launcher.rundir.record import read_record
from launcher.rundir.summary import find_controller


def make(files: RunDir) -> str:
    """The page's text.

    Raises:
        RunDirectoryError: this is not a run's folder.
    """
    return make_page(files, status=_ask(files))


def write(files: RunDir, path: Path | None) -> Path:
    """Writes the page to a file, by default in the run's folder; returns its path."""
    chosen = path if path is not None else files.page
    write_page(chosen, make(files), 0o600 if path is None else 0o666)
    return chosen


def show(path: Path) -> None:
    """Opens the page in the user's browser.

    Raises:
        UsageError: no browser could be started.
    """
    if not webbrowser.open(path.absolute().as_uri()):
        raise UsageError("no browser could be started", hint=f"open {path} yourself")


def _ask(files: RunDir) -> RunStatus | None:
    """The status from the controller; None if the run is over, or its controller cannot be asked from here."""
    if find_controller(files, read_record(files)) != "":
        return None
    try:
        return ask_status(files)
    except UsageError:
        return None

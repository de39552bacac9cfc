"""Renders and writes the page of a run, and that of a test whether a program resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launcher.errors import DistlaunchError, UsageError
from launcher.proof.models import ResumeProof
from launcher.report.models import RunReport
from launcher.report.status_report import RunStatus
from launcher.rundir.directory import RunDir, replace_text
from launcher.rundir.names import name_run
from worker_entry.system import clock


def make_page(files: RunDir, *, report: RunReport | None = None, status: RunStatus | None = None) -> str:
    """The page's text; see `read_page_data`."""
    from launcher.exporters.page_reading import read_page_data
    from launcher.pages.html import render_page  # both are needed only for a page

    return render_page(read_page_data(files, now=clock.now(), report=report, status=status))


def write_page(path: Path, text: str, mode: int = 0o600) -> None:
    """Writes the page atomically: a reader never sees half of it.

    Args:
        path: the file; replaced if it exists.
        text: the page.
        mode: the file's permissions, restricted by the user's umask.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a terminal, a pipe; a folder is an error
            path.write_text(text, encoding="utf-8")
            return
        replace_text(path, text, mode)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="choose another file with -o, or `-o -` for stdout"
        ) from None


def write_at_end(files: RunDir, report: RunReport, warn: Callable[[str], None]) -> str:
    """Writes the page of a run that ends now, and returns the page's path; on failure, warns and returns ''."""
    try:
        write_page(files.page, make_page(files, report=report))
    except Exception as error:  # noqa: BLE001 - whatever it is, the run is over and must be reported
        reason = error.message if isinstance(error, DistlaunchError) else repr(error)
        warn(f"the page of the run is missing: {reason}; `distlaunch report {name_run(files.root)}` writes it")
        return ""
    return str(files.page)


def write_proof(folder: Path, proof: ResumeProof, warn: Callable[[str], None]) -> str:
    """Writes resume.json and resume.html to the folder of a test, and returns the page's path.

    On failure, warns and returns '': the result of the test is known all the same.
    """
    from launcher.pages.html import render_proof_page  # needed only for a page

    path = folder / "resume.html"
    try:
        replace_text(folder / "resume.json", proof.model_dump_json(indent=2) + "\n", 0o600)
        replace_text(path, render_proof_page(proof, clock.now()), 0o600)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test is over, and its result must be reported
        warn(f"the page of the test is missing: {error!r}")
        return ""
    return str(path)

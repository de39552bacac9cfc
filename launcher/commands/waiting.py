"""`distlaunch wait`: waits for the end of a run."""

from __future__ import annotations

import time

from launcher.errors import EXIT_INFRASTRUCTURE
from launcher.rundir.directory import RunDir
from launcher.rundir.queued import ASK_SLURM_S, find_queued
from launcher.rundir.record import read_record
from launcher.rundir.summary import RunSummary, find_controller, summarize

POLL_S = 0.25


def wait_for_end(files: RunDir) -> RunSummary:
    """Returns once the run has ended, or its controller is gone.

    Raises:
        RunDirectoryError: this is not a run's folder.
    """
    while True:
        record = read_record(files)
        if find_controller(files, record) is not None:
            time.sleep(POLL_S)
        elif find_queued(record) is not None:
            time.sleep(ASK_SLURM_S)
        else:
            return summarize(files)


def find_exit_status(summary: RunSummary) -> int:
    """distlaunch's exit status for the run; 3 if it was not recorded."""
    return EXIT_INFRASTRUCTURE if summary.exit_status is None else summary.exit_status

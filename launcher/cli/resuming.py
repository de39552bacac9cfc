"""The command that resumes a run."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import click

from launcher.cli.options import detach_options, run_argument
from launcher.cli.running import run_command, runs_attached
from launcher.cli.sections import SectionedCommand, option


@click.command(cls=SectionedCommand)
@run_argument
@option("--spec", type=click.Path(path_type=Path), metavar="FILE", help="Use another spec for the rest of the run.")
@detach_options
@option("--verbose", "-v", is_flag=True, help="Show TensorFlow's start-up messages, and details of starts.")
@option("--no-live", is_flag=True, help="Print plain lines instead of the live view.")
@runs_attached
def resume(run: str | None, spec: Path | None, detach: bool, wait: bool, verbose: bool, no_live: bool) -> int:
    """Resume a run that has ended, or whose controller is gone.

    RUN is a run's name, a part of it, or its folder; default: the latest run, if no run is running. Takes over tasks
    that still train on other machines: they continue, and their logs have no gap. Otherwise stops leftover processes of
    the last attempt and starts a new attempt in the same folder, where the program finds its checkpoints. The run's
    files contain no secrets; secrets come from this environment or from FILE.
    """
    from launcher.controller.resume import resume
    from launcher.rundir.select import select_run
    from launcher.sources.node_list import ask_first
    from launcher.spec.loading import load_spec

    files = select_run(run)
    changed = ask_first(load_spec(spec, os.environ)) if spec is not None else None
    start = functools.partial(resume, files, changed, environ=os.environ, verbose=verbose)
    return run_command(start, detach=detach, wait=wait, live=not no_live)

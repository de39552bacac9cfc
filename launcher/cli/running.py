"""Runs a cluster in the foreground or the background, and prints the commands for a run that left the terminal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.report.models import RunReport
    from launcher.run.detached import Detachment

_DETACHMENT = "distlaunch.detachment"


def runs_attached(command: Callable[..., int]) -> Callable[..., int]:
    """Lets the run of a command leave the terminal when the user asks for it.

    The shell must wait for a process other than the controller. The command forks that process before it imports
    anything, so that the process needs little memory.
    """

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> int:
        from launcher.console.opening import can_be_live

        if options["detach"] or options["wait"] or options["no_live"] or options.get("dry_run") or not can_be_live():
            return command(*arguments, **options)
        from launcher.run.detached import can_run_attached, run_attached

        if not can_run_attached():
            return command(*arguments, **options)

        def start(detachment: Detachment) -> int:
            click.get_current_context().meta[_DETACHMENT] = detachment
            return command(*arguments, **options)

        return _finish(*run_attached(start))

    return run


def run_command(
    start: Callable[..., RunReport], *, detach: bool, wait: bool, live: bool, misplaced: Sequence[str] = ()
) -> int:
    """Runs a cluster in the background or in the foreground.

    Args:
        start: starts the run.
        detach: whether it continues in the background; `wait` implies it.
        wait: whether to return only once the cluster is up.
        live: whether a run in the foreground has the live view.
        misplaced: options of this command that were given to the program.

    Returns:
        The exit status.
    """
    if not detach and not wait:
        detachment = click.get_current_context().meta.get(_DETACHMENT)
        return _note_misplaced(start(live=live, detachment=detachment), misplaced)
    from launcher.run.detached import run_detached

    def run(detachment: Detachment) -> int:
        return _note_misplaced(start(detachment=detachment), misplaced)

    return _finish(*run_detached(run, needs_cluster=wait))


def _note_misplaced(report: RunReport, options: Sequence[str]) -> int:
    """Returns the run's exit status; names the options if the program failed before its first step."""
    failed = report.verdict.reference == "task-failed"
    if options and failed and not any(task.progress for task in report.attempts[-1].tasks):
        subject, rest = (
            ("stands", "it is the program's; put it")
            if len(options) == 1
            else ("stand", "they are the program's; put them")
        )
        click.echo(
            f"{', '.join(options)} {subject} after the program, so {rest} before the program for distlaunch", err=True
        )
    return report.exit_status


def _finish(status: int | None, directory: Path | None) -> int:
    """Returns the exit status; first prints the commands for a run that has left the terminal."""
    if directory is None:
        assert status is not None
        return status
    from launcher.run.naming import name_run

    name = name_run(directory)
    click.echo(name)
    for verb, what in (("attach", "follow it"), ("status", "see its tasks"), ("down", "stop it")):
        click.echo(f"  distlaunch {verb} {name:<{len(name) + 7 - len(verb)}}  {what}", err=True)
    return 0

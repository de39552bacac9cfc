"""Runs a cluster in the foreground or the background, and prints the commands for a run that left the terminal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.controller.detach import Detachment
    from launcher.report.models import RunReport

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
        from launcher.controller.detach import can_run_attached, run_attached

        if not can_run_attached():
            return command(*arguments, **options)

        def start(detachment: Detachment) -> int:
            click.get_current_context().meta[_DETACHMENT] = detachment
            return command(*arguments, **options)

        return _finish(*run_attached(start))

    return run


def run_command(
    start: Callable[..., RunReport],
    *,
    detach: bool,
    wait: bool,
    live: bool,
    advise: Callable[[RunReport], str] = lambda _: "",
) -> int:
    """Runs a cluster in the background or in the foreground.

    Args:
        start: starts the run.
        detach: whether it continues in the background; `wait` implies it.
        wait: whether to return only once the cluster is up.
        live: whether a run in the foreground has the live view.
        advise: returns a last line about an ended run, or nothing.

    Returns:
        The exit status.
    """

    def conclude(report: RunReport) -> int:
        if line := advise(report):
            click.echo(line, err=True)
        return report.exit_status

    if not detach and not wait:
        detachment = click.get_current_context().meta.get(_DETACHMENT)
        return conclude(start(live=live, detachment=detachment))
    from launcher.controller.detach import run_detached

    def run(detachment: Detachment) -> int:
        return conclude(start(detachment=detachment))

    return _finish(*run_detached(run, needs_cluster=wait))


def _finish(status: int | None, directory: Path | None) -> int:
    """Returns the exit status; first prints the commands for a run that has left the terminal."""
    if directory is None:
        assert status is not None
        return status
    from launcher.rundir.names import name_run

    name = name_run(directory)
    click.echo(name)
    for verb, what in (("attach", "follow it"), ("status", "see its tasks"), ("down", "stop it")):
        click.echo(f"  distlaunch {verb} {name:<{len(name) + 7 - len(verb)}}  {what}", err=True)
    return 0

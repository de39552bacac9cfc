"""Runs a cluster in the foreground or the background, and says how to go on with one that has left the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from launcher.report.models import RunReport


def run_command(start: Callable[..., RunReport], *, detach: bool, live: bool) -> int:
    """Runs in the background or the foreground; says how to go on once it has left the terminal.

    `live`: with the live view, if this is a terminal. Returns the exit status.
    """
    from launcher.console.opening import can_be_live
    from launcher.run.detached import can_run_attached, run_attached, run_detached

    live = live and not detach and can_be_live()
    if not detach and not (live and can_run_attached()):
        return start(live=live).exit_status
    run_apart = run_detached if detach else run_attached
    status, directory = run_apart(lambda detachment: start(live=live, detachment=detachment).exit_status)
    if directory is None:
        assert status is not None
        return status
    from launcher.run.naming import name_run

    name = name_run(directory)
    click.echo(name)
    for verb, what in (("attach", "follow it"), ("status", "see its tasks"), ("down", "stop it")):
        click.echo(f"  distlaunch {verb} {name:<{len(name) + 7 - len(verb)}}  {what}", err=True)
    return 0

"""The commands that take a run, which is under way or was."""

from __future__ import annotations

import click


@click.command()
@click.argument("what", metavar="RUN|SPEC")
def clean(what: str) -> int:
    """End what is left on the nodes of a run whose distlaunch is gone.

    RUN is a run's folder or name. With a SPEC, its nodes are cleaned of all runs that were started from here and are
    not under way. Only processes that are provably of those runs are ended. An agent that hears nothing ends by
    itself after `timeouts.lease_s`; this does not wait for that.

    Exit status: 0 nothing is left, 2 the run is still under way, or may be on another machine, 3 a node could not be
    asked or cleaned.
    """
    from launcher.commands.clean import clean
    from launcher.printable import printable

    good = True
    for node in clean(what):
        click.echo(printable(str(node)))
        good = good and node.good
    return 0 if good else 3


@click.command()
@click.argument("run")
def down(run: str) -> int:
    """End a running RUN, as Ctrl-C in its terminal does, and wait until nothing is left of it.

    RUN is a run's folder or name. Give the command on the machine, and in the container, that its distlaunch is in.

    Exit status: 0 it is over, 2 its distlaunch is on another machine, 3 it has not ended in time.
    """
    from launcher.commands.requests import ask_to_end, find_run

    found = find_run(run)
    ended = ask_to_end(found)
    click.echo(f"Ended: {found.root}" if ended else f"Was over: {found.root}")
    return 0


@click.command()
@click.argument("run")
def stacks(run: str) -> int:
    """Show what all tasks of a running RUN are doing: their Python stacks, equal ones together.

    RUN is a run's folder or name. Nothing is stopped. SIGUSR1 to its distlaunch does the same, on its own terminal.
    """
    from launcher.commands.requests import ask_stacks, find_run

    click.echo(ask_stacks(find_run(run)), nl=False)
    return 0


@click.command()
@click.argument("run")
@click.option(
    "--duration",
    type=click.FloatRange(min=0.1, max=600),
    default=3.0,
    show_default=True,
    metavar="S",
    help="For how many seconds.",
)
def profile(run: str, duration: float) -> int:
    """Capture what all tasks of a running RUN do, for the profiler of TensorBoard.

    RUN is a run's folder or name. The tasks go on meanwhile. What was captured is in the run's log directory, where
    TensorBoard with `tensorboard-plugin-profile` finds it: Python's functions and the GPUs' work of each task, and
    TensorFlow's operations of the first worker, or of all under parameter_server.
    """
    from launcher.commands.profile import profile
    from launcher.commands.requests import find_run

    capture = profile(find_run(run), duration)
    for path in capture.files:
        click.echo(str(path))
    if capture.silent:
        click.echo(f"Warning: {', '.join(capture.silent)} had nothing to show; try a longer --duration", err=True)
    return 0

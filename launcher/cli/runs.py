"""The commands for a run that is running or has ended."""

from __future__ import annotations

import click


@click.command()
@click.argument("what", metavar="RUN|SPEC")
def clean(what: str) -> int:
    """Stop leftover processes of a run whose controller is gone.

    RUN is a run's folder or name. With SPEC, cleans its nodes of all ended runs that were started from here. Stops
    only processes that provably belong to those runs. An agent without a controller stops by itself after
    `timeouts.lease_s`; this does not wait for that.

    Exit status: 0 nothing is left, 2 the run is still running, or may be on another machine, 3 a node could not be
    reached or cleaned.
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
@click.option("--now", is_flag=True, help="Kill the tasks at once, without the grace.")
def down(run: str, now: bool) -> int:
    """Stop a run and wait until nothing is left of it.

    RUN is a running run's folder or name. Stops it as Ctrl-C in its terminal does. Works only on the machine, and in
    the container, of the run's controller.

    Exit status: 0 it has ended, 2 its controller is on another machine, 3 it has not ended in time.
    """
    from launcher.commands.requests import ask_to_end, find_run

    found = find_run(run)
    ended = ask_to_end(found, now=now)
    click.echo(f"Stopped: {found.root}" if ended else f"Already ended: {found.root}")
    return 0


@click.command()
@click.argument("run")
def stacks(run: str) -> int:
    """Show the Python stacks of all tasks of a run.

    RUN is a running run's folder or name. Groups equal stacks; stops nothing. SIGUSR1 to the run's controller shows
    the same in the controller's terminal.
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
    help="Capture S seconds.",
)
def profile(run: str, duration: float) -> int:
    """Profile all tasks of a run for TensorBoard.

    RUN is a running run's folder or name. Training continues. Writes to the run's log directory, where TensorBoard with
    `tensorboard-plugin-profile` finds the profiles: Python functions and GPU work of every task, and TensorFlow
    operations of the first worker, or of all tasks under parameter_server.
    """
    from launcher.commands.profile import profile
    from launcher.commands.requests import find_run

    capture = profile(find_run(run), duration)
    for path in capture.files:
        click.echo(str(path))
    if capture.silent:
        click.echo(f"Warning: {', '.join(capture.silent)} recorded nothing; try a longer --duration", err=True)
    return 0

"""The command line; the one place where errors become exit statuses.

Nothing but click is imported until a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import click

from launcher.cli import completion, config, control, doctor, logs, resume_test, run, show, specs
from launcher.cli.defaults import Defaults, read_defaults
from launcher.cli.sections import SectionedGroup, option
from launcher.cli.usage_errors import as_usage_error

EXIT_INTERRUPTED = 128 + signal.SIGINT
LOST_S = 0.02
"""The delay after which a lost exception is raised again."""
_interrupted: list[int] = []
"""The SIGINTs received so far."""
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 80}


def main() -> NoReturn:
    """The `distlaunch` command."""
    from worker_entry.hooks.import_hooks import after_import

    _open_closed_streams()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a parent ignores it, the exit status of our children is lost
    after_import("pydantic.plugin._loader", _find_no_plugins)
    gc.set_threshold(10_000)  # imported objects stay; collecting garbage during imports takes a twentieth of a start
    at_once = signal.getsignal(signal.SIGINT)
    try:
        if callable(at_once):
            signal.signal(signal.SIGINT, _interrupt)  # from here on, commands may have to clean up
            sys.unraisablehook = _raise_again
        status = run_command(sys.argv[1:])
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, at_once)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    try:
        sys.exit(status)
    finally:
        gc.freeze()  # otherwise a last garbage collection at exit takes a tenth of a short command


def _find_no_plugins(loader: ModuleType) -> None:
    """Called with the module of pydantic that looks for plugins in the metadata of all installed packages.

    That takes a tenth of a short command, and a plugin would see what specs and reports contain. pydantic's own setting
    is a variable, which tasks would inherit.
    """
    loader.__dict__["get_plugins"] = tuple


def _interrupt(signum: int, _frame: object) -> None:
    """Handles Ctrl-C as Python does, and records that it happened."""
    _interrupted.append(signum)
    raise KeyboardInterrupt


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Called when an exception is lost, such as the KeyboardInterrupt of a Ctrl-C in a callback of an import."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        from threading import Timer

        Timer(LOST_S, _thread.interrupt_main).start()  # here, the exception would be lost again
    else:
        sys.__unraisablehook__(lost)


def _open_closed_streams() -> None:
    """Opens /dev/null as each closed stream (`distlaunch … >&-`), or the next opened file would become that stream."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            mode = os.O_WRONLY if descriptor else os.O_RDONLY
            opened = os.open(os.devnull, mode)  # takes the lowest free number, which is this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if descriptor else "r"))


def run_command(arguments: list[str]) -> int:
    """Runs the command with these arguments, shows its errors, and returns the exit status."""
    flags: dict[str, Any] = {}
    stdout = sys.stdout
    completes = completion.VARIABLE in os.environ
    if completes:
        completion.prepare()
    try:
        flags["defaults"] = Defaults(None) if completes else read_defaults(cli, os.environ)
        status = cli.main(
            arguments,
            prog_name="distlaunch",
            standalone_mode=False,
            obj=flags,
            default_map=flags["defaults"].values,
        )
    except click.ClickException as error:
        return _show_error(as_usage_error(error))
    except click.Abort:
        return EXIT_INTERRUPTED
    except SystemExit:
        if sys.stdout is not stdout:  # click replaces stdout when its reader is gone: `distlaunch plan … | head`
            return 141
        raise
    except Exception as error:  # noqa: BLE001 - every exception becomes an exit status
        if _interrupted:  # a library has turned KeyboardInterrupt into an error of its own
            return EXIT_INTERRUPTED
        _go_there(error, arguments, flags.get("folder", ""))
        if flags.get("debug"):
            import traceback

            traceback.print_exc()
        return _show_error(error)
    return status if isinstance(status, int) else 0


def _go_there(error: Exception, arguments: Sequence[str], folder: str) -> None:
    """Runs the same command in the Slurm job that has the run's controller, from the folder where it was called."""
    from launcher.rundir.owner import ElsewhereError

    if isinstance(error, ElsewhereError) and error.job:
        from launcher.own_command import own_command
        from launcher.rundir.queued import run_in_job

        if folder:
            os.chdir(folder)
        run_in_job(error.job, own_command(*arguments))


def _show_error(error: Exception) -> int:
    """Shows the error; returns the exit status."""
    from launcher.errors import EXIT_BUG, DistlaunchError, ShownError, as_ours, error_lines

    error = as_ours(error)
    if isinstance(error, DistlaunchError):
        if not isinstance(error, ShownError):
            click.echo("\n".join(error_lines(error.message, error.reference, error.evidence, error.hint)), err=True)
        return error.exit_status
    click.echo(f"Error: a bug in distlaunch: {error!r} [bug]\n  `distlaunch --debug …` shows a traceback", err=True)
    return EXIT_BUG


def _note_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.obj["debug"] = value


def _change_folder(context: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    try:
        context.obj["folder"] = str(Path.cwd())
        os.chdir(value)
    except OSError as error:
        if not context.resilient_parsing:
            raise click.BadParameter(f"cannot change to {value}: {error.strerror}") from None
    else:
        os.environ["PWD"] = str(Path.cwd())


def _show_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from importlib import metadata

        click.echo(f"distlaunch {metadata.version('distlaunch')}")
        context.exit()


@click.group(cls=SectionedGroup, context_settings=CONTEXT)
@option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
@option(
    "-C",
    "folder",
    metavar="DIR",
    expose_value=False,
    callback=_change_folder,
    help="Change to DIR first; paths are relative to it.",
)
@option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_note_debug,
    help="Show a traceback with every error.",
)
def cli() -> None:
    """Start a multi-worker TensorFlow cluster, watch it, and leave nothing behind.

    \b
    distlaunch local --workers 2           run the built-in demo on this machine
    distlaunch local --workers 2 train.py  run your script
    distlaunch check two_nodes.yaml        check a spec and its nodes
    distlaunch up two_nodes.yaml           run a cluster from a spec
    distlaunch up -H gpu-a,gpu-b train.py  run your script on two machines

    Exit status: 0 succeeded, 1 a task failed, 2 usage or spec error, 3 infrastructure (start-up timeout, node lost), 70
    a bug in distlaunch, 128 + n ended by signal n.
    """


cli.add_section("Run", (run.local, run.up, run.submit, run.resume))
cli.add_section(
    "Look",
    (
        specs.check,
        specs.plan,
        show.ls,
        show.status,
        logs.logs,
        logs.attach,
        show.report,
        control.stacks,
        control.profile,
        control.collect,
    ),
)
cli.add_section("End", (show.wait, control.down, control.clean, control.rm, control.prune))
cli.add_section(
    "Prepare",
    (
        doctor.doctor,
        resume_test.test_resume,
        specs.init,
        specs.compose,
        specs.export,
        specs.schema,
        config.config,
        completion.completion,
    ),
)

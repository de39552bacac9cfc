"""The commands that show what a run prints: logs, attach."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from launcher.cli.completion import complete_tasks
from launcher.cli.options import run_argument
from launcher.cli.sections import SectionedCommand, option
from launcher.cli.values import Whole, parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.console.log_output import LogOutput
    from launcher.rundir.directory import RunDir
    from launcher.rundir.logs import LogChoice
    from launcher.tasks import TaskId, TaskPattern


CLOSED_PIPE = 128 + 13
"""The exit status of a program that writes to a pipe without a reader: 128 + SIGPIPE."""


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A moment, in Unix seconds; typed as a duration before now, or as a date and time."""

    name = "moment"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not isinstance(value, str):
            return float(value)
        import time
        from datetime import datetime

        try:
            return time.time() - parse_duration(value)
        except ValueError:
            pass
        try:
            return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError):
            self.fail(f"expected a duration such as 10m, or a time such as 2026-11-22T14:30, not {value}", param, ctx)


@click.command(cls=SectionedCommand)
@run_argument
@click.argument("tasks", nargs=-1, metavar="[TASK]...", shell_complete=complete_tasks)
@option("--follow", "-f", section="What", is_flag=True, help="Show new lines until the run ends.")
@option("--tail", section="What", type=Whole(min=0), metavar="N", help="Show the last N lines of each task.")
@option("--head", section="What", type=Whole(min=0), metavar="N", help="Show the first N lines of each task.")
@option(
    "--since", section="What", type=Moment(), metavar="TIME", help="Show lines since TIME: 10m or 2026-11-22T14:30."
)
@option(
    "--attempt",
    section="What",
    type=Whole(min=1),
    metavar="K",
    default_text="the last",
    help="Show attempt K.",
)
@option("--distlaunch", "own", section="What", is_flag=True, help="Show messages of distlaunch, not the tasks' logs.")
@option("--timestamps", "-t", section="How", is_flag=True, help="Begin each line with its time, in UTC.")
@option("--no-prefix", section="How", is_flag=True, help="Omit the tasks' names; in a pipe, leave lines unchanged.")
@option("--json", "as_json", section="How", is_flag=True, help="Show each line as an object {time, task, line}.")
def logs(
    run: str | None,
    tasks: tuple[str, ...],
    follow: bool,
    tail: int | None,
    head: int | None,
    since: float | None,
    attempt: int | None,
    own: bool,
    timestamps: bool,
    no_prefix: bool,
    as_json: bool,
) -> int:
    """Show the logs of a run's tasks, merged by time.

    RUN is a run's name, a part of it, or its folder; default: the only running run, else the latest one. TASK is
    `worker:1`, or `worker` for all workers; default: all tasks. Works during a run and after its end.
    """
    from launcher.errors import UsageError
    from launcher.rundir.logs import LogChoice
    from launcher.rundir.select import select_run

    run, patterns = _split(run, tasks)
    if head is not None and (follow or tail is not None):
        raise UsageError("--head shows the beginning only; it cannot be combined with --follow or --tail")
    if own and patterns:
        raise UsageError("--distlaunch shows no tasks", hint=f"leave out {patterns[0]}")
    _allow_many_files()
    files = select_run(run, reads=True)
    choice = LogChoice(
        patterns=patterns, attempt=attempt, tail=tail, head=head, since=since, timed=timestamps or as_json
    )
    try:
        _show(files, choice, own=own, follow=follow, no_prefix=no_prefix, timestamps=timestamps, as_json=as_json)
    except BrokenPipeError:  # click would exit with 1
        return CLOSED_PIPE
    return 0


def _show(
    files: RunDir, choice: LogChoice, *, own: bool, follow: bool, no_prefix: bool, timestamps: bool, as_json: bool
) -> None:
    from launcher.commands.attach import read_tasks
    from launcher.commands.logs import copy_logs, find_tasks, show_logs, show_own
    from launcher.errors import UsageError

    stdout = sys.stdout.fileno()
    if own:
        output = _make_output([], as_json=as_json, timestamps=timestamps, is_raw=False)
        show_own(files, choice, output, follow=follow, stdout=stdout)
        return
    tasks = find_tasks(files, choice, read_tasks(files) if follow else ())
    if not tasks and not follow:
        raise UsageError(f"no task of {files.root} has a log", hint="`distlaunch logs --distlaunch` may say why")
    is_raw = no_prefix and not sys.stdout.isatty()
    if is_raw and _names_one(choice) and choice.head is None and not choice.timed:
        left_out = copy_logs(files, choice, follow=follow, stdout=stdout)
        if left_out:
            from worker_entry.protocol.units import render_size

            click.echo(f"({render_size(left_out)} of zeros left out)", err=True)
        return
    labelled = [] if no_prefix else _all_tasks(files, tasks)
    output = _make_output(labelled, as_json=as_json, timestamps=timestamps, is_raw=is_raw)
    show_logs(files, choice, output, follow=follow, stdout=stdout)


@click.command(cls=SectionedCommand)
@run_argument
@option("--verbose", "-v", is_flag=True, help="Show TensorFlow's start-up messages too.")
@option("--no-live", is_flag=True, help="Print plain lines instead of the live view.")
def attach(run: str | None, verbose: bool, no_live: bool) -> int:
    """Attach to the output of a run, from the last screenful on.

    RUN is a run's name, a part of it, or its folder; default: the only running run, else the latest one. Shows the same
    output as the run's own terminal. Ctrl-C, `q` and `d` only detach: the run continues, and the exit status is 0.
    Otherwise the exit status is that of the run.
    """
    import signal

    from launcher.commands.attach import Attachment, Left, end_as_left
    from launcher.rundir.select import select_run

    _allow_many_files()
    files = select_run(run)
    signal.signal(signal.SIGTERM, end_as_left)
    attachment = Attachment(files, colour=_has_colour() and sys.stderr.isatty(), verbose=verbose, live=not no_live)
    try:
        attachment.show()
    except BrokenPipeError:
        return CLOSED_PIPE
    except (Left, KeyboardInterrupt):
        from launcher.rundir.names import name_run

        click.echo(f"Detached; the run continues: distlaunch attach {name_run(files.root)}", err=True)
        return 0
    if attachment.run.is_lost:
        from launcher.errors import EXIT_INFRASTRUCTURE

        click.echo(f"Error: the controller of {files.root} is gone [lost]", err=True)
        return EXIT_INFRASTRUCTURE
    return attachment.run.exit_status() or 0


def _split(run: str | None, words: Sequence[str]) -> tuple[str | None, list[TaskPattern]]:
    """The run and the tasks. The first word is a task if it looks like a task; a run named `worker` is `./worker`."""
    from launcher.errors import UsageError
    from launcher.tasks import parse_task_pattern

    patterns = []
    for number, word in enumerate((*([run] if run is not None else []), *words)):
        try:
            patterns.append(parse_task_pattern(word))
        except ValueError:
            if number:
                raise UsageError(f"{word!r} is not a task; tasks are named like worker:0, or worker for all") from None
    return run if len(patterns) == len(words) else None, patterns


def _allow_many_files() -> None:
    """Lets this process open the logs of all tasks; the usual soft limit is 1,024 files."""
    import contextlib
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _names_one(choice: LogChoice) -> bool:
    """Whether the choice names exactly one task."""
    return len(choice.patterns) == 1 and choice.patterns[0].index is not None


def _all_tasks(files: RunDir, found: Sequence[TaskId]) -> list[TaskId]:
    """The tasks of the run, in the order that determines their colours."""
    from launcher.commands.attach import read_tasks

    planned = read_tasks(files)
    return [*planned, *(task for task in found if task not in planned)]


def _make_output(tasks: Sequence[TaskId], *, as_json: bool, timestamps: bool, is_raw: bool) -> LogOutput:
    from launcher.console.log_output import JsonOutput, LabelledOutput, RawOutput

    if as_json:
        return JsonOutput()
    if is_raw:
        return RawOutput(timestamps=timestamps)
    return LabelledOutput(tasks, colour=_has_colour(), timestamps=timestamps)


def _has_colour() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")

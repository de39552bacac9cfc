"""The command that tests whether a program resumes exactly."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.cli.changes import field_option, setting_option, variable_option
from launcher.cli.options import json_option, module_option
from launcher.cli.programs import ProgramCommand, is_spec, load_changed, make_local_spec
from launcher.cli.sections import option
from launcher.cli.values import Whole
from launcher.spec.field_options import DEVICES, FRAMEWORK, PYTHON, STRATEGY


@click.command(cls=ProgramCommand)
@option("--workers", "-n", section="Cluster", type=Whole(min=1), metavar="N", default_text="2", help="Use N workers.")
@field_option(STRATEGY)
@field_option(FRAMEWORK)
@field_option(DEVICES)
@setting_option
@variable_option
@module_option
@field_option(PYTHON)
@option("--quick", section="Test", is_flag=True, help="Test three faults.")
@option("--full", section="Test", is_flag=True, help="Also test a fault in each tenth of the run, and at each save.")
@option("--only", section="Test", multiple=True, metavar="NAME", help="Test only this fault, like 'in an epoch'.")
@option("--steps", section="Test", type=Whole(min=2), metavar="N", help="End each run after N steps.")
@option(
    "--link",
    section="Test",
    multiple=True,
    metavar="PATH",
    help="Link PATH, such as data, into each copy of the folder.",
)
@option(
    "--output",
    "-o",
    section="Output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the page and the logs to DIR, a new folder.",
)
@json_option
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SPEC | [SCRIPT | -m MODULE] [ARGS]…")
@click.pass_context
def test_resume(
    context: click.Context,
    /,
    workers: int | None,
    module: bool,
    quick: bool,
    full: bool,
    only: tuple[str, ...],
    steps: int | None,
    link: tuple[str, ...],
    output: Path | None,
    as_json: bool,
    program: tuple[str, ...],
) -> int:
    """Test whether a program resumes exactly after a fault.

    Runs it twice without a fault, and then with faults: a worker is killed in an epoch, at its end, while a checkpoint
    is written; the chief; SIGTERM, as at a preemption; a whole node; a full disk. Each run is restarted from its own
    checkpoint, and must go on as if nothing had happened. Each step is compared: loss and metrics, variables, learning
    rate, batches, random numbers; at the end, files.

    All tasks run on this machine, in copies of the current folder; the program needs no change.

    \b
    distlaunch test-resume train.py --epochs 3
    distlaunch test-resume --quick --steps 200 -n 4 train.py

    Exit status: 0 resume is exact, 1 it is not, 3 the program fails without a fault.
    """
    from launcher.errors import UsageError
    from launcher.exporters.page_writing import write_proof
    from launcher.proof.text import render_proof
    from launcher.python.resume_test import opened_folder, run_resume_test

    if quick + full + bool(only) > 1:
        raise UsageError("--quick, --full and --only cannot be combined", hint="use one of them")
    if program and is_spec(program[0]) and not module:
        spec = load_changed(context, Path(program[0]), program[1:])
    else:
        spec = make_local_spec(context, program, module=module, workers=workers)
    said = ["\n"]

    def say(text: str) -> None:
        said.append(text)
        click.echo(text, nl=False, err=True)

    try:
        with opened_folder(output) as folder:
            proof = run_resume_test(
                spec,
                folder,
                choice="quick" if quick else "full" if full else "usual",
                last_step=steps,
                links=link,
                only=only,
                say=say,
            )
    except BaseException:
        if not said[-1].endswith("\n"):
            click.echo(err=True)  # the error has a line of its own
        raise
    page = write_proof(folder, proof, warn=lambda line: click.echo(f"Warning: {line}", err=True))
    if as_json:
        click.echo(proof.model_dump_json(indent=2))
    else:
        click.echo("\n".join(render_proof(proof)))
    if page:
        click.echo(f"Page: {page}", err=as_json)  # with --json, stdout has nothing but JSON
    return 0 if proof.exact else 1

"""The commands that write manifests for other systems."""

from __future__ import annotations

import re
from pathlib import Path

import click

from launcher.cli.changes import setting_option, variable_option
from launcher.cli.completion import complete_specs
from launcher.cli.programs import SpecCommand, load_changed
from launcher.cli.sections import Group, option
from launcher.cli.values import OneOf

STDOUT = "-"
_KINDS = ("jobset", "job", "tfjob", "trainjob")


@click.group(cls=Group)
def export() -> None:
    """Write manifests that run a spec without distlaunch."""


def _parse_volumes(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Parses `CLAIM:PATH` texts."""
    volumes = {}
    for text in texts:
        claim, colon, path = text.partition(":")
        if not colon or not path.startswith("/") or not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", claim):
            raise click.BadParameter(f"expected CLAIM:PATH like checkpoints:/checkpoints, not {text}")
        volumes[claim] = path
    return volumes


@export.command(cls=SpecCommand)
@option(
    "--as",
    "kind",
    type=OneOf(_KINDS),
    default="jobset",
    default_text="jobset",
    help="Write a JobSet, an Indexed Job, a TFJob, or a TrainJob with its runtime.",
)
@option("--image", metavar="IMAGE", help="Use this container image.")
@option(
    "--volume",
    "volumes",
    metavar="CLAIM:PATH",
    multiple=True,
    callback=_parse_volumes,
    help="Mount a persistent volume claim in all pods; repeatable.",
)
@option(
    "--output", "-o", type=click.Path(), metavar="FILE", default=STDOUT, default_text="stdout", help="Write a new FILE."
)
@setting_option
@variable_option
@click.argument("spec", type=click.Path(path_type=Path), shell_complete=complete_specs)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--] [ARGS]…")
@click.pass_context
def kubernetes(
    context: click.Context,
    /,
    spec: Path,
    arguments: tuple[str, ...],
    kind: str,
    image: str | None,
    volumes: dict[str, str],
    output: str,
) -> None:
    """Write manifests for `kubectl apply` that run a spec.

    \b
    distlaunch export kubernetes cluster.yaml | kubectl apply --server-side -f -
    distlaunch export kubernetes two_nodes.yaml --image registry/train:1

    SPEC has `nodes: {from: kubernetes, …}`; with --image, each task of any spec gets a pod. ARGS are appended to the
    arguments of its program. Keras is patched, steps are counted, and `kubectl describe` shows why a task failed.
    Rejects fields that no manifest can express.
    """
    from launcher.commands.export import read_export
    from launcher.kubernetes.export import render_export
    from launcher.kubernetes.exported import KINDS
    from launcher.spec.writing import write_new

    cluster = load_changed(context, spec, arguments, check=False)
    chosen = next(known for known in KINDS if known == kind)
    text = render_export(read_export(cluster, chosen, image, volumes))
    if output == STDOUT:
        click.echo(text, nl=False)
        return
    write_new(Path(output), text, force=False)

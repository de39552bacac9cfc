"""Every option and every spec field named in a message or document exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

import click

from launcher.cli.main import cli
from launcher.spec.models import ClusterSpec
from launcher.spec.parts import Model
from tests.harness.documents import PAGES
from tests.harness.places import ROOT

OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
FIELD = re.compile(r"(?<![\w.])(timeouts|restart|keras|sync|ssh|program)\.(?!distribution\b)([a-z_]+)(?![\w.(])")
"""`keras.distribution` is a module of Keras."""
FOREIGN: Mapping[str, set[str]] = {
    "fish": {"--no-files", "--command", "--arguments"},
    "gcloud compute ssh": {"--command", "--zone"},
    "click": {"--help"},
    "uvx": {"--from", "--with"},
    "tests.sim.storm": {"--defect", "--whole", "--seeds"},
    "TensorFlow": {"--tf_xla_persistent_cache_directory"},
    "Slurm": {
        "--constraint",
        "--export",
        "--external-launcher",
        "--full",
        "--gpus-per-node",
        "--het-group",
        "--job-name",
        "--jobid",
    }
    | {"--mpi", "--no-kill", "--no-requeue", "--nodelist", "--ntasks", "--open-mode", "--overlap", "--parsable"}
    | {"--requeue", "--signal", "--states", "--time"},
    "kubectl": {"--field-selector", "--follow", "--force", "--grace-period", "--ignore-not-found", "--output"}
    | {"--output-watch-events", "--selector", "--wait", "--watch", "--cascade", "--filename"}
    | {"--context", "--from-literal", "--server-side"},
    "the first process of a pod": {"--sync", "--termination-log", "--tfjob", "--no-keras-patch", "--no-progress"}
    | {"--keep-own-tf-config", "--start-timeout", "--stop-grace"},
    "iptables": {"--dport"},
    "git": {"--cached", "--others", "--exclude-standard"},
    "ansible-inventory": {"--list"},
    "docker": {"--rm", "--volumes", "--profile"},
    "pytest": {"--all", "--pdb", "--since", "--versions"},
    "the benchmarks": {"--runs", "--keep", "--document"},
    "nvidia-smi": {"--query-compute-apps", "--query-gpu", "--format"},
    "tensorboard": {"--logdir", "--host", "--port", "--reload_interval"},
    "the demo": {"--epochs", "--batch-per-replica", "--global-batch", "--shard-by", "--model-dir", "--checkpoints"}
    | {"--log-dir"},
    "examples": {"--name", "--api-key", "--password"},
}
"""Options of other programs that are named in the sources and documents."""


def options_of(command: click.Command) -> set[str]:
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    own = {name for parameter in command.params for name in parameter.opts}
    return own.union(*(options_of(each) for each in inner))


def texts() -> Iterator[tuple[str, str]]:
    """Every string in the sources and every document, with its place."""
    for package in ("launcher", "worker_entry"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    for path in PAGES:
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_every_option_named_in_messages_and_documents_exists() -> None:
    known = options_of(cli).union(*FOREIGN.values())
    assert {"--max-restarts", "--workers", "--no-check"} <= known
    unknown = {(place, option) for place, text in texts() for option in OPTION.findall(text) if option not in known}
    assert unknown == set()


def test_the_list_of_foreign_options_has_no_unused_entry() -> None:
    named = {option for _, text in texts() for option in OPTION.findall(text)}
    assert set().union(*FOREIGN.values()) <= named


def test_every_spec_field_named_in_messages_and_documents_exists() -> None:
    wrong = set()
    for place, text in texts():
        for part, name in FIELD.findall(text):
            model = ClusterSpec.model_fields[part].annotation
            fields = model.model_fields if isinstance(model, type) and issubclass(model, Model) else {}
            if fields and name not in fields:
                wrong.add((place, f"{part}.{name}"))
    assert wrong == set()

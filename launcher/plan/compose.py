"""A Compose file that replaces a spec's machines by containers: one for each, and one for the controller.

Its image is built from `docker/Dockerfile`, which defines the folders, user and commands that this module names.
"""

from __future__ import annotations

import yaml

from launcher.spec.models import ClusterSpec
from launcher.spec.rehearsal import rehearse
from launcher.spec.strategies import FRAMEWORKS

PROJECT = "/project"
HOME = "/home/trainer"
IMAGE = "${DISTLAUNCH_IMAGE:-distlaunch-node}"

_HEADER = """\
# Rehearses {name} in containers on one machine. Written by `distlaunch compose`.
#
#   docker build -t distlaunch-node -f docker/Dockerfile .         once, in a clone of distlaunch
#   docker compose -f THIS_FILE run --rm controller                runs {spec}
#   docker compose -f THIS_FILE down --volumes                     removes everything
#
# Keep this file in the folder with the program and the spec, which every node sees as {project}, or set PROJECT to
# that folder. Other variables: NODE_MEMORY, NODE_CPUS, DISTLAUNCH_IMAGE.
"""
_OTHER_IMAGE = """\
#
# The image has TensorFlow and Keras. For {framework}, build another from these lines, and set DISTLAUNCH_IMAGE to it:
#   FROM distlaunch-node
#   USER root
#   RUN pip install {package}
#   USER trainer
"""


def render_compose(spec: ClusterSpec, path: str, count: int) -> str:
    """Returns the text of the Compose file.

    Args:
        spec: the spec whose machines the containers replace.
        path: the spec's file, relative to the folder that will hold the Compose file.
        count: the number of containers; see `rehearse`.

    Raises:
        UsageError: see `rehearse`.
    """
    nodes = [node.host for node in rehearse(spec, count, "--nodes").nodes]
    shared = [_literal(spec.checkpoint_directory)] if spec.checkpoint_directory is not None else []
    checkpoints = [f"checkpoints:{directory}" for directory in shared]
    project = f"${{PROJECT:-.}}:{PROJECT}"
    directory = _directory(spec)
    elsewhere = [f"${{PROJECT:-.}}:{_literal(directory)}"] if directory is not None else []
    node = {
        "image": IMAGE,
        "networks": ["cluster"],
        "mem_limit": "${NODE_MEMORY:-4g}",
        "memswap_limit": "${NODE_MEMORY:-4g}",
        "cpus": "${NODE_CPUS:-1.0}",
        "volumes": ["keys:/keys:ro", project, *elsewhere, *checkpoints],
        "depends_on": {"keys": {"condition": "service_completed_successfully"}},
    }
    keys = {
        "image": IMAGE,
        "user": "root",
        "network_mode": "none",
        "command": ["make_keys", "/runs", *shared],
        "healthcheck": {"disable": True},
        "volumes": ["keys:/keys", "runs:/runs", *checkpoints],
    }
    controller = {
        "image": IMAGE,
        "profiles": ["controller"],
        "networks": ["cluster"],
        "entrypoint": ["distlaunch"],
        "command": ["up", _literal(path), "--rehearsal", str(count)],
        "environment": [*spec.env_from, *filter(None, [spec.notify and spec.notify.webhook_from])],
        "healthcheck": {"disable": True},
        "stop_grace_period": "30s",
        "volumes": ["keys:/keys:ro", project, f"runs:{HOME}/.local/state/distlaunch"],
        "depends_on": {host: {"condition": "service_healthy"} for host in nodes},
    }
    file = {
        "x-node": node,
        "services": {"keys": keys, "controller": controller, **dict.fromkeys(nodes, node)},
        "networks": {"cluster": {}},
        "volumes": {name: {} for name in ("keys", "runs", *(["checkpoints"] if shared else []))},
    }
    header = _HEADER.format(name=spec.name, spec=path, project=PROJECT)
    if spec.framework in FRAMEWORKS:
        header += _OTHER_IMAGE.format(framework=FRAMEWORKS[spec.framework][0], package=spec.framework)
    return f"{header}\n{yaml.dump(file, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)}"


class _Dumper(yaml.SafeDumper):
    """Writes the definition that all node services share only once, as the anchor `node`."""

    def generate_anchor(self, node: yaml.Node) -> str:
        return "node"

    def ignore_aliases(self, data: object) -> bool:
        return not isinstance(data, dict) or "depends_on" not in data or "profiles" in data


def _directory(spec: ClusterSpec) -> str | None:
    """The path at which a container needs the user's folder a second time, because the program runs there."""
    given = spec.working_directory or PROJECT
    if given.startswith("~/"):
        return HOME + given[1:]
    return given if given.startswith("/") and given != PROJECT else None


def _literal(text: str) -> str:
    """The text, with every `$` escaped for Compose."""
    return text.replace("$", "$$")

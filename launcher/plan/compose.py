"""A Compose file that stands for a spec's machines: a container for each, and one for the controller. Pure.

The image that it names is built from `docker/Dockerfile`, whose folders, user and commands are named here.
"""

from __future__ import annotations

import json

from launcher.spec.models import ClusterSpec
from launcher.spec.rehearsal import rehearse

PROJECT = "/project"
HOME = "/home/trainer"

_HEADER = """\
# {name} in containers, to be rehearsed on one machine. Written by `distlaunch compose`.
#
#   docker build -t distlaunch-node -f docker/Dockerfile .         once, in a clone of distlaunch
#   docker compose -f THIS_FILE run --rm controller                runs {spec}
#   docker compose -f THIS_FILE down --volumes                     leaves nothing
#
# It belongs into the folder that has the program and the spec, which every node sees as {project}; or name that
# folder in PROJECT. Other variables: NODE_MEMORY, NODE_CPUS, DISTLAUNCH_IMAGE.
"""

_NODE = """
x-node: &node
  image: ${{DISTLAUNCH_IMAGE:-distlaunch-node}}
  networks: [cluster]
  mem_limit: ${{NODE_MEMORY:-4g}}
  memswap_limit: ${{NODE_MEMORY:-4g}}
  cpus: ${{NODE_CPUS:-1.0}}
  volumes: {volumes}
  depends_on:
    keys: {{condition: service_completed_successfully}}
"""

_SERVICES = """
services:
  keys:
    image: ${{DISTLAUNCH_IMAGE:-distlaunch-node}}
    user: root
    network_mode: none
    command: {make_keys}
    healthcheck: {{disable: true}}
    volumes: {volumes}

  controller:
    image: ${{DISTLAUNCH_IMAGE:-distlaunch-node}}
    profiles: [controller]
    networks: [cluster]
    entrypoint: [distlaunch]
    command: {command}
    environment: {environment}
    healthcheck: {{disable: true}}
    stop_grace_period: 30s
    volumes: {controller_volumes}
    depends_on: {depends_on}

"""


def render_compose(spec: ClusterSpec, path: str, count: int) -> str:
    """The file's text.

    Args:
        spec: whose machines the containers stand for.
        path: the spec's file, relative to the folder that will hold the Compose file.
        count: how many containers; `rehearse` says what becomes of the spec then.

    Raises:
        UsageError: of `rehearse`.
    """
    nodes = [node.host for node in rehearse(spec, count, "--nodes").nodes]
    shared = [_literal(spec.checkpoint_directory)] if spec.checkpoint_directory is not None else []
    checkpoints = [f"checkpoints:{directory}" for directory in shared]
    project = f"${{PROJECT:-.}}:{PROJECT}"
    directory = _directory(spec)
    elsewhere = [f"${{PROJECT:-.}}:{_literal(directory)}"] if directory is not None else []
    parts = [
        _HEADER.format(name=spec.name, spec=path, project=PROJECT),
        _NODE.format(volumes=_flow(["keys:/keys:ro", project, *elsewhere, *checkpoints])),
        _SERVICES.format(
            make_keys=_flow(["make_keys", "/runs", *shared]),
            volumes=_flow(["keys:/keys", "runs:/runs", *checkpoints]),
            command=_flow(["up", _literal(path), "--rehearsal", str(count)]),
            environment=_flow(spec.env_from),
            controller_volumes=_flow(["keys:/keys:ro", project, f"runs:{HOME}/.local/state/distlaunch"]),
            depends_on=_flow({node: {"condition": "service_healthy"} for node in nodes}),
        ),
        *(f"  {node}: *node\n" for node in nodes),
        "\nnetworks: {cluster: {}}\n",
        f"volumes: {_flow({name: {} for name in ('keys', 'runs', *(['checkpoints'] if shared else []))})}\n",
    ]
    return "".join(parts)


def _directory(spec: ClusterSpec) -> str | None:
    """Where the program runs in a container, if that is to be the user's folder, too."""
    given = spec.working_directory or PROJECT
    if given.startswith("~/"):
        return HOME + given[1:]
    return given if given.startswith("/") and given != PROJECT else None


def _literal(text: str) -> str:
    """Text in which a `$` is no variable of Compose's."""
    return text.replace("$", "$$")


def _flow(value: object) -> str:
    """In YAML's flow style, which JSON is."""
    return json.dumps(value, ensure_ascii=False)

"""`-e NAME[=VALUE]`: environment variables from the command line, as for docker."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pydantic_core import ValidationError

from launcher.errors import UsageError
from launcher.spec.command_line import check_text
from launcher.spec.explain import find_errors, refuse_options
from launcher.spec.models import ClusterSpec


def name_of(text: str) -> str:
    """The name in `NAME` or `NAME=VALUE`."""
    return text.partition("=")[0]


def set_variables(spec: ClusterSpec, texts: Sequence[str], environ: Mapping[str, str]) -> ClusterSpec:
    """The spec with these variables for all tasks; of several values for a name, the last one counts.

    Args:
        spec: variables of the same names in it and in its nodes are replaced.
        texts: `NAME=VALUE`, or `NAME` for the value in `environ`; a variable that is not set there is not passed.
        environ: distlaunch's environment.

    Raises:
        UsageError: a name is not a valid variable name, or distlaunch sets this variable itself.
    """
    if not texts:
        return spec
    given: dict[str, str | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"-e {name[:80]!r}: expected NAME or NAME=VALUE, with letters, digits and _ in the name")
        check_text(value)
        given[name] = value if equals else None
    values = {name: value for name, value in given.items() if value is not None}
    # The values of these variables are read later, and never shown.
    env_from = [name for name in spec.env_from if name not in given]
    env_from += [name for name, value in given.items() if value is None and name in environ]
    try:
        return spec.with_nodes(
            node.changed(env=_without(node.env, given)) if node.env.keys() & given else node for node in spec.nodes
        ).changed(env={**_without(spec.env, given), **values}, env_from=env_from)
    except ValidationError as error:
        lines = []
        for problem in find_errors(error):
            part = problem.path[-1]
            lines.append(f"-e {part if isinstance(part, str) else env_from[part]}: {problem.message}")
        raise refuse_options(lines) from None


def check_variables(spec: ClusterSpec, environ: Mapping[str, str]) -> None:
    """Checks that every variable of `env_from` and `notify` is set, as `load_spec` does for a file.

    Raises:
        UsageError: a variable is not set.
    """
    missing = [name for name in spec.env_from if name not in environ]
    if missing:
        raise UsageError(f"env_from: {', '.join(missing)} is not set in this environment", hint="export it first")
    name = spec.notify and spec.notify.webhook_from
    if name is not None and name not in environ:
        raise UsageError(f"notify.webhook_from: {name} is not set in this environment", hint="export it first")


def _without(env: Mapping[str, str], names: Mapping[str, object]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}

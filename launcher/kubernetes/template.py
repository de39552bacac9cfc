"""Reads the manifest of a pod that a user has written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import UsageError


def read_template(text: str, path: str) -> Mapping[str, Any]:
    """The manifest.

    Args:
        text: one object, as YAML or JSON: a Pod, or a PodTemplate's `template`.
        path: its file, for errors.

    Raises:
        UsageError: the text is not such a manifest.
    """
    import yaml  # only pods that have a manifest need it

    try:
        template = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
    is_pod = isinstance(template, dict) and isinstance(template.get("spec"), dict)
    if not is_pod or not isinstance(template["spec"].get("containers", []), list):
        raise UsageError(f"{path} is not the manifest of a pod", hint="write one with `spec:`, like a Pod's")
    found: Mapping[str, Any] = template
    return found

"""Secrets are recognised by their names or their form, and harmless words are shown unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.spec.models import ClusterSpec
from launcher.transports.base import LinkBroken
from launcher.transports.connector import Opening
from launcher.transports.payload import make_payload
from launcher.transports.targets import find_connector
from tests.harness.builders.redaction import SECRET, WITH_SECRETS


def test_errors_of_a_connection_program_hide_its_secret_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = ClusterSpec.model_validate(WITH_SECRETS)
    with pytest.raises(UsageError) as caught:
        find_connector(spec, spec.nodes[0])
    assert SECRET not in f"{caught.value}{caught.value.hint}"
    connect = tmp_path / "connect"
    connect.write_text('#!/bin/sh\necho "cannot use $*" >&2\nexit 1\n')
    connect.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    said: list[str] = []
    connector = find_connector(spec, spec.nodes[0])
    stream = connector.open(make_payload("clean"), "python3", Opening(note=said.append))
    with pytest.raises(LinkBroken) as broken:
        stream.read(10, 20.0)
    assert "cannot use --password=" in str(broken.value)
    assert SECRET not in str(broken.value)

"""Reading a host's SSH configuration, from `ssh -G` or without OpenSSH."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.spec.models import ClusterSpec
from launcher.transports.targets import find_connector

COVERS = ("launcher/transports/ssh",)


def test_an_unstartable_ssh_is_reported_with_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ssh").write_text("#!/nowhere/sh\n")
    (tmp_path / "ssh").chmod(0o755)
    spec = ClusterSpec.model_validate({"nodes": [{"host": "gpu-a"}], "program": {"script": "train.py"}})
    with pytest.raises(UsageError, match=r"^gpu-a: `ssh -G` cannot be started: No such file or directory$"):
        find_connector(spec, spec.nodes[0])

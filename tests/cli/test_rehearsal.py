"""A spec for real machines, on containers: what remains of it, and the Compose file that replaces its machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.rehearsals import REAL


class TestRehearsal:
    def test_compose_rehearses_with_as_many_nodes_as_the_spec_has(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "specs").mkdir()
        (tmp_path / "specs" / "real.yaml").write_text(REAL)
        ran = distlaunch("compose", "specs/real.yaml", run_dir=False)
        assert (ran.status, ran.stderr) == (0, "")  # WANDB_API_KEY is needed only when it runs
        controller = yaml.safe_load(ran.stdout)["services"]["controller"]
        assert controller["command"] == ["up", "specs/real.yaml", "--rehearsal", "3"]

    def test_compose_rejects_a_spec_outside_the_current_folder(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "here").mkdir()
        (tmp_path / "real.yaml").write_text(REAL)
        ran = distlaunch("compose", "../real.yaml", cwd=tmp_path / "here", run_dir=False)
        assert ran.status == 2
        assert f"Error: ../real.yaml is not below {tmp_path}/here, the only folder that containers see" in ran.stderr
        assert ran.stdout == ""

    @pytest.mark.parametrize("verb", ["up", "plan"])
    def test_a_rehearsal_is_planned_for_containers_instead_of_the_real_nodes(
        self, verb: str, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        (tmp_path / "real.yaml").write_text(REAL)
        how = ["--dry-run"] if verb == "up" else ["--json"]
        ran = distlaunch(verb, "real.yaml", "--rehearsal", "4", *how, run_dir=False, env={"WANDB_API_KEY": "x"})
        assert ran.status == 0, ran.stderr
        if verb == "plan":
            assert [task["node"] for task in json.loads(ran.stdout)["tasks"]][-1] == "node-4"
        assert '"gpu-b.example.org:2222"' in ran.stdout
        assert "10.0.0.1" not in ran.stdout

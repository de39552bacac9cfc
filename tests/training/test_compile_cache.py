"""Compiled code is kept in a private folder, one per version and machine, and the next run uses it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.harness.apart import linux
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch

COVERS = ("worker_entry/program", "worker_entry/agent/tasks/watches.py")

pytestmark = linux


def test_the_second_run_loads_the_compiled_code_of_the_first(distlaunch: Distlaunch, tmp_path: Path) -> None:
    shutil.copy(PROGRAMS / "compiled.py", tmp_path)
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"nodes: [{{host: local, tasks: {{worker: 2}}}}]\nprogram: {{script: compiled.py}}\n"
        f"working_directory: {tmp_path}\ncache: {tmp_path}/cache\n"
    )
    seen = []
    for number in range(2):
        ran = distlaunch("up", "--run-dir", str(tmp_path / f"run-{number}"), str(spec), run_dir=False)
        assert ran.status == 0, ran.stderr
        assert "forked" not in ran.stderr  # the early import had the same variables
        lines = [line for line in ran.stdout.splitlines() if "sum " in line]
        entries = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("cache/tensorflow-*/*.pb")}
        report = json.loads((tmp_path / f"run-{number}" / "report.json").read_text())
        used = report["attempts"][0]["compile_cache"]
        assert f"compile cache: {used['loaded']} entries loaded, {used['stored']} added" in ran.stderr
        seen.append((sorted(lines), entries, used))
    assert len(seen[0][0]) == 2
    assert seen[0][1]
    assert seen[0][:2] == seen[1][:2]
    stored = len(seen[0][1])
    assert stored > 1
    assert [used["stored"] for *_, used in seen] == [stored, 0]
    assert seen[1][-1]["loaded"] == stored

"""The limits of our control group are found with both versions of control groups."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from worker_entry.system.cgroups import cores_limit


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/user.slice/run\n", {"user.slice/run/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        (
            "9:pids:/a\n4:cpu,cpuacct:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "50000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        ("4:cpu:/docker/9f\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ("4:cpuset:/docker/9f\n", {}, math.inf),
    ],
    ids=["v2", "v2 without a limit", "v1", "v1 without a limit", "no CPU controller"],
)
def test_the_core_limit_of_a_control_group_is_found(
    tmp_path: Path, own: str, files: dict[str, str], cores: float
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cores_limit(root=str(tmp_path / "cgroup"), own=str(tmp_path / "own")) == cores


def test_a_system_without_control_groups_has_no_core_limit(tmp_path: Path) -> None:
    assert cores_limit(root=str(tmp_path), own=str(tmp_path / "own")) == math.inf

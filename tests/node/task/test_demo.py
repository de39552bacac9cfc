"""The built-in demo: its data matches DATA.md, and two workers train on it, agree and save once."""

from __future__ import annotations

import ast
import hashlib

import pytest

from tests.harness.processes.demo import DEMO

COVERS = ("worker_entry/demo", "worker_entry/strategies.py", "worker_entry/progress.py", "cluster_specs")


class TestData:
    def test_the_demo_data_file_has_the_hash_in_its_notice(self) -> None:
        content = (DEMO / "digits.npz").read_bytes()
        notice = (DEMO / "DATA.md").read_text(encoding="utf-8")

        assert hashlib.sha256(content).hexdigest() in notice
        assert len(content) < 200_000

    def test_the_notice_of_the_demo_data_meets_its_licence(self) -> None:
        notice = (DEMO / "DATA.md").read_text(encoding="utf-8")

        for needed in (
            "Alpaydin",
            "Kaynak",
            "10.24432/C50P49",
            "creativecommons.org/licenses/by/4.0",
            "changed",
        ):
            assert needed in notice

    def test_the_demo_data_has_the_expected_shapes_values_and_class_balance(self) -> None:
        numpy = pytest.importorskip("numpy")
        with numpy.load(DEMO / "digits.npz", allow_pickle=False) as data:
            assert sorted(data.files) == ["images", "labels"]
            images, labels = data["images"], data["labels"]

        assert images.dtype == labels.dtype == numpy.uint8
        assert images.shape == (1797, 8, 8)
        assert labels.shape == (1797,)
        assert (images.min(), images.max()) == (0, 16)
        counts = numpy.bincount(labels)
        assert len(counts) == 10
        assert counts.min() >= 174
        assert counts.max() <= 183


@pytest.mark.parametrize(
    ("name", "framework"), [("train.py", "tensorflow"), ("train_jax.py", "jax"), ("digits.py", None)]
)
def test_the_demo_imports_its_framework_only_and_not_the_launcher(name: str, framework: str | None) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse((DEMO / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import would not survive being copied"
            imported.add(node.module or "")

    assert imported & {"tensorflow", "jax", "torch"} == ({framework} if framework else set())
    assert not {name.partition(".")[0] for name in imported} & {"distlaunch", "launcher"}

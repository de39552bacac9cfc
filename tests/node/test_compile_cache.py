"""Compiled code is kept in a private folder, one per version and machine, and the next run uses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.apart import linux
from worker_entry.agent.tasks.watches import CacheWatch
from worker_entry.program.compile_cache import GRAPHS, XLA_DIRECTORY, XLA_FLAGS, add_compile_cache
from worker_entry.program.versions import installed_version
from worker_entry.protocol import environment
from worker_entry.protocol.messages import CacheUsed
from worker_entry.protocol.values import Program, TaskStart

COVERS = ("worker_entry/program", "worker_entry/agent/tasks/watches.py")

pytestmark = linux

needs_tensorflow = pytest.mark.skipif(installed_version("tensorflow") is None, reason="TensorFlow is not installed")
WHOLE = b"\x0a\x03key\x12\x02hl\x1a\x01c"
"""An entry as TensorFlow writes it: a key, the HLO, the code."""


def variables(root: Path, **given: str) -> dict[str, str]:
    env = {environment.CACHE: str(root), **given}
    add_compile_cache(env)
    return env


def folder_of(env: dict[str, str]) -> Path:
    return Path(env[XLA_FLAGS].rpartition(f"{XLA_DIRECTORY}=")[2])


def test_no_compile_cache_variable_is_added_without_a_configured_cache() -> None:
    env = {"A": "b"}
    add_compile_cache(env)
    assert env == {"A": "b"}


@needs_tensorflow
def test_the_compile_cache_folder_is_private_and_named_after_the_tensorflow_version(tmp_path: Path) -> None:
    folder = folder_of(variables(tmp_path / "deep" / "cache"))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.name.startswith(f"tensorflow-{installed_version('tensorflow')}-")
    assert folder_of(variables(tmp_path / "deep" / "cache")) == folder


@needs_tensorflow
def test_xla_flags_of_the_user_are_kept_and_override_the_compile_cache(tmp_path: Path) -> None:
    flags = variables(tmp_path, TF_XLA_FLAGS="--tf_xla_auto_jit=2")[XLA_FLAGS].split()
    assert flags[0] == "--tf_xla_auto_jit=2"
    assert flags[1].startswith(f"{XLA_DIRECTORY}={tmp_path}/tensorflow-")
    for own in (f"{XLA_DIRECTORY}=/mine", "/etc/flags"):  # the second is a file with flags
        assert variables(tmp_path, TF_XLA_FLAGS=own)[XLA_FLAGS] == own


@needs_tensorflow
@pytest.mark.parametrize("harm", ["open", "link"])
def test_a_compile_cache_folder_that_is_not_private_is_refused(tmp_path: Path, harm: str) -> None:
    folder = folder_of(variables(tmp_path))
    if harm == "open":
        folder.chmod(0o770)
    else:
        folder.rename(tmp_path / "other")
        folder.symlink_to(tmp_path / "other")
    with pytest.raises(PermissionError, match="this compile cache is not a private folder of yours"):
        variables(tmp_path)


@needs_tensorflow
def test_truncated_compile_cache_entries_are_removed_and_complete_entries_kept(tmp_path: Path) -> None:
    folder = folder_of(variables(tmp_path))
    (folder / "whole.pb").write_bytes(WHOLE)
    for length in range(len(WHOLE)):
        if length not in (5, 9):  # the ends of fields
            (folder / f"cut-{length}.pb").write_bytes(WHOLE[:length])
    (folder / "written-now.tmp").write_bytes(WHOLE[:4])
    variables(tmp_path)
    assert {path.name for path in folder.iterdir()} == {"whole.pb", "written-now.tmp"}


def add_entry(graphs: Path, key: str) -> Path:
    """Adds an entry as Inductor does: `ab1` becomes a file in `ab/ab1/`, first under another name."""
    folder = graphs / key[:2] / key
    folder.mkdir(parents=True, exist_ok=True)
    entry = folder / "graph"
    entry.with_suffix(".tmp").write_bytes(b"code")
    return entry.with_suffix(".tmp").rename(entry)


def test_loaded_and_stored_torch_graphs_are_counted(tmp_path: Path) -> None:
    graphs = tmp_path / f"torch-2.13.0-1234-{os.geteuid()}" / GRAPHS
    entries = [add_entry(graphs, key) for key in ("ab1", "ab2", "cd1")]
    watch = CacheWatch()
    start = TaskStart("worker:0", Program("script", "train.py"), {environment.CACHE: str(tmp_path)})
    with watch.starting([start]):
        entries[2].read_bytes()  # the agent reads it before the tasks start
    assert len(list(graphs.glob("*/*"))) == 3  # a listed folder is not an entry
    for _ in range(2):
        entries[0].read_bytes()
    for key in ("ab3", "ef1"):
        add_entry(graphs, key).read_bytes()
    assert watch.end(1) == CacheUsed(1, loaded=1, stored=2)
    assert watch.end(2) is None

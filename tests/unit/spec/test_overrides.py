"""Values that override a spec follow the spec's rules, and errors name the option."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from launcher.errors import UsageError
from launcher.spec.field_options import DEVICES, GPUS_PER_WORKER, KEEP_WARM
from launcher.spec.models import ClusterSpec
from launcher.spec.rehearsal import rehearse
from launcher.spec.settings import set_fields, set_option
from tests.harness.places import ROOT
from tests.harness.processes.commands import Distlaunch

FAR = {"nodes": [{"host": "gpu-a"}, {"host": "gpu-b"}]}
PS = {
    "nodes": [{"host": "a", "tasks": {"chief": 1, "worker": 1}}, {"host": "b", "tasks": {"ps": 1}}],
    "strategy": "parameter_server",
}


def spec_of(fields: dict[str, Any]) -> ClusterSpec:
    return ClusterSpec.model_validate(fields)


def test_options_replace_only_the_spec_values_that_they_set() -> None:
    spec = spec_of({**FAR, "timeouts": {"drain_s": 5}, "restart": {"max_restarts": 2}})
    changed = set_fields(spec, [set_option(KEEP_WARM, 7.0), set_option(GPUS_PER_WORKER, "2")])
    assert (changed.timeouts.drain_s, changed.keep_warm_s, changed.restart.max_restarts) == (5.0, 7.0, 2)
    assert [node.gpus_per_worker for node in changed.nodes] == [2, None]
    assert spec.keep_warm_s == 0.0


def test_all_invalid_options_are_named_in_one_error() -> None:
    with pytest.raises(UsageError, match=r"^the command line has 2 errors; nothing was started\n") as caught:
        set_fields(spec_of(FAR), [set_option(KEEP_WARM, "x"), set_option(DEVICES, 65)])
    assert caught.value.evidence == (
        "--devices: expected at most 64, got '65': no machine has more GPUs to emulate",
        "--keep-warm: expected a number of seconds, got 'x'",
    )


@pytest.mark.parametrize(
    ("fields", "count", "message"),
    [
        (PS, 1, "--rehearsal 1: strategy: parameter_server needs a ps; add `ps: 1` to the `tasks:` of a node"),
        (
            {"nodes": [{"host": "local"}], "strategy": "mirrored"},
            2,
            "--rehearsal 2: strategy: mirrored runs one process on one node, but this spec has 2 tasks; ",
        ),
        (
            {"nodes": [{"host": "local"}], "tensorboard": True},
            2,
            "--rehearsal 2: tensorboard: has no logs to show; name a `log_directory:` that all nodes share",
        ),
    ],
)
def test_an_invalid_rehearsal_is_a_usage_error(fields: dict[str, Any], count: int, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        rehearse(spec_of(fields), count)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "far.yaml", "--tensorboard"], "--tensorboard: has no logs to show; name a `log_directory:`"),
        (["up", "ps.yaml", "--rehearsal", "1"], "--rehearsal 1: strategy: parameter_server needs a ps"),
        (["plan", "ps.yaml", "--rehearsal", "1"], "--rehearsal 1: strategy: parameter_server needs a ps"),
        (["compose", "ps.yaml", "--nodes", "1"], "--nodes 1: strategy: parameter_server needs a ps"),
        (["local", "--max-restarts", "-1"], "--max-restarts: expected at least 0, got '-1'"),
        (["local", "--keep-warm", "2d"], "--keep-warm: expected at most 86,400, got '172800.0': nodes should"),
        (["local", "--python", ""], "--python: is empty; fill it in, or remove the field"),
        (["local", "--devices", "two"], "--devices: expected a whole number, got 'two'"),
        (
            ["local", "--max-restarts", "2000000"],
            "--max-restarts: expected at most 1,000,000, got '2000000': a",
        ),
        (
            ["local", "--gpus-per-worker", "65"],
            "--gpus-per-worker: expected at most 64, got '65': no machine has more",
        ),
        (
            ["local", "--oversubscribe", "--workers", "100001"],
            "--workers: nodes: 100,001 tasks are more than",
        ),
    ],
)
def test_an_invalid_option_is_named_and_nothing_is_started(
    in_process: Distlaunch, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "far.yaml").write_text("nodes: [{host: gpu-a}, {host: gpu-b}]\n")
    (tmp_path / "ps.yaml").write_text(
        "nodes: [{host: a, tasks: {chief: 1, worker: 1}}, {host: b, tasks: {ps: 1}}]\nstrategy: parameter_server\n"
    )
    ran = in_process(*words, run_dir=False, env={"XDG_STATE_HOME": str(tmp_path / "state")})
    assert ran.status == 2
    assert ran.stderr.startswith(f"Error: {message}")
    assert "[usage]" in ran.stderr
    assert ran.stdout == ""
    assert not (tmp_path / "state").exists()


# --- nothing bypasses the checks ---


def test_copying_a_spec_with_changes_always_validates_them() -> None:
    spec = spec_of(FAR)
    assert spec.model_copy() == spec
    with pytest.raises(TypeError, match="use changed"):
        spec.model_copy(update={"tensorboard": True})
    with pytest.raises(ValidationError):
        spec.changed(tensorboard=True)
    with pytest.raises(ValidationError):
        spec.timeouts.changed(lease_s=0)


def test_no_module_constructs_a_spec_without_validation() -> None:
    for path in (ROOT / "launcher").rglob("*.py"):
        called = {node.attr for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Attribute)}
        assert "model_construct" not in called, path

"""One GPU and whichever frameworks can use it: shares, memory, measurements, and what is left behind.

Two processes that share a GPU compute each for itself: NCCL connects none that do. `DISTLAUNCH_JAX_PYTHON` and
`DISTLAUNCH_TORCH_PYTHON` name Pythons with JAX and PyTorch; TensorFlow belongs to the Python that runs the tests.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.available import HAS_GPU, find_program
from tests.harness.places import PROGRAMS
from tests.harness.processes.background import BackgroundRun, running
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.witness import wait_until
from worker_entry.system.gpu_holders import find_gpus
from worker_entry.system.nvml import Nvml

COVERS = (
    "launcher/plan/resources.py",
    "worker_entry/agent/gpus",
    "worker_entry/system/gpu_holders.py",
    "worker_entry/system/nvml.py",
)
pytestmark = pytest.mark.gpu

PROGRAM = str(PROGRAMS / "gpu_hold.py")
MIB = 512
"""What each process holds: little, because others may use the GPU too."""
PYTHONS = {
    "jax": os.environ.get("DISTLAUNCH_JAX_PYTHON", sys.executable),
    "tensorflow": sys.executable,
    "torch": os.environ.get("DISTLAUNCH_TORCH_PYTHON", sys.executable),
}
SEES = {
    "jax": "import jax; assert jax.devices()[0].platform == 'gpu'",
    "tensorflow": "import tensorflow as tf; assert tf.config.list_physical_devices('GPU')",
    "torch": "import torch; assert torch.cuda.is_available()",
}


@functools.cache
def sees_gpu(framework: str) -> bool:
    return find_program(PYTHONS[framework], "-c", SEES[framework]) is not None


@pytest.fixture(params=sorted(PYTHONS))
def framework(request: pytest.FixtureRequest) -> str:
    """Each framework that can use the GPU."""
    if not HAS_GPU:
        pytest.skip("no NVIDIA GPU")
    name: str = request.param
    if not sees_gpu(name):
        pytest.skip(f"no Python whose {name} can use the GPU")
    return name


@pytest.fixture
def until(tmp_path: Path) -> Path:
    """The file that ends the programs."""
    return tmp_path / "until"


def words(framework: str, until: Path, *options: str, mib: int = MIB, workers: int = 1) -> list[str]:
    """The arguments of `distlaunch local` with this program on the first GPU."""
    # TensorFlow's processes do not meet, so they get no cluster.
    kind = ["--strategy", "one_device"] if framework == "tensorflow" else ["--framework", framework, "-n", str(workers)]
    python = ["--python", PYTHONS[framework], "--set", "nodes[0].gpus=[0]"]
    return [*kind, *python, *options, PROGRAM, framework, str(mib), str(until)]


def find_pids() -> set[int]:
    """The processes that use the first GPU, by the driver; in a container, it may know them by other numbers."""
    return set(Nvml().read_processes(0) or ())


def read_status(run: BackgroundRun) -> dict[str, Any]:
    done = subprocess.run(
        distlaunch_command("status", "--json", str(run.directory)), capture_output=True, text=True, check=True
    )
    status: dict[str, Any] = json.loads(done.stdout)
    return status


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_use_their_share_of_the_gpu_and_its_use_is_shown_everywhere(
    tmp_path: Path, framework: str, until: Path, workers: int
) -> None:
    if workers == 2 and framework == "tensorflow":
        workers = 1  # a strategy of one process; TensorFlow's processes would wait for each other
    [before, *_] = Nvml().read()
    assert before.memory is not None
    metrics = tmp_path / "run.prom"
    options = ("--set", f"metrics_file={metrics}", "--set", "sample_every_s=0.5")
    with running(tmp_path, *words(framework, until, *options, workers=workers)) as run:
        run.wait_for(b"computes on 1 GPU, CUDA_VISIBLE_DEVICES=0\n", *range(workers))
        held = before.memory + workers * MIB * 2**20

        def is_shown() -> bool:
            [node] = read_status(run)["nodes"]
            return any(gpu["gpu"] == "0" and gpu["memory"] >= held for gpu in node["gpus"])

        wait_until(is_shown, "status shows the memory")
        status = read_status(run)
        assert [task["gpus"] for task in status["tasks"]] == [["0"]] * workers
        wait_until(lambda: metrics.exists() and "distlaunch_gpu_memory_used_bytes" in metrics.read_text(), "metrics")
        until.touch()
        assert run.end() == 0, run.said
    samples = map(json.loads, (run.directory / "attempt-1" / "nodes.samples.jsonl").read_text().splitlines())
    assert any(gpu["use"] for sample in samples for gpu in sample["use"].get("gpus", ()))


def test_too_little_memory_on_the_gpu_is_named(distlaunch: Distlaunch, tmp_path: Path, framework: str) -> None:
    [gpu, *_] = Nvml().read()
    assert gpu.memory_total is not None
    mib = 2 * gpu.memory_total // 2**20
    ran = distlaunch("local", *words(framework, tmp_path / "never", mib=mib))
    assert ran.status != 0
    verdict = ran.report["attempts"][0]["verdict"]
    assert verdict["reference"] == "out-of-memory", ran.stderr
    assert "reduce the batch size" in verdict["hint"]


def test_a_killed_controller_leaves_no_process_on_the_gpu(tmp_path: Path, framework: str, until: Path) -> None:
    before = find_pids()
    with running(tmp_path, *words(framework, until, "--set", "timeouts.lease_s=2")) as run:
        run.wait_for(b"computes on 1 GPU", 0)
        wait_until(lambda: find_pids() != before, "the driver sees the process")
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    wait_until(lambda: find_pids() <= before, "the driver sees no new process")


def test_a_gpu_that_another_process_uses_is_found_before_the_start(
    distlaunch: Distlaunch, tmp_path: Path, framework: str, until: Path
) -> None:
    command = [PYTHONS[framework], PROGRAM, framework, str(MIB), str(until)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline().startswith("computes on ")
            [gpu] = find_gpus(["0"]).gpus
            assert gpu.holders
            ran = distlaunch("local", *words(framework, until, "--wait-gpus=1s"))
        finally:
            until.touch()
    assert ran.status == 3
    assert ran.report["attempts"][0]["verdict"]["reference"] == "gpus-busy"
    assert re.search(r"GPU 0 .*used by ", ran.stderr), ran.stderr

"""Every strategy trains the demo, and the launcher does its part by its rules. Real TensorFlow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes.commands import Distlaunch, Ran
from worker_entry.protocol.strategy_names import CLASSES

COVERS = (
    "launcher/spec/strategies.py",
    "launcher/plan",
    "worker_entry/strategies.py",
    "cluster_specs",
    "worker_entry/task",
)

DEMO = ["-m", "worker_entry.demo.train"]


@pytest.fixture
def look(tmp_path: Path) -> str:
    """A program that prints which strategy it was given, and with which devices and options."""
    path = tmp_path / "look.py"
    path.write_text(
        "import json, os\n"
        "from worker_entry import strategies\n"
        "strategy = strategies.from_environment()\n"
        "import tensorflow as tf\n"
        "extended = strategy.extended\n"
        "ops = getattr(extended, '_cross_device_ops', None)\n"
        "options = getattr(extended, '_communication_options', None)\n"
        "print(json.dumps({'name': type(strategy).__name__, 'replicas': strategy.num_replicas_in_sync,\n"
        "    'cpus': len(tf.config.list_logical_devices('CPU')), 'ops': type(ops).__name__,\n"
        "    'communication': options.implementation.value if options is not None else None,\n"
        "    'tf_config': 'TF_CONFIG' in os.environ}))\n"
    )
    return str(path)


def looked(ran: Ran) -> dict[str, Any]:
    assert ran.status == 0, ran.stderr
    loaded: dict[str, Any] = json.loads(ran.line(r'\{"name": .*\}')[0])
    return loaded


@pytest.mark.parametrize(
    ("strategy", "name", "replicas"),
    [
        ("one_device", "OneDeviceStrategy", 1),
        pytest.param("mirrored", "MirroredStrategy", 4, marks=pytest.mark.smoke),
        ("central_storage", "CentralStorageStrategyV1", 4),
    ],
)
def test_single_process_strategies_get_four_devices(
    warm: Distlaunch, look: str, strategy: str, name: str, replicas: int
) -> None:
    told = looked(warm("local", "--strategy", strategy, "--devices", "4", look))
    assert told["name"].startswith(name.removesuffix("V1"))
    assert (told["replicas"], told["cpus"], told["tf_config"]) == (replicas, 4, False)


def test_the_spec_selects_the_all_reduce_of_devices_and_workers(warm: Distlaunch, look: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    program = f"program: {{script: {look}}}\n"
    spec.write_text(
        f"nodes: [{{host: local}}]\nstrategy: mirrored\ndevices: 2\ncross_device: reduction_to_one_device\n{program}"
    )
    assert looked(warm("up", str(spec)))["ops"] == "ReductionToOneDevice"
    spec.write_text(f"nodes: [{{host: local, tasks: {{worker: 2}}}}]\ncommunication: ring\n{program}")
    told = looked(warm("up", "--run-dir", str(tmp_path / "second"), str(spec), run_dir=False))
    assert told["communication"] == "RING"


def test_the_error_without_a_tpu_names_the_missing_variable(warm: Distlaunch, look: str) -> None:
    ran = warm("local", "--strategy", "tpu", look)
    assert ran.status == 1
    assert "RuntimeError: no TPU: TPU_NAME is not set, and this is not a TPU VM" in ran.stderr


@pytest.mark.smoke
def test_parameter_servers_train_the_demo_while_a_killed_worker_restarts_alone(
    warm: Distlaunch, tmp_path: Path
) -> None:
    ran = warm(
        *("local", "--strategy", "parameter_server", "--workers", "2", "--evaluator"),
        *("--chaos", "kill:worker:1@seconds=4", "--max-restarts", "0"),
        *(
            *DEMO,
            "--epochs",
            "30",
            "--checkpoints",
            str(tmp_path / "checkpoints"),
            "--model-dir",
            str(tmp_path / "model"),
        ),
    )
    assert ran.status == 0, ran.stderr
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["digits.keras"]
    steps = 30 * 44
    done = ran.line(r"chief:0: validation accuracy (0\.\d+), (\d+) steps", "chief-0")
    assert float(done[1]) > 0.95
    assert steps <= int(done[2]) <= steps + 1  # the dead worker's last step may be done again
    assert "worker:1 ended with SIGKILL (signal 9); restarting it while the others continue\n" in ran.stderr
    assert "worker:1 was restarted individually, after SIGKILL (signal 9)" in ran.stderr
    assert "Chaos: worker:1 was killed in attempt 1; it was restarted individually" in ran.stderr
    [attempt] = ran.report["attempts"]
    exits = {task["task"]: task["exit_code"] for task in attempt["tasks"]}
    assert exits["chief:0"] == exits["evaluator:0"] == 0
    assert ran.log("worker-1").count(b"worker:1 serves") == 2
    assert "not forked from a preloaded TensorFlow" not in ran.stderr
    assert ran.line(r"evaluator:0: epoch 30, validation accuracy 0\.\d+", "evaluator-0")
    assert "0 processes left on this machine" in ran.stderr


def test_a_killed_parameter_server_restarts_the_cluster_from_its_checkpoint(warm: Distlaunch, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    ran = warm(
        *("local", "--strategy", "parameter_server", "--workers", "1"),
        *("--chaos", "kill:ps:0@seconds=8", "--max-restarts", "1"),
        *(*DEMO, "--epochs", "40", "--checkpoints", str(checkpoints)),
    )
    assert ran.status == 0, ran.stderr
    first, last = ran.report["attempts"]
    assert (first["verdict"]["task"], first["verdict"]["reference"]) == ("ps:0", "task-killed")
    began = re.search(r"^Epoch (\d+)/40: ", (ran.directory / "attempt-2" / "chief-0.log").read_text(), re.MULTILINE)
    assert began is not None
    assert int(began[1]) > 1
    assert last["verdict"]["reference"] == "succeeded"
    assert {path.name for path in checkpoints.iterdir()} == {f"epoch-{epoch:04}.keras" for epoch in range(1, 41)}


def test_workers_on_a_divided_cpu_use_only_its_first_device(warm: Distlaunch, look: str) -> None:
    """TensorFlow cannot emulate workers with several devices; cluster_specs/README.md says so."""
    told = looked(warm("local", "--workers", "2", "--devices", "2", look))
    assert told["replicas"] == 2  # not four


def test_the_class_names_of_strategies_match_tensorflow() -> None:
    source = (
        "import tensorflow as tf\n"
        "made = tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy,"
        " tf.distribute.experimental.CentralStorageStrategy, tf.distribute.MultiWorkerMirroredStrategy,"
        " tf.distribute.ParameterServerStrategy, tf.distribute.TPUStrategy\n"
        "print(*(kind.__name__ for kind in made))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*CLASSES.values()]

"""The output for failed runs, through the installed command and with real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.processes.commands import Distlaunch
from tests.harness.witness import assert_none_left, make_mark

COVERS = (
    "launcher/errors.py",
    "launcher/failures.py",
    "launcher/tasks.py",
    "launcher/wording.py",
    "launcher/printable.py",
    "launcher/console",
    "launcher/gang",
    "launcher/report",
    "launcher/verdict",
    "launcher/rundir",
    "launcher/sources",
    "launcher/exporters",
    "launcher/controller",
)

pytestmark = pytest.mark.slow


@pytest.mark.smoke
def test_the_first_worker_to_fail_in_training_is_the_cause(warm: Distlaunch, tmp_path: Path) -> None:
    """A real cluster: worker:1 raises between two collectives; worker:0 sees only that its peer is gone."""
    (tmp_path / "train.py").write_text(
        "import os\n"
        "import tensorflow as tf\n"
        "strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
        "step = tf.function(lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce('sum', 1.0)))\n"
        "for number in range(10_000_000):\n"
        "    step()\n"
        "    if number == 20 and os.environ['DISTLAUNCH_TASK'] == 'worker:1':\n"
        "        raise KeyError('bad sample')\n"
    )
    mark = make_mark()
    ran = warm("local", "--workers", "2", "train.py", env=mark)
    assert ran.status == 1
    assert_none_left(mark)
    assert "Error: worker:1 on local exited with status 1" in ran.stderr
    assert f"KeyError: 'bad sample'   {tmp_path / 'train.py'}:8" in ran.stderr
    attempt = ran.report["attempts"][0]
    assert attempt["cluster_up"] is not None


def test_the_start_timeout_names_a_worker_that_builds_no_strategy(warm: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "if os.environ['DISTLAUNCH_TASK'] == 'worker:1':\n"
        "    time.sleep(600)\n"
        "import tensorflow as tf\n"
        "tf.distribute.MultiWorkerMirroredStrategy()\n"
    )
    ran = warm("local", "--workers", "2", "--set", "timeouts.start_s=15", "train.py")
    assert ran.status == 3
    verdict = ran.report["attempts"][0]["verdict"]
    sentence = r"waiting for worker:1 on local \(port \d+ not open\); worker:0 is ready"
    assert re.fullmatch(f"no cluster within 15 s: {sentence}", verdict["message"])
    assert "worker:1" in ran.stderr
    assert re.search(r"Forming, \d+ s: waiting for worker:[01]", ran.stderr)

"""A cluster that makes no progress: when it counts as stalled, which task is to blame, and what is done about it."""

from __future__ import annotations

import re

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch

COVERS = (
    "launcher/gang",
    "launcher/verdict",
    "launcher/controller/supervisor.py",
    "worker_entry/system/mutual_waits.py",
)

HANGS = str(PROGRAMS / "hangs.py")
LOST_LEADER = str(PROGRAMS / "lost_leader.py")
KERAS = str(PROGRAMS / "train_keras.py")
PATIENCE_S = "40"
"""More than the import of TensorFlow takes, also on a busy machine; it makes its two tests long."""


class TestStalledClusters:
    def test_a_worker_that_sleeps_in_its_input_is_named_and_all_restart(self, warm: Distlaunch) -> None:
        ran = warm(
            *(
                "local",
                "-n",
                "3",
                "--set",
                "timeouts.stall_s=5",
                "--max-restarts",
                "1",
                KERAS,
                "worker:1",
                "sleep-in-input",
            ),
            *("8",),
        )
        assert ran.status == 0, ran.stderr
        first, second = ran.report["attempts"]
        assert (first["verdict"]["reference"], first["verdict"]["task"]) == ("stalled", "worker:1")
        assert f"another thread at {KERAS}:16 load_batch" in first["verdict"]["message"]
        assert f"worker:0, worker:2 are at {KERAS}:" in first["verdict"]["evidence"][0]
        assert [task["progress"]["step"] for task in second["tasks"]] == [160] * 3
        assert "load_batch" in (ran.directory / "stacks.txt").read_text()

    def test_the_start_timeout_names_a_worker_that_never_contacts_the_leader(self, warm: Distlaunch) -> None:
        options = ["--set", f"timeouts.start_s={PATIENCE_S}", "--set", "keep_own_tf_config=true"]
        ran = warm("local", "-n", "3", *options, LOST_LEADER, "worker:1")
        verdict = ran.report["attempts"][0]["verdict"]
        assert (ran.status, verdict["reference"], verdict["task"]) == (3, "start-timeout", "worker:1"), ran.stderr
        waiting = r"waiting for worker:1 on local \(port \d+ open, worker:0 has not heard from it\)"
        assert re.search(f"{waiting}; worker:0, worker:2 are ready", verdict["message"])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("how", "place"),
        [
            ("input", rf"another thread at {HANGS}:\d+ load_batch, in wait of threading.py"),
            ("lock", rf"worker:1 is at {HANGS}:\d+ <module>"),
            ("collective", rf"worker:1 is at {HANGS}:\d+ <module>, in quick_execute of execute.py"),
        ],
    )
    def test_a_hang_is_found_without_a_limit_of_the_user(self, warm: Distlaunch, how: str, place: str) -> None:
        ran = warm("local", "-n", "2", HANGS, how)
        verdict = ran.report["attempts"][0]["verdict"]
        assert (ran.status, verdict["reference"]) == (3, "stalled"), ran.stderr
        assert re.search(place, "\n".join([verdict["message"], *verdict["evidence"]]))
        assert ran.stderr.count("and all tasks wait; looking at them again in 4 s\n") == 1
        print(f"{how}: stopped {ran.report['goodput']['stalled_s']:.1f} s after the last step")

    @pytest.mark.smoke
    def test_a_worker_that_skips_a_collective_is_named_as_stalled(self, warm: Distlaunch) -> None:
        loop = str(PROGRAMS / "loop.py")
        ran = warm("local", "-n", "3", "--set", "timeouts.stall_s=5", loop, "worker:1", "skip-a-step")
        verdict = ran.report["attempts"][0]["verdict"]
        assert (ran.status, verdict["reference"], verdict["task"]) == (3, "stalled", "worker:1"), ran.stderr
        assert "steps done: 200 by worker:1, 199 by the others" in verdict["evidence"]
        assert f"worker:1 is at {loop}:24 wait_for_all" in verdict["message"]
        assert any(f"worker:0, worker:2 are at {loop}:30 <module>" in line for line in verdict["evidence"])
        told = ran.report["attempts"][0]["tasks"][1]["progress"]
        assert (told["epoch"], told["first_epoch"], told["first_step"]) == (4, 1, 1)
        assert told["metrics"]["nothing"] is None
        assert 0 < told["metrics"]["loss"] <= 1

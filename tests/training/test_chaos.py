"""Injected faults: each is injected once, at its moment, and the report says whether training resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch

COVERS = ("launcher/gang", "worker_entry/task/faults.py", "launcher/controller/actions.py")


class TestRealFaults:
    @pytest.mark.smoke
    def test_a_script_with_backups_resumes_after_each_injected_fault(self, warm: Distlaunch) -> None:
        program = (str(PROGRAMS / "train_keras.py"), "nobody", "resume", "5")
        faults = ("--chaos", "kill:worker:1@epoch=3", "--chaos", "exit:worker:0@epoch=4")
        ran = warm("local", "-n", "2", *faults, *program)
        assert ran.status == 0, ran.stderr
        assert [fault["resumed"] for fault in ran.report["chaos"]] == [True, True]
        assert [fault["attempt"] for fault in ran.report["chaos"]] == [1, 2]
        assert (
            "Chaos: worker:1 was killed in attempt 1, at epoch 3, step 41; attempt 2 resumed in epoch 3" in ran.stderr
        )
        assert "Chaos: worker:0 was made to exit in attempt 2, at epoch 4, step 21; attempt 3 resumed" in ran.stderr
        references = [attempt["verdict"]["reference"] for attempt in ran.report["attempts"]]
        assert references == ["task-killed", "task-failed", "succeeded"]

    def test_the_fault_report_names_a_script_that_did_not_resume(self, warm: Distlaunch) -> None:
        program = (str(PROGRAMS / "train_keras.py"), "nobody", "forgets", "3")
        ran = warm("local", "-n", "2", "--chaos", "kill:worker:0@step=30", *program)
        assert ran.status == 0, ran.stderr
        [fault] = ran.report["chaos"]
        assert (fault["resumed"], fault["attempt"]) == (False, 1)
        assert fault["message"].endswith("at epoch 2, step 30; attempt 2 started over in epoch 1: nothing was resumed")

    def test_a_script_with_a_handler_resumes_after_an_injected_preemption(self, warm: Distlaunch) -> None:
        program = (str(PROGRAMS / "resume_loop.py"), "6", "handler")
        ran = warm("local", "-n", "2", "--chaos", "preempt:worker:1@step=25", *program)
        assert ran.status == 0, ran.stderr
        [fault] = ran.report["chaos"]
        assert fault["resumed"]
        assert re.search(r"worker:1 was preempted in attempt 1, at .*; attempt 2 resumed in epoch 3", fault["message"])
        assert ran.report["attempts"][0]["verdict"]["reference"] == "preempted"

    def test_a_stop_fault_can_hit_before_the_cluster_is_up(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "wait.py").write_text("import time\ntime.sleep(600)\n")
        ran = distlaunch(
            *(
                "local",
                "-n",
                "2",
                "--set",
                "timeouts.start_s=5",
                "--max-restarts",
                "0",
                "--chaos",
                "stop:worker:1@seconds=1",
            ),
            "wait.py",
        )
        assert ran.status == 3
        assert "worker:1 was stopped by SIGSTOP (signal 19); the others wait for it" in ran.stderr
        assert "Chaos: worker:1 was stopped by SIGSTOP in attempt 1, at no step; it was not started again" in ran.stderr

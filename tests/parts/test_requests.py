"""Requests to the controller of a run that ends in the meantime."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil

from launcher.commands.requests import ask_to_end
from launcher.rundir.directory import RunDir
from launcher.rundir.owner import Controller
from tests.harness.builders.runs_on_disk import write_run


class EndsByItself(RunDir):
    """A run whose end is recorded as soon as it has been seen running; its controller needs a moment more."""

    def read_run(self) -> tuple[str, Controller | None]:
        seen = super().read_run()
        self.write_json(self.run, {**json.loads(self.run.read_text()), "ended": True})
        return seen


def test_a_run_that_ends_by_itself_before_it_can_be_asked_is_not_stopped_but_awaited(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "0.5"]) as controller:
        started = psutil.Process(controller.pid).create_time() - psutil.boot_time()
        write_run(tmp_path / "run", controller={"pid": controller.pid, "started": started})

        assert not ask_to_end(EndsByItself(tmp_path / "run"))

        assert controller.poll() == 0

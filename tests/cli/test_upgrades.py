"""Another version of distlaunch is installed while an older one runs: the newer one reads, continues or refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.rundir.directory import RunDir
from tests.harness.places import ROOT
from tests.harness.polling import eventually
from tests.harness.processes.commands import distlaunch_command
from tests.harness.processes.older_version import OLDER_PROTOCOL, OlderVersion
from tests.harness.witness import assert_none_left, make_mark

pytestmark = pytest.mark.slow

COVERS = ("launcher/commands", "launcher/rundir", "launcher/controller", "worker_entry/agent")

STEPS = """\
import os, pathlib, sys, time
from worker_entry import progress
for step in range(1, 100_000):
    progress.report(step=step)
    time.sleep(0.02)
    if os.environ["DISTLAUNCH_ATTEMPT"] != "1" or pathlib.Path("go").exists():
        break
sys.exit(os.environ["DISTLAUNCH_ATTEMPT"] == "1")
"""
SPEC = f"""\
nodes: [{{host: gpu-a, address: 127.0.0.1, tasks: {{worker: 2}}}}]
connection: {{command: [sh, -c, '{{command}}']}}
python: {sys.executable}
program: {{script: train.py}}
restart: {{max_restarts: 1}}
"""


@dataclass(frozen=True)
class Upgraded:
    """A user who has installed another version; the runs of both are in `home`."""

    older: OlderVersion
    home: Path
    env: dict[str, str]

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the newer version, or that of `env`."""
        return subprocess.run(
            distlaunch_command(*arguments),
            cwd=self.home,
            env={**os.environ, **self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def begin(self, *arguments: str) -> None:
        """Starts a run of the older version in the background."""
        started = self.run("up", "-d", *arguments, env=self.older.env)
        assert started.returncode == 0, started.stderr

    def wait_for_steps(self) -> None:
        def check() -> None:
            shown = self.run("status", "--json")
            assert all(task["step"] for task in json.loads(shown.stdout)["tasks"]), shown.stderr

        eventually(check)

    @property
    def files(self) -> RunDir:
        [folder] = (self.home / "state" / "distlaunch" / "runs").iterdir()
        return RunDir(folder)


@pytest.fixture
def user(tmp_path: Path) -> Iterator[Upgraded]:
    home, mark = tmp_path / "home", make_mark()
    home.mkdir()
    (home / "train.py").write_text(STEPS)
    (home / "spec.yaml").write_text(SPEC)
    places = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    yield Upgraded(OlderVersion(tmp_path / "older"), home, {**mark, **places})
    assert_none_left(mark)


def test_a_background_run_of_an_older_version_can_be_listed_followed_and_stopped(user: Upgraded) -> None:
    user.older.change("launcher", "eta_s", "left_s")  # a field that only one of the versions knows, in each direction
    user.begin("-H", "local:2", "train.py")

    user.wait_for_steps()

    assert " running " in user.run("ls").stdout
    assert "worker:1" in user.run("status").stdout
    assert "train.py" in user.run("stacks").stdout
    assert user.run("logs").returncode == 0
    stopped = user.run("down")
    assert stopped.returncode == 0, stopped.stderr
    assert user.run("wait").returncode == 128 + signal.SIGTERM
    assert "Starting 2 tasks" in user.run("logs", "--distlaunch").stdout


def test_a_status_that_lacks_a_needed_field_and_an_unknown_request_are_refused_with_a_sentence(user: Upgraded) -> None:
    user.older.change("launcher/controller/answers.py", "model_dump_json()", "model_dump_json(exclude={'restarts'})")
    user.older.change("launcher", "AskStacks", "AskTraces")
    user.begin("-H", "local:1", "--", "sleep", "600")

    shown, stacks = user.run("status"), user.run("stacks")

    name = user.files.root.name
    assert (shown.returncode, stacks.returncode) == (2, 2)
    assert shown.stderr.splitlines() == [
        f"Error: the controller of run {name} is of another version of distlaunch, whose status cannot be read [usage]",
        "  `distlaunch logs`, `attach` and `down` work with it",
    ]
    assert "its controller is of another version of distlaunch, which does not know this request" in stacks.stderr
    assert user.run("down").returncode == 0


def test_a_restart_after_an_upgrade_is_refused_and_a_resume_continues_the_run(user: Upgraded) -> None:
    user.begin("-H", "local:2", "--max-restarts", "1", "train.py")
    user.wait_for_steps()

    user.older.upgrade()
    (user.home / "go").touch()
    waited = user.run("wait")

    assert waited.returncode == 3
    messages = user.run("logs", "--distlaunch").stdout
    assert "another version of distlaunch was installed during the run" in messages
    assert "`distlaunch resume` continues the run with the installed version" in messages
    resumed = user.run("resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "attempt-3" in {path.name for path in user.files.root.iterdir()}


def test_another_node_restarts_with_its_own_copy_after_an_upgrade(user: Upgraded) -> None:
    user.begin("spec.yaml")
    user.wait_for_steps()

    user.older.upgrade()
    (user.home / "go").touch()

    assert user.run("wait").returncode == 0
    report = json.loads((user.files.root / "report.json").read_text())
    assert [attempt["verdict"]["reference"] for attempt in report["attempts"]] == ["task-failed", "succeeded"]


def test_tasks_of_a_version_with_another_protocol_are_not_taken_over_but_started_again(user: Upgraded) -> None:
    user.begin("spec.yaml")
    user.wait_for_steps()

    _, controller = user.files.read_run()
    assert controller is not None
    os.kill(controller.pid, signal.SIGKILL)
    resumed = user.run("resume", str(user.files.root))

    assert resumed.returncode == 0, resumed.stderr
    assert "Taking over attempt 1 while its tasks continue" in resumed.stderr
    refusal = f"the agent was sent no Attach of its own version of distlaunch (protocol {OLDER_PROTOCOL})"
    assert f"node gpu-a was lost: {refusal}" in resumed.stderr
    assert "Restarting: attempt 2" in resumed.stderr


@pytest.mark.parametrize(
    "old", sorted((ROOT / "tests" / "old_runs").glob("format_*/failed")), ids=lambda folder: folder.parent.name
)
def test_a_resume_continues_the_recorded_run_of_an_older_version(old: Path, user: Upgraded) -> None:
    folder = user.home / "failed"
    shutil.copytree(old, folder)
    for path in folder.glob("*.json*"):
        path.write_text(
            path.read_text().replace("/home/ana/mnist/runs", str(user.home)).replace("/home/ana/mnist", str(user.home))
        )
    (user.home / "t.sh").write_text("echo trained in attempt $DISTLAUNCH_ATTEMPT")

    resumed = user.run("resume", str(folder))

    assert resumed.returncode == 0, resumed.stderr
    assert sorted(resumed.stdout.splitlines()) == [f"worker:{index} │ trained in attempt 2" for index in (0, 1)]

"""Problems in the environment of distlaunch are reported as such, not as bugs in distlaunch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from launcher.cli.main import cli, run_command
from launcher.errors import EXIT_BUG
from tests.harness.processes.commands import Distlaunch, distlaunch_command

COVERS = (
    "launcher/cli",
    "launcher/__main__.py",
    "launcher/errors.py",
    "launcher/rundir/directory.py",
    "launcher/controller/launch.py",
)


def run(folder: Path, command: list[str], *, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command from a shell that can close streams and remove its own folder first."""
    script = f'{before} exec "$@"'
    return subprocess.run(
        ["sh", "-c", script, "sh", *command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
class TestClosedStreams:
    """Closed streams act like /dev/null; files opened later must not get their descriptors."""

    @pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
    def test_closed_standard_streams_do_not_break_a_run(self, tmp_path: Path, closed: str) -> None:
        task = 'ls -l /proc/self/fd; echo "to stdout"; echo "to stderr" >&2'
        command = distlaunch_command("local", "-n", "1", "--run-dir", "run", "--", "sh", "-c", task)
        ran = run(tmp_path, command, before=f"exec {closed};")
        assert ran.returncode == 0
        assert (">&-" in closed and closed != "2>&-") or "worker:0 │ to stdout" in ran.stdout
        assert "2>&-" in closed or "Succeeded in" in ran.stderr
        log = (tmp_path / "run" / "attempt-1" / "worker-0.log").read_text()
        assert log.endswith("to stdout\nto stderr\n")
        assert (tmp_path / "run" / "report.json").exists()

    def test_closed_standard_streams_do_not_break_other_commands(self, tmp_path: Path) -> None:
        assert run(tmp_path, distlaunch_command("schema"), before="exec >&-;").returncode == 0
        asked = run(tmp_path, distlaunch_command("down", "nothing"), before="exec >&-;")
        assert (asked.returncode, asked.stderr.splitlines()[0]) == (2, "Error: there is no run nothing [usage]")
        assert run(tmp_path, distlaunch_command("down", "nothing"), before="exec 2>&-;").returncode == 2


@pytest.mark.slow
class TestCurrentDirectory:
    @pytest.mark.parametrize("option", ["--run-dir=/nowhere", "--run-dir=here", "--dry-run"])
    def test_a_removed_current_directory_is_reported(self, tmp_path: Path, option: str) -> None:
        command = distlaunch_command("local", option, "--", "true")
        ran = run(tmp_path, command, before="mkdir gone; cd gone; rmdir ../gone;")
        told = "the current directory cannot be used: No such file or directory [usage]"
        assert (ran.returncode, ran.stderr) == (2, f"Error: {told}\n  change to a directory that exists\n")

    def test_help_works_in_a_removed_current_directory(self, tmp_path: Path) -> None:
        ran = run(tmp_path, distlaunch_command("--help"), before="mkdir gone; cd gone; rmdir ../gone;")
        assert (ran.returncode, ran.stderr) == (0, "")

    @pytest.mark.smoke
    def test_a_current_directory_that_is_not_utf_8_is_reported(self, tmp_path: Path) -> None:
        folder = tmp_path / os.fsdecode(b"caf\xe9")
        folder.mkdir()
        ran = run(folder, distlaunch_command("local", "--run-dir", str(tmp_path / "run"), "--", "true"))
        told = f"the current directory {os.fsencode(folder)!r} is not UTF-8 [usage]"
        assert (ran.returncode, ran.stderr) == (2, f"Error: {told}\n  change to another directory\n")


def test_plugins_of_pydantic_do_not_see_specs_and_reports(tmp_path: Path, distlaunch: Distlaunch) -> None:
    (tmp_path / "spying.py").write_text("raise SystemExit('loaded')\n")
    facts = tmp_path / "spying-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: spying\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[pydantic]\nspying = spying:plugin\n")
    env = {"PYTHONPATH": str(tmp_path)}
    build = [sys.executable, "-c", "import pydantic; pydantic.TypeAdapter(int)"]
    usual = subprocess.run(build, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert usual.stderr == "loaded\n"
    (tmp_path / "spec.yaml").write_text("nodes: [{host: local}]\nprogram: {command: ['true']}\n")
    ran = distlaunch("plan", "spec.yaml", env=env, run_dir=False)
    assert (ran.status, ran.stderr) == (0, "")


def test_a_missing_home_directory_is_reported_with_a_hint(tmp_path: Path) -> None:
    """As in a container with an arbitrary user ID."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("an unknown user ID needs root and setpriv")
    stranger = ["setpriv", "--reuid=54321", "--clear-groups", "--inh-caps=-all,+dac_override"]
    stranger += ["--ambient-caps=-all,+dac_override"]
    told = "there is no home directory for the files of runs [run-directory]"
    asked = run(tmp_path, [*stranger, *distlaunch_command("down", "x")], before="unset HOME XDG_STATE_HOME;")
    hint = "  set HOME, or choose a folder with --run-dir"
    assert (asked.returncode, asked.stderr) == (3, f"Error: {told}\n{hint}\n")


@pytest.mark.slow
def test_a_low_process_limit_is_reported_wherever_it_is_reached(tmp_path: Path) -> None:
    """Each limit is reached in a different place: by a thread of the controller, the agent or a task."""
    limited = ["setpriv", "--reuid=54321", "--clear-groups", "--inh-caps=-all,+dac_override"]
    limited += ["--ambient-caps=-all,+dac_override"]  # to read files of root: this test and perhaps Python
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if os.geteuid() != 0 or shutil.which("setpriv") is None or python is None:
        pytest.skip("an unused user ID needs root, setpriv and a Python that all users can run")
    statuses = []
    for limit in range(1, 16):
        folder = tmp_path / str(limit)
        command = distlaunch_command("local", "-n", "1", "--run-dir", str(folder), "--python", python, "--", "true")
        ran = run(tmp_path, [*limited, "prlimit", f"--nproc={limit}:{limit}", *command])
        statuses.append(ran.returncode)
        if ran.returncode == 0:
            break
        assert ran.returncode == 3, ran.stderr
        assert "no more processes" in ran.stderr
        assert "ulimit -u" in ran.stderr
        assert (folder / "report.json").exists()
    assert statuses[-1] == 0
    assert len(statuses) > 3


@pytest.mark.slow
class TestDebugOption:
    def test_debug_after_the_script_belongs_to_the_script(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "file").touch()
        for name in ("train.py", "train"):
            (tmp_path / name).touch(0o755)
        for words in (["train.py", "--debug"], ["--", "./train", "--debug"]):
            ran = distlaunch("local", *words)
            assert ran.status == 3
            assert ran.stderr.startswith("Error: the run directory ")

    def test_debug_adds_a_traceback_and_keeps_the_exit_status(self, tmp_path: Path) -> None:
        for arguments, status in ((["down", "nothing"], 2), (["local", "--run-dir", "/dev/null", "--", "true"], 3)):
            plain = run(tmp_path, distlaunch_command(*arguments))
            debug = run(tmp_path, distlaunch_command("--debug", *arguments))
            assert plain.returncode == debug.returncode == status
            assert debug.stderr.startswith("Traceback (most recent call last):\n")
            assert debug.stderr.endswith(plain.stderr)
            assert plain.stderr.startswith("Error: ")


class TestUnexpectedEnds:
    """A command ends with an exception that is not an error of distlaunch."""

    def test_an_unexpected_exception_is_reported_as_a_bug_with_a_hint(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("NOT_SET", raising=False)
        monkeypatch.setitem(cli.commands, "odd", click.Command("odd", callback=lambda: os.environ["NOT_SET"]))
        assert run_command(["odd"]) == EXIT_BUG
        told = "Error: a bug in distlaunch: KeyError('NOT_SET') [bug]\n  `distlaunch --debug …` shows a traceback\n"
        assert capsys.readouterr().err == told

    def test_ctrl_c_ends_a_command_with_the_exit_status_of_sigint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        callback = lambda: signal.raise_signal(signal.SIGINT)  # noqa: E731
        monkeypatch.setitem(cli.commands, "long", click.Command("long", callback=callback))
        assert run_command(["long"]) == 128 + signal.SIGINT

    def test_a_broken_pipe_ends_a_command_with_the_exit_status_of_sigpipe(self, tmp_path: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb") as stdout:
            ran = subprocess.run(
                distlaunch_command("schema"), stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False
            )
        assert (ran.returncode, ran.stderr) == (128 + signal.SIGPIPE, b"")

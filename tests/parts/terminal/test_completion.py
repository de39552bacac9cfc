"""Tab completes commands, runs, tasks and specs, in real shells."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import click
import pytest

from launcher.cli.completion import complete_tasks, join_words
from launcher.cli.main import cli
from launcher.spec.field_names import find_fields
from launcher.spec.models import ClusterSpec
from tests.harness.available import find_program
from tests.harness.builders.runs_on_disk import write_run
from tests.harness.cases import first_quick
from tests.harness.processes.commands import distlaunch_command

COVERS = ("launcher/cli",)

NAMES = ("20261121-100000-train-aaaa", "20261121-110000-train-bbbb", "20261121-120000-eval-cccc")
"""Three run names; the last run is still running."""

SHELLS = {
    "bash": (
        ["bash", "--rcfile", "rc", "-i"],
        r"""PS1='READY> '; source completion; show() { echo "<<$READLINE_LINE>>"; }; bind -x '"\C-g": show'""",
    ),
    "zsh": (
        ["zsh", "-i"],
        """PROMPT='READY> '; autoload -Uz compinit; compinit -u -D; source completion
        show() { print -r -- "<<$BUFFER>>" }; zle -N show; bindkey '^G' show""",
    ),
    "fish": (
        ["fish", "--no-config", "--init-command", "source rc"],
        r"""function fish_prompt; echo 'READY> '; end; source completion; bind \cg 'echo "<<"(commandline)">>"'""",
    ),
}
"""The command and the start-up file of each shell; Ctrl-G shows the current line."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with specs, next to the records of three runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for number, name in enumerate(NAMES):
        outcome = None if number == 2 else "succeeded"
        write_run(tmp_path / "state" / "distlaunch" / "runs" / name, outcome=outcome, started=number + 1.0, tasks=2)
    here = tmp_path / "here"
    (here / "deep").mkdir(parents=True)
    for name in ("two_nodes.yaml", "odd words.yml", "train.py", "deep/one.yaml"):
        (here / name).touch()
    monkeypatch.chdir(here)
    return here


class Terminal:
    """An interactive shell on a terminal."""

    def __init__(self, shell: str, folder: Path) -> None:
        if find_program(shell, "-c", "true") is None:
            pytest.skip(f"{shell} is not installed")
        command, start = SHELLS[shell]
        home = folder.parent / "home"
        home.mkdir()
        done = subprocess.run(distlaunch_command("completion", shell), capture_output=True, text=True, check=True)
        completion = home / "completion"
        completion.write_text(done.stdout)
        for name in ("rc", ".zshrc"):
            (home / name).write_text(start.replace("source completion", f"source {completion}") + "\n")
        command = [str(home / "rc") if word == "rc" else word.replace(" rc", f" {home}/rc") for word in command]
        env = {**os.environ, "HOME": str(home), "ZDOTDIR": str(home), "TERM": "xterm", "LC_ALL": "C.UTF-8"}
        self.screen = ""
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 500, 0, 0))
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=side, stdout=side, stderr=side, env=env, cwd=folder
        )
        os.close(side)
        self._read_until("READY> ")

    def complete(self, typed: str) -> str:
        """The line after Tab."""
        self.screen = ""
        os.write(self._main, f"{typed}\t\x07".encode())
        line = self._read_until(r"<<(.*?)>>")
        os.write(self._main, b"\x15")  # an empty line again
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)

    def _read_until(self, pattern: str) -> str:
        deadline = time.monotonic() + 30
        while True:
            found = re.search(pattern, self.screen)
            if found is not None:
                return found[found.re.groups]
            assert time.monotonic() < deadline, repr(self.screen)
            if select.select([self._main], [], [], 0.1)[0]:
                self.screen += os.read(self._main, 65536).decode()


@pytest.mark.parametrize("shell", first_quick(SHELLS))
def test_tab_completes_commands_options_runs_and_specs(shell: str, folder: Path) -> None:
    terminal = Terminal(shell, folder)
    try:
        expected = {
            "distlaunch comple": "distlaunch completion ",
            "distlaunch ls --js": "distlaunch ls --json ",
            "distlaunch wait 20261121-11": f"distlaunch wait {NAMES[1]} ",
            "distlaunch down 2": f"distlaunch down {NAMES[2]} ",  # the others have ended
            "distlaunch rm 20261121-10": f"distlaunch rm {NAMES[0]} ",
            "distlaunch up tw": "distlaunch up two_nodes.yaml ",
            "distlaunch check od": "distlaunch check odd\\ words.yml ",
            "distlaunch plan deep/on": "distlaunch plan deep/one.yaml ",
            "distlaunch clean tw": "distlaunch clean two_nodes.yaml ",
            "distlaunch up --set rest": "distlaunch up --set restart.",
            "distlaunch up --set restart.max_r": "distlaunch up --set restart.max_restarts=",
            "distlaunch up --set stdin=ch": "distlaunch up --set stdin=chief ",
        }
        assert {typed: terminal.complete(typed) for typed in expected} == expected
        write_run(folder.parent / "state" / "distlaunch" / "runs" / "with:colon", outcome="succeeded")
        assert terminal.complete("distlaunch wait with:c").replace("\\", "") == "distlaunch wait with:colon "
        assert terminal.complete("distlaunch up de") == "distlaunch up deep/"
    finally:
        terminal.close()


def test_bash_completes_a_unique_part_of_a_run_name(folder: Path) -> None:
    terminal = Terminal("bash", folder)
    try:
        assert terminal.complete("distlaunch wait eval") == f"distlaunch wait {NAMES[2]} "
        assert terminal.complete("distlaunch wait train") == "distlaunch wait train"
    finally:
        terminal.close()


def offered(folder: Path, *words: str) -> list[str]:
    """The completions that the command offers to bash for the last word."""
    env = {
        **os.environ,
        "_DISTLAUNCH_COMPLETE": "bash_complete",
        "COMP_WORDS": "\n".join(["distlaunch", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(distlaunch_command(), env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_completion_offers_suitable_runs_latest_first(folder: Path) -> None:
    assert offered(folder, "wait", "") == [f"plain,{name}" for name in reversed(NAMES)]
    assert offered(folder, "stacks", "") == [f"plain,{NAMES[2]}"]
    assert offered(folder, "rm", "") == [f"plain,{name}" for name in reversed(NAMES[:2])]
    assert offered(folder, "rm", NAMES[0], "20261121-11") == [f"plain,{NAMES[1]}"]


def test_completion_offers_and_prints_nothing_without_candidates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/nowhere/at/all")
    for words in (("wait", ""), ("down", "x"), ("wait", "a", "b")):
        assert offered(folder, *words) in ([], [""])
    assert offered(folder, "up", "nowhere/") == ["dir,nowhere/"]


def test_completion_offers_files_for_a_program_and_its_arguments(folder: Path) -> None:
    assert offered(folder, "up", "-H", "gpu-a", "tr") == ["file,tr"]
    assert offered(folder, "up", "two_nodes.yaml", "tr") == ["file,tr"]


def test_completion_offers_the_hosts_of_the_ssh_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder.parent / "home"
    (home / ".ssh" / "more.d").mkdir(parents=True)
    (home / ".ssh" / "config").write_text(
        "Include more.d/*\nHost gpu-a gpu-b\n  User alice\nHost *.example !gpu-x\n  Port 22\nhost=gpu-c\n"
    )
    (home / ".ssh" / "more.d" / "lab").write_text("Host lab-1\nInclude ~/.ssh/config\n")
    monkeypatch.setenv("HOME", str(home))
    assert offered(folder, "up", "-H", "gpu-")[-3:] == ["plain,gpu-a", "plain,gpu-b", "plain,gpu-c"]
    assert offered(folder, "check", "-H", "gpu-a,la") == ["plain,gpu-a,lab-1"]
    assert offered(folder, "init", "-H", "gpu-a,lo") == ["plain,gpu-a,local"]
    assert "plain,gpu-a,gpu-a" not in offered(folder, "up", "-H", "gpu-a,g")


def test_completion_offers_spec_fields_level_by_level_and_their_values(folder: Path) -> None:
    assert offered(folder, "up", "--set", "time") == ["plain,timeouts."]
    assert offered(folder, "local", "--set", "timeouts.st") == [
        f"plain,timeouts.{name}=" for name in ("start_s", "stop_grace_s", "stall_s")
    ]
    assert offered(folder, "up", "--set", "nodes[0].spa") == ["plain,nodes[0].spare="]
    assert offered(folder, "up", "--set", "nodes[0].spare=t") == ["plain,nodes[0].spare=true"]
    assert offered(folder, "up", "--set", "guard=") == [f"plain,guard={value}" for value in ("auto", "required", "off")]
    for nothing in ("none.", "timeouts.start_s.", "timeouts.start_s="):
        assert offered(folder, "up", "--set", nothing) in ([], [""])


def test_completion_offers_every_top_level_field_of_a_spec() -> None:
    offered_names = {name.rstrip(".=").partition("[")[0] for name in find_fields("")}
    assert offered_names == {*ClusterSpec.model_fields}


def test_fish_completion_keeps_commas_in_descriptions(folder: Path) -> None:
    if find_program("fish", "-c", "true") is None:
        pytest.skip("fish is not installed")
    script = subprocess.run(distlaunch_command("completion", "fish"), capture_output=True, text=True, check=True).stdout
    asks = f"{script}\ncomplete --do-complete 'distlaunch ls'\n"
    done = subprocess.run(["fish", "--no-config", "-c", asks], cwd=folder, capture_output=True, text=True, check=True)
    summary = cli.commands["ls"].get_short_help_str(100)
    assert "," in summary
    assert f"ls\t{summary}" in done.stdout


def test_completion_offers_the_tasks_of_the_given_run(folder: Path) -> None:
    command = click.Command("logs", params=[click.Argument(["run"], required=False)])

    def tasks(incomplete: str, *arguments: str) -> list[str]:
        context = command.make_context("logs", [*arguments], resilient_parsing=True)
        return [item.value for item in complete_tasks(context, command.params[0], incomplete)]

    assert tasks("", "aaaa") == ["worker:0", "worker:1"]
    assert tasks("worker:1") == ["worker:1"]  # of the only running run
    assert tasks("", "train") == []
    assert tasks("", "none") == []


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        (["a", "b"], ["a", "b"]),
        (["logs", "worker", ":"], ["logs", "worker:"]),
        (["logs", "worker", ":", "0", "x"], ["logs", "worker:0", "x"]),
        (["kill", ":", "worker", ":", "1"], ["kill:worker:1"]),
        (["--set", "stdin", "=", "ch"], ["--set", "stdin=ch"]),
        ([":"], [":"]),
        ([""], [""]),
    ],
)
def test_completion_joins_words_that_bash_has_split(words: list[str], joined: list[str]) -> None:
    assert join_words(words) == joined


def test_every_argument_for_a_run_or_spec_has_completion() -> None:
    found = {
        (name, parameter.name)
        for name, command in cli.commands.items()
        for parameter in command.params
        if isinstance(parameter, click.Argument) and parameter.name in ("run", "runs", "spec", "what")
        if parameter._custom_shell_complete is None and not isinstance(parameter.type, click.Choice)
    }
    assert found == set()

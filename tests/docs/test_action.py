"""The GitHub Action that tests a program's resume: text of others stays text, and the documented use of it is valid."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness.action import ACTION, BASH, load_action, run_test_step, shell_steps
from tests.harness.documents import COMMANDS_PAGE, blocks


def test_the_action_pins_what_it_uses_to_a_commit() -> None:
    used = re.findall(r"uses: (\S+)", ACTION.read_text(encoding="utf-8"))
    assert len(used) == 2
    assert [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each)] == []


def test_inputs_of_the_action_reach_the_shell_only_as_variables() -> None:
    steps = shell_steps()
    assert len(steps) == 2
    for step in steps:
        assert "${{" not in step["run"]
        assert step["shell"] == "bash"
        variables = {*step["env"], "GITHUB_ACTION_PATH", "RUNNER_TEMP", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"}
        assert set(re.findall(r"\$([A-Z_]+)", step["run"])) <= variables


def test_the_action_uses_every_input_and_has_no_other() -> None:
    text = ACTION.read_text(encoding="utf-8")
    assert {*re.findall(r"\$\{\{ inputs\.([\w-]+)", text)} == {*load_action()["inputs"]}


@pytest.mark.parametrize("run", [step["run"] for step in shell_steps()])
def test_the_shell_steps_of_the_action_have_valid_syntax(run: str) -> None:
    assert subprocess.run([*BASH, "-n", "-c", run], capture_output=True, text=True, check=False).stderr == ""


def test_the_action_installs_its_own_checkout_and_the_requirements(tmp_path: Path) -> None:
    """A program in place of pip's Python shows what would be installed."""
    [run] = [step["run"] for step in shell_steps() if "REQUIREMENTS" in step["env"]]
    (tmp_path / "python").write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[1:])\n")
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(
        [*BASH, "-c", run],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "GITHUB_ACTION_PATH": str(ACTION.parent),
            "REQUIREMENTS": "$(touch owned) a.txt",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    words = ["-m", "pip", "install", "--disable-pip-version-check"]
    checkout = ACTION.parents[3]
    assert (checkout / "pyproject.toml").is_file()
    assert done.stdout == f"{[*words, f'{checkout}[tensorflow]', '--requirement', '$(touch owned) a.txt']}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


def test_a_program_named_to_the_action_is_never_run_by_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    done = run_test_step(folder, {"program": "'$(touch owned) `touch owned`;touch owned.py' --epochs 1"})
    assert done.returncode == 2
    assert "$(touch owned) `touch owned`;touch owned.py" in done.stdout
    assert [*folder.iterdir()] == []
    summary = (tmp_path / "runner" / "summary").read_text()
    assert "Error: cannot read the script" in summary
    assert [line for line in summary.splitlines() if not line.startswith("    ")] == []


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"faults": "--quick"}, "faults: is neither quick, usual nor full"),
        ({"steps": "--full"}, "--steps"),
        ({"workers": "no"}, "--workers"),
        ({"program": "train.py 'open"}, "No closing quotation"),
        ({"options": "--no-such-option"}, "--no-such-option"),
    ],
)
def test_the_action_fails_with_status_2_or_1_if_an_input_is_wrong(
    tmp_path: Path, inputs: dict[str, str], message: str
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.py").write_text("")
    done = run_test_step(folder, {"program": "train.py", **inputs})
    assert done.returncode == (1 if "quotation" in message else 2), done.stdout + done.stderr
    assert message in done.stdout + done.stderr


def test_the_documented_workflow_uses_the_action_with_inputs_that_exist() -> None:
    [workflow] = [yaml.safe_load(block) for block in blocks(COMMANDS_PAGE, "yaml") if "runs-on" in block]
    assert workflow["permissions"] == {"contents": "read"}
    [job] = workflow["jobs"].values()
    place = ACTION.parent.relative_to(ACTION.parents[3])
    [step] = [step for step in job["steps"] if str(place) in step["uses"]]
    known = load_action()["inputs"]
    assert {*step["with"]} <= {*known}
    assert {name for name, each in known.items() if each.get("required")} <= {*step["with"]}

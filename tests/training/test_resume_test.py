"""`distlaunch test-resume` names the flaw of each program that has one, and finds none in those that resume exactly."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.proof.models import ResumeProof
from tests.harness.processes.commands import distlaunch_command
from tests.harness.processes.resume_programs import EXACT, FLAWED, FOLDER, UNSEEDED, ResumeProgram

NAN = """
import pathlib
import numpy
from worker_entry import progress

done = pathlib.Path("done.npz")
begin = int(numpy.load(done)["step"]) if done.exists() else 0
for step in range(begin + 1, 9):
    numpy.savez("part.npz", step=step)
    pathlib.Path("part.npz").rename(done)
    progress.report(step=step, loss=float("nan"))
"""
COVERS = (
    "launcher/proof",
    "launcher/python/resume_test.py",
    "worker_entry/task/trace.py",
    "worker_entry/task/saves.py",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the programs, in which no test leaves anything for another."""
    return Path(shutil.copytree(FOLDER, tmp_path / "programs", ignore=shutil.ignore_patterns("__pycache__")))


def run_resume_test(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the result, and what was printed while it ran."""
    command = distlaunch_command("test-resume", "--json", "-o", "out", *words)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.parametrize("program", FLAWED, ids=lambda program: Path(program.script).stem)
def test_the_flaw_of_a_program_is_named(folder: Path, program: ResumeProgram) -> None:
    status, proof, said = run_resume_test(folder, "--only", program.shown_by, program.script)
    assert status == 1, said
    assert not proof["exact"]
    assert proof["repeats"]
    [result] = proof["results"]
    assert not result["exact"]
    flaws = {flaw["reference"]: flaw for flaw in result["flaws"]}
    assert program.flaw in flaws, said
    text = "{message}; {hint}".format(**flaws[program.flaw])
    assert all(word in text for word in program.words), text


@pytest.mark.parametrize("program", EXACT, ids=lambda program: Path(program.script).stem)
def test_a_program_that_resumes_exactly_is_said_to(folder: Path, program: ResumeProgram) -> None:
    status, proof, said = run_resume_test(folder, "--quick", program.script)
    assert [result["flaws"] for result in proof["results"]] == [[], [], []], said
    assert status == 0
    assert proof["exact"]
    assert proof["repeats"]
    assert proof["results"][0]["repeated"] > 0
    # Nothing is left but the logs, and the program's own folder is as it was.
    assert not any(Path(proof["directory"]).glob("*/work"))
    assert {path.name for path in folder.iterdir()} == {*(path.name for path in FOLDER.glob("*.py")), "out"}


def test_the_files_go_to_the_named_folder_and_a_loss_that_is_no_number_is_null(folder: Path) -> None:
    (folder / "nan.py").write_text(NAN)
    command = distlaunch_command("test-resume", "-o", "../out", "-n", "1", "--only", "in an epoch", "nan.py")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    proof = ResumeProof.model_validate_json((folder.parent / "out" / "resume.json").read_text())
    assert {point.loss for point in proof.losses} == {None}
    assert (folder.parent / "out" / "resume.html").exists()


def test_a_program_whose_runs_find_the_checkpoint_of_the_run_before_is_told_where_it_saves(folder: Path) -> None:
    text = NAN.replace("9", "begin + 9")  # each run trains, wherever it begins
    for name in ("done.npz", "part.npz"):
        text = text.replace(f'"{name}"', f'"{folder.parent / name}"')
    (folder / "outside.py").write_text(text)
    status, _, said = run_resume_test(folder, "-n", "1", "outside.py")
    assert status == 2, said
    assert "has found an old checkpoint" in said
    assert "DISTLAUNCH_CHECKPOINT_DIR" in said


def test_a_program_that_does_not_repeat_itself_is_said_not_to_and_only_larger_differences_count(folder: Path) -> None:
    status, proof, said = run_resume_test(folder, "--quick", UNSEEDED.script)
    assert not proof["repeats"], said
    assert "at step 1: loss" in proof["noise"]
    assert status == 0, said


def test_a_bounded_test_ends_after_the_steps_and_needs_no_end_of_the_program(folder: Path) -> None:
    status, proof, said = run_resume_test(folder, "--steps", "20", "--only", "in an epoch", "exact_arrays.py")
    assert status == 0, said
    assert proof["steps"] == 20
    assert [point["step"] for point in proof["losses"]] == [*range(1, 21)]
    assert proof["results"][0]["losses"][-1] == proof["losses"][-1]


def test_the_tasks_of_a_spec_for_other_machines_run_on_this_one_and_data_is_linked(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "programs", ignore=shutil.ignore_patterns("__pycache__")))
    (folder / "data").mkdir()
    (folder / "data" / "scale").write_text("1.0")
    program = (folder / "exact_arrays.py").read_text()
    (folder / "train.py").write_text(f"{program}\nassert open('data/scale').read() == '1.0'\n")
    (folder / "two.yaml").write_text(
        "nodes: [{host: gpu-a, address: 10.1.1.1}, {host: gpu-b, address: 10.1.1.2}]\nprogram: {script: train.py}\n"
    )
    status, proof, said = run_resume_test(folder, "--link", "data", "--only", "of a whole node", "two.yaml")
    assert status == 0, said
    assert proof["results"][0]["faults"] == ["kill:worker:1@step=28"]  # the second machine's only task
    assert (folder / "data" / "scale").read_text() == "1.0"


def test_ctrl_c_leaves_nothing(folder: Path) -> None:
    command = distlaunch_command("test-resume", "-o", "out", "exact_arrays.py")
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    while not any((folder / "out").glob("whole-1/trace/*.jsonl")):  # it trains
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 130, said
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("raise ValueError('no data')", 3, ("the program fails without a fault", "no data")),
        ("print(1)", 3, ("trained no step",)),
        ("open('data.bin')", 3, ("data.bin", "--link data.bin")),
    ],
)
def test_a_program_that_cannot_be_tested_is_told_why(
    tmp_path: Path, text: str, status: int, words: tuple[str, ...]
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "data.bin").write_text("1")
    (tmp_path / ".gitignore").write_text("*.bin\n")
    found, _, said = run_resume_test(tmp_path, "train.py")
    assert found == status, said
    assert all(word in said for word in words), said

"""The benchmark of verdicts knows the truth about its faults, and a wrong verdict is not counted as right."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from launcher.failures import FAILURES
from tests.benchmarks.document import PAGE, split_at_rows
from tests.benchmarks.verdicts.by_hand import read_cause
from tests.benchmarks.verdicts.faults import FAULTS, LATE, SUCCEEDED, WORKERS, Fault, find_markers
from tests.benchmarks.verdicts.score import WRONG, Answer, Played, Score, add_up, score
from tests.benchmarks.verdicts.tables import HEADING, render_row
from tests.benchmarks.verdicts.tools import TOOLS, Line, Ran, RayTrain, Torchrun
from tests.harness.documents import read
from tests.harness.places import PROGRAMS

RIGHT = Score(task=True, cause=True, reference=True)
FAULT = next(fault for fault in FAULTS if fault.name == "key-error" and fault.worker == 2)
[(FILE, NUMBER)] = FAULT.find_lines()
TEXT = f"worker:2 on local exited with status 1\nKeyError: 'no label for image 4711'   /x/{FILE}:{NUMBER}"
ANSWER = Answer("task-failed", 2, TEXT)


# --- the table ---


def test_the_table_has_forty_different_faults_in_every_worker_early_and_late() -> None:
    assert len({str(fault) for fault in FAULTS}) == len(FAULTS) >= 40
    assert {(fault.worker, fault.step >= LATE) for fault in FAULTS} == {
        (worker, late) for worker in range(WORKERS) for late in (False, True)
    }
    assert {fault.is_one for fault in FAULTS} == {True, False}


def test_every_fault_is_in_its_program() -> None:
    sources = {path.stem: path.read_text() for path in PROGRAMS.glob("broken*.py")}
    functions = {node.name for node in ast.walk(ast.parse(sources["broken"])) if isinstance(node, ast.FunctionDef)}
    functions.add("wrapped_os_exit")  # another name of a function
    for fault in FAULTS:
        programs = [fault.program, *(["broken_torch"] if fault.in_torch else [])]
        for program in programs:
            asked = f'"{fault.name}"' in sources[program]
            assert asked or fault.name.replace("-", "_") in functions, f"{program} has no {fault}"
            place = f'"{fault.place}"' in sources[program] or "broken.PLACE" in sources[program]
            assert place, f"{program} does not ask for {fault}"


def test_the_line_of_a_fault_is_the_one_with_its_marker() -> None:
    for fault in FAULTS:
        assert bool(fault.find_lines()) or not fault.has_line, f"{fault} has no marker"
    for name, places in find_markers().items():
        assert name in {fault.name for fault in FAULTS}, f"the marker {name} belongs to no fault"
        for file, number in places:
            assert f"# fault: {name}" in (PROGRAMS / file).read_text().splitlines()[number - 1]


def test_the_classes_of_a_fault_are_those_of_distlaunch() -> None:
    assert {name for fault in FAULTS for name in fault.classes} <= {*FAILURES, SUCCEEDED}


# --- the score ---


def test_a_verdict_with_worker_class_words_and_line_is_right() -> None:
    assert score(FAULT, ANSWER) == RIGHT
    quoted = TEXT.replace(f"{FILE}:{NUMBER}", f'{FILE}", line {NUMBER}, in key_error')
    assert score(FAULT, replace(ANSWER, text=quoted)) == RIGHT


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, WRONG),
        (Answer(SUCCEEDED), WRONG),
        (replace(ANSWER, worker=1), Score(task=False, cause=False, reference=True)),
        (replace(ANSWER, worker=None), Score(task=False, cause=False, reference=True)),
        (replace(ANSWER, reference="task-killed"), replace(RIGHT, reference=False)),
        (replace(ANSWER, text=TEXT.replace("KeyError", "ValueError")), replace(RIGHT, cause=False)),
        (replace(ANSWER, text=TEXT.replace(f":{NUMBER}", f":{NUMBER + 1}")), replace(RIGHT, cause=False)),
        (replace(ANSWER, text=TEXT.replace(f":{NUMBER}", f":{NUMBER}0")), replace(RIGHT, cause=False)),
        (replace(ANSWER, text=TEXT.replace(FILE, "other.py")), replace(RIGHT, cause=False)),
    ],
)
def test_a_wrong_verdict_is_counted_as_wrong(answer: Answer | None, expected: Score) -> None:
    assert score(FAULT, answer) == expected


def test_a_failure_that_does_not_exist_is_a_wrong_verdict() -> None:
    fine = next(fault for fault in FAULTS if not fault.is_one)
    assert score(fine, Answer(SUCCEEDED)) == RIGHT
    assert score(fine, Answer("task-failed", fine.worker)) == WRONG


def test_the_sum_counts_every_fault_and_the_medians_only_what_was_said() -> None:
    said = [Played(FAULT, ANSWER, seconds, seconds + 1, 0) for seconds in (1.0, 2.0, 9.0)]
    total = add_up([*said, Played(FAULT, None, None, None, 3)])
    assert (total.faults, total.task, total.cause, total.reference) == (4, 3, 3, 3)
    assert (total.said_s, total.gone_s, total.left) == (2.0, 3.0, 3)
    assert render_row("ours", total) == "| ours | 4 | 75 % | 75 % | 75 % | 2.0 s | 3.0 s | 3 |"


# --- the verdicts of rivals ---


def ran(text: str, status: int | None) -> Ran:
    return Ran([Line(float(number), line) for number, line in enumerate(text.splitlines())], PROGRAMS, status)


def test_the_verdict_of_torchrun_is_its_root_cause() -> None:
    root = (
        f"Root Cause (first observed failure):\n[0]:\n  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 7)\n{TEXT}"
    )
    said = Torchrun().read(ran(f"Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n{root}", 1))
    assert said is not None
    assert (score(FAULT, said.answer), said.time) == (RIGHT, 3.0)
    killed = Torchrun().read(ran(root.replace(": 1 (pid", ": -11 (pid"), 1))
    assert killed is not None
    assert killed.answer.reference == "task-killed"
    assert Torchrun().read(ran("terminated", None)) is None


def test_the_verdict_of_ray_is_its_first_rank_with_the_traceback_of_its_worker() -> None:
    noise = "(RayTrainWorker pid=7) Traceback: of another worker"
    worker = "\n".join(f"(RayTrainWorker pid=8) {line}" for line in ["Error in training function:", *TEXT.splitlines()])
    end = '{"failed": {"2": "cut", "0": "other"}, "gone": [0]}'
    said = RayTrain().read(ran(f"(RayTrainWorker pid=8) rank 2 trains\n{noise}\n{worker}\n{end}", 0))
    assert said is not None
    assert score(FAULT, said.answer) == RIGHT
    assert "another worker" not in said.answer.text
    gone = RayTrain().read(ran('{"failed": {"1": "The actor died"}, "gone": [1]}', 0))
    assert gone is not None
    assert gone.answer == Answer("task-killed", 1, "The actor died\n")
    nothing = RayTrain().read(ran('{"failed": null, "gone": []}', 0))
    assert nothing is not None
    assert nothing.answer == Answer("task-failed")
    fine = RayTrain().read(ran('{"failed": {}, "gone": []}', 0))
    assert fine is not None
    assert fine.answer == Answer(SUCCEEDED)
    assert RayTrain().read(ran("step 0", None)) is None


def test_the_cause_by_hand_is_the_last_traceback_or_the_last_lines() -> None:
    first, last = (
        "Traceback (most recent call last):\n  File 'x'\nE: 1",
        "Traceback (most recent call last):\n  y\nF: 2",
    )
    assert read_cause(f"begin\n{first}\nmore\n{last}\nend") == f"{last}\nend"
    chain = f"{first}\n\nThe above exception was the direct cause of the following exception:\n\n{last}"
    assert read_cause(f"begin\n{chain}") == chain
    assert read_cause("1\n2\n3\n4\n5\n6") == "2\n3\n4\n5\n6"


# --- the table of the documents ---


def test_the_documents_have_a_row_for_every_launcher() -> None:
    rows = split_at_rows(read(PAGE), HEADING)[1]
    names = [row.split("|")[1].strip() for row in rows]
    assert sorted(names) == sorted(tool.title for tool in TOOLS)
    assert all(len(row.split("|")) == len(HEADING.split("|")) for row in rows)


def test_a_fault_says_where_it_happens() -> None:
    fault = Fault(name="hang", place="data", worker=1, step=LATE)
    assert str(fault) == "hang, in the data, worker:1, step 25"

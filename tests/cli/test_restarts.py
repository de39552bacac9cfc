"""A failed cluster is started again as one, within its budget, depending on what failed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.failures import FAILURES
from launcher.gang.restarts import (
    LONG_S,
    LONGEST_PAUSE_S,
    REMEMBERED,
    UNCOUNTED,
    UNCOUNTED_CONFIRMED,
    Ending,
    GiveUp,
    Restart,
    decide_restart,
    price,
    remember,
)
from launcher.spec.parts import RestartSpec
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.witness import assert_none_left, make_mark, marked, wait_until
from worker_entry.protocol.frozen import replace

COVERS = (
    "launcher/gang",
    "launcher/controller/nodes.py",
    "launcher/controller/supervisor.py",
    "launcher/controller/attempt.py",
)

FLAKY = str(PROGRAMS / "fail_at_first.py")
FREE = [name for name, failure in FAILURES.items() if not failure.counted]


def ending(
    reference: str = "task-killed",
    started: float = 0.0,
    lasted: float = 5.0,
    *,
    trained: bool = True,
    saved: bool = False,
    step: int = 0,
) -> Ending:
    return Ending(reference, started, started + lasted, trained, saved, step)


def priced(*attempts: tuple[str, int | None], is_confirmed: bool = False) -> list[Ending]:
    """The ends of attempts, each with its class and its last step; None if it did none."""
    endings: list[Ending] = []
    for reference, step in attempts:
        one = ending(reference, trained=step is not None, step=step or 0)
        endings.append(price(one, endings, is_confirmed=is_confirmed, is_guess=False))
    return endings


def decide(*endings: Ending, **spec: Any) -> Restart | GiveUp:
    return decide_restart(RestartSpec(**{"max_restarts": 3, **spec}), endings)


class TestDecision:
    @pytest.mark.parametrize(
        ("saved", "gives_up"),
        [("s---", True), ("---", False), ("-----", False), ("s--", False), ("s--s--", False), ("s--s---", True)],
    )
    def test_ends_a_run_that_saves_nothing_any_more_whatever_restarts_are_left(
        self, saved: str, gives_up: bool
    ) -> None:
        """Attempts that never trained (`x`) prove nothing."""
        for between in ("", "x"):
            attempts = [*between.join(saved)]
            endings = [
                ending("preempted", float(index), trained=kind != "x", saved=kind == "s")
                for index, kind in enumerate(attempts)
            ]
            decision = decide(*endings, max_restarts=100)
            assert (isinstance(decision, GiveUp) and decision.fruitless) == gives_up

    @pytest.mark.parametrize(("steps", "gives_up"), [((9, 9, 3, 9), True), ((9, 9, 10, 9), False)])
    def test_continues_a_run_that_makes_progress_without_a_visible_checkpoint(
        self, steps: tuple[int, ...], gives_up: bool
    ) -> None:
        endings = [ending(started=index, saved=index == 0, step=step) for index, step in enumerate(steps)]
        assert isinstance(decide(*endings, max_restarts=100), GiveUp) == gives_up

    def test_is_to_give_up_in_silence_where_no_restarts_are_wanted(self) -> None:
        assert decide(ending(), max_restarts=0) == GiveUp()
        assert decide(ending("preempted"), max_restarts=0) == GiveUp()

    def test_is_to_start_again_as_often_as_is_allowed(self) -> None:
        assert decide(ending()) == Restart(0.0, 1, free=False)
        assert decide(*[ending()] * 3) == Restart(2.0, 3, free=False)
        assert decide(*[ending()] * 4) == GiveUp("not started again: 3 restarts did not help")

    @pytest.mark.parametrize("reference", FREE)
    def test_costs_nothing_after_what_is_nobodys_fault(self, reference: str) -> None:
        advancing = [(reference, 10 * number) for number in range(1, 10)]
        assert decide(*priced(*advancing)) == Restart(LONGEST_PAUSE_S, 0, free=True)
        assert decide(*priced(*advancing[:3], ("task-killed", 0))) == Restart(4.0, 1, free=False)
        assert isinstance(decide(*priced(*[("task-killed", 0)] * 3, (reference, 0))), Restart)

    @pytest.mark.parametrize("reference", FREE)
    def test_is_counted_in_the_end_if_nothing_advances(self, reference: str) -> None:
        """As if the program ended with `sys.exit(143)`, or a server of its own found its port taken."""
        once, again = priced(*[(reference, None)] * 2)
        assert (once.is_free, again.is_free) == (True, False)
        assert decide(*priced(*[(reference, None)] * 3), max_restarts=1) == GiveUp(
            "not started again: 1 restart did not help"
        )
        same = priced(*[(reference, 10)] * 9)
        assert [one.is_free for one in same] == [True] * (UNCOUNTED + 1) + [False] * (8 - UNCOUNTED)
        assert isinstance(decide(*same), GiveUp)
        between = priced(*[(reference, 10)] * 4, ("task-killed", 0), (reference, 10))
        assert between[-1].is_free

    def test_is_not_free_if_only_the_programs_words_say_why(self) -> None:
        assert not price(ending("port-taken"), (), is_confirmed=False, is_guess=True).is_free

    def test_is_free_for_long_if_the_engine_confirms_the_preemptions(self) -> None:
        untrained = priced(*[("preempted", None)] * 100, is_confirmed=True)
        assert sum(one.is_free for one in untrained) == UNCOUNTED_CONFIRMED
        advancing = priced(*(("preempted", number) for number in range(1, 101)), is_confirmed=True)
        assert all(one.is_free for one in advancing)

    def test_is_made_however_often_a_run_is_preempted(self) -> None:
        preempted = [replace(ending("preempted"), is_free=True)] * 5000
        assert decide(*preempted) == Restart(LONGEST_PAUSE_S, 0, free=True)
        assert decide(*preempted, pause_s=0.0) == Restart(0.0, 0, free=True)

    @given(st.lists(st.sampled_from(["preempted", "task-killed"]), min_size=1, max_size=40), st.data())
    def test_does_not_depend_on_what_is_not_remembered(self, references: list[str], data: st.DataObject) -> None:
        many = [
            replace(ending(reference, float(number)), is_free=reference == "preempted")
            for number, reference in enumerate(references * 10)
        ]
        spec = {"max_restarts": data.draw(st.integers(1, 300)), "period_s": data.draw(st.sampled_from([0.0, 20.0]))}
        kept: list[Ending] = []
        for one in many:
            kept = remember([*kept, one])
        assert decide(*kept, **spec) == decide(*many, **spec)
        assert sum(one.is_free for one in kept) <= REMEMBERED

    def test_counts_within_its_period_only(self) -> None:
        often = [ending(started=10.0 * number) for number in range(4)]
        seldom = [ending(started=1000.0 * number) for number in range(9)]
        assert decide(*often, period_s=60) == GiveUp("not started again: 3 restarts within 60 s did not help")
        assert decide(*seldom, period_s=60) == Restart(LONGEST_PAUSE_S, 1, free=False)

    def test_is_to_give_up_after_a_program_error_before_the_first_step_and_no_other(self) -> None:
        given_up = decide(ending("task-failed", trained=False))
        assert given_up == GiveUp(
            "not started again: the program failed before its first training step, and would fail again"
        )
        assert isinstance(decide(ending("task-failed")), Restart)
        assert isinstance(decide(ending("task-killed", trained=False)), Restart)

    @pytest.mark.parametrize("reference", ["ended-early", "version-mismatch", "disk-full"])
    def test_is_to_give_up_where_nothing_would_change(self, reference: str) -> None:
        assert decide(ending(reference)) == GiveUp(f"not started again: `restart.on` does not name {reference}")
        assert isinstance(decide(ending(reference), on=[reference]), Restart)

    @pytest.mark.parametrize("reference", ["no-program", "cannot-reach", "refused"])
    def test_is_to_give_up_in_silence_after_what_is_no_failure_of_a_cluster(self, reference: str) -> None:
        assert decide(ending(reference)) == GiveUp()

    def test_pauses_longer_after_each_that_failed_soon(self) -> None:
        soon = [decide(*[ending()] * count, max_restarts=99, pause_s=2) for count in range(1, 8)]
        assert [restart.pause_s for restart in soon if isinstance(restart, Restart)] == [0, 2, 4, 8, 16, 32, 60]
        assert decide(*[ending()] * 5, ending(lasted=LONG_S), max_restarts=99) == Restart(0.0, 6, free=False)
        assert decide(ending(), pause_s=0) == Restart(0.0, 1, free=False)

    def test_pauses_as_long_after_more_restarts_than_a_number_can_double(self) -> None:
        assert decide(*[ending()] * 2000, max_restarts=5000) == Restart(LONGEST_PAUSE_S, 2000, free=False)

    @given(st.lists(st.sampled_from([*FAILURES]), min_size=1, max_size=40), st.integers(0, 5))
    def test_never_spends_more_than_its_budget(self, references: list[str], limit: int) -> None:
        endings: list[Ending] = []
        counted = 0
        for reference in references:
            one = ending(reference, trained=True, step=len(endings))
            endings.append(price(one, endings, is_confirmed=False, is_guess=False))
            decision = decide(*endings, max_restarts=limit)
            if isinstance(decision, GiveUp):
                break
            counted += not decision.free
            assert decision.count == counted <= limit
            assert decision.free == (reference in FREE)


# --- real processes ---


def test_a_cluster_that_fails_is_started_again_as_one(distlaunch: Distlaunch) -> None:
    mark = make_mark()
    ran = distlaunch("local", "-n", "3", "--max-restarts", "2", "--", "python3", FLAKY, "3", "worker:1", "7", env=mark)
    assert ran.status == 0, ran.stderr
    assert [attempt["verdict"]["reference"] for attempt in ran.report["attempts"]] == [
        "task-failed",
        "task-failed",
        "succeeded",
    ]
    assert "Restarting: attempt 2 (restart 1 of 2)" in ran.stderr
    assert "Restarting in 1 s: attempt 3 (restart 2 of 2)" in ran.stderr
    assert "    1: worker:1 on local exited with status 7 after" in ran.stderr
    assert "0 processes left on this machine" in ran.stderr
    assert_none_left(mark)
    run_ids = set()
    for number, attempt in enumerate(ran.report["attempts"], 1):
        assert attempt["attempt"] == number
        assert [task["task"] for task in attempt["tasks"]] == ["worker:0", "worker:1", "worker:2"]
        assert attempt["processes_left"] == 0
        for task in attempt["tasks"]:
            assert task["log"].startswith(f"attempt-{number}/")
            said = re.search(
                r"attempt (\d) of (\S+), checkpoints in (\S+)\n", (ran.directory / task["log"]).read_text()
            )
            assert said is not None
            assert int(said[1]) == number
            run_ids.add((said[2], said[3]))
    [(run_id, checkpoints)] = run_ids  # the same for all tasks of all attempts
    assert run_id == ran.report["run_id"]
    assert Path(checkpoints) == ran.directory / "checkpoints"
    for before, after in zip(ran.report["attempts"], ran.report["attempts"][1:], strict=False):
        assert before["ended"] < min(task["started"] for task in after["tasks"])


@pytest.mark.slow
def test_every_process_of_an_attempt_is_gone_before_the_next_one_starts(distlaunch: Distlaunch) -> None:
    """A child that ignores SIGTERM outlives its task, and must not meet the next attempt."""
    script = (
        "import os, signal, subprocess, sys, time; "
        "left = os.environ.get('PIDS'); "
        "old = [int(p) for p in open(left).read().split()] if os.path.exists(left) else []; "
        "assert not [p for p in old if os.path.exists(f'/proc/{p}')], 'somebody is left'; "
        "c = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); "
        "time.sleep(60)'], start_new_session=True); "
        "open(left, 'a').write(f'{c.pid} {os.getpid()} '); "
        "time.sleep(0.5); sys.exit(7 if os.environ['DISTLAUNCH_ATTEMPT'] < '3' else 0)"
    )
    ran = distlaunch(
        "local", "-n", "1", "--max-restarts", "2", "--", "python3", "-c", script, env={"PIDS": "pids"}, timeout=60
    )
    assert ran.status == 0, ran.stderr + ran.stdout


@pytest.mark.slow
def test_a_pause_ends_at_once_when_the_user_ends_the_run(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("nodes: [{host: local}]\nrestart: {max_restarts: 3, pause_s: 500}\nprogram: {command: ['false']}\n")
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(distlaunch_command("up", "--run-dir", "run", str(spec)), cwd=tmp_path, stderr=stderr)
    with process:
        try:
            wait_until(lambda: "Restarting in 500 s" in (tmp_path / "stderr").read_text(), "it pauses")
            assert end(tmp_path) == (0, f"Stopped: {tmp_path}/run\n")
            assert process.wait(timeout=60) == 143
        finally:
            process.kill()
    assert os.path.exists(tmp_path / "run" / "report.json")
    assert "Interrupted after" in (tmp_path / "stderr").read_text()


def end(folder: Path) -> tuple[int, str]:
    asked = subprocess.run(
        distlaunch_command("down", "./run"), cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    return asked.returncode, asked.stdout


@pytest.mark.slow
def test_down_ends_a_running_run_and_waits_until_nothing_is_left(tmp_path: Path) -> None:
    mark = make_mark()
    with (tmp_path / "stderr").open("wb") as stderr:
        command = distlaunch_command("local", "-n", "2", "--run-dir", "run", "--", "sleep", "600")
        process = subprocess.Popen(command, cwd=tmp_path, stderr=stderr, env={**os.environ, **mark})
    with process:
        try:
            wait_until(lambda: len(marked(mark)) > 4, "the tasks run")
            assert end(tmp_path) == (0, f"Stopped: {tmp_path}/run\n")
            assert_none_left(mark)
            assert process.wait(timeout=20) == 143
        finally:
            process.kill()
    assert end(tmp_path) == (0, f"Already ended: {tmp_path}/run\n")


@pytest.mark.slow
def test_an_error_of_the_controller_after_the_start_has_its_report_and_the_right_status(distlaunch: Distlaunch) -> None:
    """The second attempt cannot write its plan: something is in the way."""
    in_the_way = 'rm "$0/plan.json"; mkdir -p "$0/plan.json/x"; exit 1'
    run = distlaunch("local", "--dry-run", "--", "true").directory
    ran = distlaunch("local", "-n", "1", "--max-restarts", "1", "--", "sh", "-c", in_the_way, str(run))
    assert ran.status == ran.report["exit_status"] == 3
    told = (
        f"Error: cannot write {run}/plan.json: Is a directory [run-directory]\n  choose another folder with --run-dir\n"
    )
    summary = "  2 attempts; before the last one:\n    1: worker:0 on local exited with status 1 after "
    assert re.search(f"{re.escape(told)}  0 processes left on this machine\n{re.escape(summary)}", ran.stderr)
    assert ran.stderr.count("Error: cannot write") == 1
    assert (ran.report["outcome"], ran.report["verdict"]["reference"]) == ("failed", "run-directory")
    assert [attempt["verdict"]["reference"] for attempt in ran.report["attempts"]] == ["task-failed", "run-directory"]

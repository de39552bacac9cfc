"""`distlaunch local`: what its arguments mean, and how many workers it allows."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.spec.command_line import make_tasks
from tests.harness.processes.commands import Distlaunch
from worker_entry.protocol.strategy_names import StrategyName


def by_hand(in_process: Distlaunch, *words: str) -> list[list[str]]:
    """The end of each task's command by hand: the words after the runner's `run`, or the program's own command."""
    ran = in_process("local", "--dry-run", *words)
    assert (ran.status, ran.stderr) == (0, "")
    assert not ran.directory.exists()
    commands = [line.split(maxsplit=2)[2] for line in ran.stdout.splitlines() if line.startswith("  by hand ")]
    ends = []
    for command in commands:
        argv = shlex.split(command)
        argv = argv[argv.index("env") + 3 :]
        while "=" in argv[0]:
            del argv[0]
        ends.append(argv[argv.index("run") + 1 :] if argv[1:3] == ["-m", "worker_entry"] else argv)
    return ends


class TestProgram:
    def test_local_without_arguments_runs_the_demo(self, in_process: Distlaunch, tmp_path: Path) -> None:
        model = str(tmp_path / "run" / "model")
        assert by_hand(in_process) == [["-m", "worker_entry.demo.train", "--model-dir", model]] * 2
        of_jax = [["-m", "worker_entry.demo.train_jax", "--model-dir", model]] * 2
        assert by_hand(in_process, "--framework", "jax") == of_jax

    @pytest.mark.parametrize(
        ("words", "argv"),
        [
            pytest.param(["train.py"], ["train.py"], id="script"),
            pytest.param(["train.py", "--epochs", "3"], ["train.py", "--epochs", "3"], id="script-with-options"),
            pytest.param(
                ["train.py", "--workers", "9", "-m", "-h", "--dry-run", "--version"],
                ["train.py", "--workers", "9", "-m", "-h", "--dry-run", "--version"],
                id="options-after-the-script-belong-to-it",
            ),
            pytest.param(
                ["train.py", "--", "x"], ["train.py", "--", "x"], id="double-dash-after-the-script-belongs-to-it"
            ),
            pytest.param(
                ["train.py", "a", "--", "--", "b"],
                ["train.py", "a", "--", "--", "b"],
                id="two-double-dashes-after-the-script",
            ),
            pytest.param(["train.py", "", "a b", "$x"], ["train.py", "", "a b", "$x"], id="empty-and-special-words"),
            pytest.param(["-m", "my.train", "--epochs", "3"], ["-m", "my.train", "--epochs", "3"], id="module"),
            pytest.param(["-m", "my.train", "-m", "--", "x"], ["-m", "my.train", "-m", "--", "x"], id="module-dashes"),
            pytest.param(["--module", "my.train"], ["-m", "my.train"], id="long-module-option"),
            pytest.param(
                ["--set", "keras.patch=false", "train.py"],
                ["--no-keras-patch", "train.py"],
                id="our-option-before-the-script",
            ),
            pytest.param(["--", "./train", "--epochs", "3"], ["--", "./train", "--epochs", "3"], id="command"),
            pytest.param(["--", "ls", "--", "-l"], ["--", "ls", "--", "-l"], id="command-with-dashes"),
            pytest.param(["--", "python", "-m", "x"], ["--", "python", "-m", "x"], id="command-with-an-option-of-ours"),
        ],
    )
    def test_local_runs_the_program_given_by_its_arguments(
        self, in_process: Distlaunch, words: list[str], argv: list[str]
    ) -> None:
        assert by_hand(in_process, "--workers", "1", *words) == [argv]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["-m"], "-m needs the name of a program after it"),
            (["--"], "-- needs the name of a program after it"),
            ([""], "the name of the program is empty"),
            (["--", ""], "the name of the program is empty"),
            (["-m", ""], "the name of the program is empty"),
            (["--python", "", "train.py"], "--python: is empty"),
            (["train.py", os.fsdecode(b"caf\xe9")], "is not UTF-8"),
            (["--gpus-per-worker", "64", "train.py"], "2 workers with 64 each would need 128"),
        ],
    )
    def test_local_with_an_invalid_program_is_a_usage_error(
        self, in_process: Distlaunch, words: list[str], message: str
    ) -> None:
        ran = in_process("local", "--dry-run", *words)

        assert ran.status == 2
        assert message in ran.stderr
        assert "[too-few-gpus]" in ran.stderr if "--gpus-per-worker" in words else "[usage]" in ran.stderr
        assert ran.stdout == ""
        assert not ran.directory.exists()


class TestWorkers:
    @pytest.fixture
    def two_cores(self) -> Iterator[None]:
        """Lets the command use at most two cores, however many the machine has."""
        if not hasattr(os, "sched_setaffinity"):
            pytest.skip("this system cannot keep a process to some of the cores")
        all_of_them = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(all_of_them)[:2])
        yield
        os.sched_setaffinity(0, all_of_them)

    def test_local_starts_two_workers_by_default(self, in_process: Distlaunch) -> None:
        assert len(by_hand(in_process, "train.py")) == 2

    @pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
    def test_local_rejects_an_invalid_number_of_workers(self, in_process: Distlaunch, number: str) -> None:
        ran = in_process("local", "--workers", number, "train.py")

        assert ran.status == 2
        assert "--workers" in ran.stderr
        assert number in ran.stderr
        assert ran.stdout == ""
        assert not ran.directory.exists()

    @pytest.mark.usefixtures("two_cores")
    def test_local_rejects_a_thousand_workers_and_suggests_oversubscribe(self, in_process: Distlaunch) -> None:
        ran = in_process("local", "--workers", "1000", "train.py")

        assert ran.status == 2
        assert ran.stderr.startswith("Error: 1,000 workers are too many for ")
        assert "--oversubscribe" in ran.stderr
        assert ran.stderr.endswith(" [usage]\n") or "[usage]\n" in ran.stderr
        assert ran.stdout == ""
        assert not ran.directory.exists()

    @pytest.mark.usefixtures("two_cores")
    def test_local_accepts_eight_workers_on_two_cores_but_not_nine(self, in_process: Distlaunch) -> None:
        assert len(by_hand(in_process, "--workers", "8", "train.py")) == 8
        assert in_process("local", "--dry-run", "--workers", "9", "train.py").status == 2

    def test_local_plans_a_thousand_workers_with_oversubscribe(self, in_process: Distlaunch) -> None:
        ran = in_process("local", "--dry-run", "--oversubscribe", "--workers", "1000", "train.py")

        assert ran.status == 0, ran.stderr
        assert ran.stdout.startswith("local-1000: multi_worker_mirrored, 1,000 tasks on 1 node, in ")
        assert ran.stdout.count("\n  by hand ") == 1000
        assert "\nworker:999 on local\n" in ran.stdout


class TestStrategies:
    def test_a_single_process_strategy_has_one_worker(self) -> None:
        assert make_tasks("mirrored", None, None, evaluator=False) == {"worker": 1}

    def test_the_parameter_server_strategy_adds_a_chief_and_servers_to_the_workers(self) -> None:
        assert make_tasks("parameter_server", 3, 2, evaluator=True) == {
            "worker": 3,
            "chief": 1,
            "ps": 2,
            "evaluator": 1,
        }

    @pytest.mark.parametrize(
        ("strategy", "workers", "ps", "evaluator", "why"),
        [
            ("mirrored", 2, None, False, "mirrored runs one process with all devices, not 2 workers"),
            ("multi_worker_mirrored", 2, 1, False, "multi_worker_mirrored has no parameter servers"),
            ("one_device", None, None, True, "runs one process on one node, but this spec has 2 tasks"),
        ],
    )
    def test_contradictory_strategy_options_are_rejected(
        self, strategy: StrategyName, workers: int | None, ps: int | None, evaluator: bool, why: str
    ) -> None:
        with pytest.raises(UsageError, match=why):
            make_tasks(strategy, workers, ps, evaluator=evaluator)

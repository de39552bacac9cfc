"""Errors of the command line have the style of all errors: what is wrong, and what to type instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.processes.commands import Distlaunch


class TestOptionsAfterScript:
    """They belong to the script. If the script fails at once, they may have been meant for distlaunch."""

    NOTE = (
        "--workers, -v stand after the program, so they are the program's; put them before the program for distlaunch\n"
    )

    def test_misplaced_options_are_named_if_the_script_fails_before_training(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        (tmp_path / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
        ran = distlaunch("local", "-n", "1", "train.py", "--workers=4", "--epochs", "3", "-v")
        assert ran.status == 1
        assert ran.stderr.endswith(self.NOTE)

    @pytest.mark.parametrize(
        ("script", "words"),
        [
            ("raise SystemExit(0)", ["train.py", "--workers", "4"]),
            ("raise SystemExit(2)", ["train.py", "--epochs", "4", "--", "--workers"]),
            ("raise SystemExit(2)", ["--", "python3", "train.py", "--workers", "4"]),
        ],
        ids=["success", "foreign-options", "command"],
    )
    def test_options_after_a_successful_script_or_a_command_are_not_named(
        self, distlaunch: Distlaunch, tmp_path: Path, script: str, words: list[str]
    ) -> None:
        (tmp_path / "train.py").write_text(script)
        assert "after the program" not in distlaunch("local", "-n", "1", *words).stderr

"""`distlaunch local`: which words of its command line belong to the program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.harness.processes.commands import Distlaunch

SHOW = "import json, sys\nprint('SHOWN ' + json.dumps([__name__, *sys.argv[1:]]), flush=True)\n"


class TestProgramArguments:
    @pytest.mark.parametrize(
        ("words", "name", "arguments"),
        [
            (["show.py", "--workers", "9", "--", "x"], "__main__", ["--workers", "9", "--", "x"]),
            (["-m", "show", "-m", "--dry-run"], "__main__", ["-m", "--dry-run"]),
            (["--", sys.executable, "show.py", "--", "x"], "__main__", ["--", "x"]),
        ],
    )
    def test_program_arguments_are_passed_unchanged(
        self, distlaunch: Distlaunch, tmp_path: Path, words: list[str], name: str, arguments: list[str]
    ) -> None:
        (tmp_path / "show.py").write_text(SHOW)

        ran = distlaunch("local", "--workers", "1", *words)

        assert ran.status == 0, ran.stderr
        (line,) = [line for line in ran.log().decode().splitlines() if line.startswith("SHOWN ")]
        assert json.loads(line.removeprefix("SHOWN ")) == [name, *arguments]

"""`distlaunch --help` and `distlaunch status` against the import of the libraries that each needs."""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.benchmarks.pairs import print_pair, time_command, time_pairs

COMMAND = str(Path(sys.executable).with_name("distlaunch"))
CLICK = "import click"
MODELS = f"{CLICK}; from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator"


def measure(runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = ["--run-dir", f"{folder}/run"]
        subprocess.run([COMMAND, "local", "-n", "1", *run, "--", "true"], capture_output=True, check=True)
        print("short commands; rival: a Python that only imports what they need")
        for title, words, imports in (
            ("--help (goal: 1.2)", ["--help"], CLICK),
            ("status, of an ended run", ["status", f"{folder}/run"], MODELS),
        ):
            ours, rival = time_pairs(
                partial(time_command, [COMMAND, *words]),
                partial(time_command, [sys.executable, "-c", imports]),
                runs * 4,
            )
            print_pair(title, ours, rival)

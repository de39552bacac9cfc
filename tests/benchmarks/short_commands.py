"""Short commands, and a run of `true`, against the import of the libraries that each needs."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.pairs import Pair, Row, time_command, time_pairs

COMMAND = str(Path(sys.executable).with_name("distlaunch"))
CLICK = "import click"
MODELS = f"{CLICK}; from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator"
IMPORTS_MODELS = f'`python -c "{CLICK}; from pydantic import BaseModel, …"`'
HELP = Row("`distlaunch --help`", f'`python -c "{CLICK}"`')
STATUS = Row("`distlaunch status` of an ended run", IMPORTS_MODELS)
TRUE = Row("`distlaunch local -n 1 -- true`", IMPORTS_MODELS)


def measure(runs: int) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as folder:
        run = ["--run-dir", f"{folder}/run"]
        subprocess.run([COMMAND, "local", "-n", "1", *run, "--", "true"], capture_output=True, check=True)
        print("short commands; rival: a Python that only imports what they need")
        for title, words, imports, row in (
            ("--help (goal: 1.2)", ["--help"], CLICK, HELP),
            ("status, of an ended run", ["status", f"{folder}/run"], MODELS, STATUS),
            ("local -n 1 -- true", ["local", "-n", "1", "--", "true"], MODELS, TRUE),
        ):
            ours, rival = time_pairs(
                partial(time_command, [COMMAND, *words], cwd=Path(folder)),
                partial(time_command, [sys.executable, "-c", imports]),
                runs * 4,
            )
            yield Pair(title, ours, rival, row=row)

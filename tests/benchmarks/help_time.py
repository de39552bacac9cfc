"""`distlaunch --help` against the import of click, the only library that it always needs."""

import sys
from pathlib import Path

from tests.benchmarks.pairs import print_pair, time_command, time_pairs

COMMAND = str(Path(sys.executable).with_name("distlaunch"))


def measure(runs: int) -> None:
    ours, rival = time_pairs(
        lambda: time_command([COMMAND, "--help"]),
        lambda: time_command([sys.executable, "-c", "import click"]),
        runs * 4,
    )
    print("distlaunch --help; rival: python -c 'import click' (goal: ratio at most 1.5)")
    print_pair("wall", ours, rival)

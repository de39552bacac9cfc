"""`python -m tests.benchmarks.verdicts LAUNCHER`: all faults, or some, under one launcher."""

import argparse
from pathlib import Path

from tests.benchmarks.document import write_row
from tests.benchmarks.verdicts.benchmark import measure_tool
from tests.benchmarks.verdicts.faults import FAULTS
from tests.benchmarks.verdicts.tables import HEADING, render_row
from tests.benchmarks.verdicts.tools import TOOLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    tools = {tool.name: tool for tool in TOOLS}
    parser.add_argument("launcher", choices=tools)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="parts of the faults' titles; default: all")
    parser.add_argument("--runs", type=int, default=1, help="runs of each fault; default: 1")
    parser.add_argument("--keep", type=Path, help="keep the files of each run in this folder")
    parser.add_argument("--document", action="store_true", help="write the row of the table in tests/README.md")
    arguments = parser.parse_intermixed_args()
    tool = tools[arguments.launcher]
    faults = [fault for fault in FAULTS if any(part in str(fault) for part in arguments.faults or [""])]
    row = render_row(tool.title, measure_tool(tool, faults, arguments.runs, arguments.keep))
    print(row)
    if arguments.document:
        write_row(HEADING, row)


main()

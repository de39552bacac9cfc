"""`python -m tests.benchmarks verdicts`: every fault under each launcher that is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from tests.benchmarks.verdicts.faults import FAULTS, Fault
from tests.benchmarks.verdicts.play import play
from tests.benchmarks.verdicts.score import Played, Total, add_up, score
from tests.benchmarks.verdicts.tables import render_row
from tests.benchmarks.verdicts.tools import TOOLS, Tool


def measure(runs: int) -> None:
    print(f"{len(FAULTS)} faults in clusters of 3: task, cause and class named right; until said, until gone; left")
    for tool in TOOLS:
        if tool.is_installed():
            print(render_row(tool.title, measure_tool(tool, FAULTS, runs)), flush=True)
        else:
            print(f"{tool.title}: not installed", flush=True)


def measure_tool(tool: Tool, faults: Sequence[Fault], runs: int, keep: Path | None = None) -> Total:
    """Plays the faults, and prints a line for each; `keep`: a folder for the files of each run."""
    played = []
    for number in range(runs):
        for fault in filter(tool.can_play, faults):
            folder = None
            if keep is not None:
                folder = keep / f"{fault}, {number}".replace(", ", "_").replace(" ", "-").replace(":", "-")
                folder.mkdir(parents=True)
            played.append(play(tool, fault, folder))
            _print(played[-1])
    return add_up(played)


def _print(played: Played) -> None:
    marks = ["right" if right else "WRONG" for right in astuple(score(played.fault, played.answer))]
    times = [f"{value:6.2f} s" if value is not None else "  never " for value in (played.said_s, played.gone_s)]
    said = f"{played.answer.reference}, worker:{played.answer.worker}" if played.answer is not None else "nothing"
    print(f"  {played.fault!s:<50} {' '.join(marks)} {' '.join(times)}  {played.left} left  {said}", flush=True)

"""`python -m tests.sim.storm`: plays scenarios from seeds; writes each that breaks a rule, shrunk, as a history."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

from tests.sim.storm.defects import DEFECTS, put_back
from tests.sim.storm.history_files import HISTORIES, write
from tests.sim.storm.many import measure
from tests.sim.storm.scenarios import Scenario, draw, draw_whole
from tests.sim.storm.shrinking import play, shrink

AT_ONCE = 100
SHOW_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.storm", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many seeds to play (1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (one per core)")
    parser.add_argument(
        "--whole", action="store_true", help="play with real agents and links, at a quarter of the rate"
    )
    parser.add_argument("--history", type=Path, metavar="FILE", help="play a history instead of seeds")
    parser.add_argument(
        "--nodes", type=int, nargs="+", metavar="N", help="play a run with N nodes instead, and show what it costs"
    )
    parser.add_argument("--keep", action="store_true", help=f"write what breaks a rule to {HISTORIES.name}/")
    parser.add_argument("--defect", choices=DEFECTS, default="", help="put this defect back: how soon is it found?")
    parser.add_argument("--max-failures", type=int, default=10, metavar="N", help="stop after so many (10)")
    chosen = parser.parse_args(arguments)
    if chosen.history is not None:
        return _show(Scenario.from_json(chosen.history.read_text(encoding="utf-8")), keep=False)
    if chosen.nodes:
        for nodes in chosen.nodes:
            for dies in (False, True):
                print(measure(nodes, dies=dies), flush=True)
        return 0
    drawn = draw_whole if chosen.whole else draw
    began = shown = time.monotonic()
    done, failed = 0, []
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    parts = (seeds[at : at + AT_ONCE] for at in range(0, len(seeds), AT_ONCE))
    with ProcessPoolExecutor(max(chosen.jobs or 1, 1)) as pool:
        for part, found in pool.map(partial(_play_all, chosen.defect, drawn), parts):
            done += len(part)
            failed += found
            for seed in found:
                print(f"seed {seed} breaks a rule", file=sys.stderr)
            if time.monotonic() - shown >= SHOW_S:
                shown = time.monotonic()
                print(f"{done} of {len(seeds)} runs, {len(failed)} failed, {_rate(done, began)}", file=sys.stderr)
            if len(failed) >= chosen.max_failures:
                pool.shutdown(cancel_futures=True)
                break
    print(f"{done} runs, {len(failed)} failed{f', first {failed[0]}' if failed else ''}, {_rate(done, began)}")
    for seed in failed if not chosen.defect else ():
        _show(drawn(seed), keep=chosen.keep)
    return 1 if failed else 0


def _rate(done: int, began: float) -> str:
    seconds = time.monotonic() - began
    return f"{done / seconds:.0f} runs per second, {seconds:.0f} s"


def _play_all(defect: str, drawn: Callable[[int], Scenario], seeds: Sequence[int]) -> tuple[Sequence[int], list[int]]:
    with put_back(defect):
        return seeds, [*islice((seed for seed in seeds if play(drawn(seed))), 10)]


def _show(scenario: Scenario, *, keep: bool) -> int:
    """Shows which rule a scenario breaks, and how little is needed for it."""
    broken = play(scenario)
    if not broken:
        print(f"seed {scenario.seed}: every rule holds")
        return 0
    print(f"seed {scenario.seed}: {broken[0]}")
    least = shrink(scenario, partial(print, "  shrunk to", file=sys.stderr))
    print(f"shrunk: {play(least)[0]}")
    print(f"wrote {write(least, play(least)[0])}" if keep else least.to_json(), end="\n" if keep else "")
    return 1


if __name__ == "__main__":
    sys.exit(main())

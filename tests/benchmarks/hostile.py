"""`python -m tests.benchmarks.hostile (nodes | orders | decode) [FRAMES] [SEED]`: how much a broken sender can break.

nodes: whole runs against a node that sends random frames. orders: real agents against a controller that sends them.
decode: the decoders of both directions, with every second frame spoiled. Prints the number of frames read, the
exceptions, and the peak memory.
"""

from __future__ import annotations

import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

from tests.sim.hostile_frames import RandomFrames
from tests.sim.hostile_nodes import Tally, noting_threads, run_once
from tests.sim.hostile_orders import Abused
from worker_entry.protocol.framing import Decoder, ProtocolError
from worker_entry.protocol.messages import ToController
from worker_entry.protocol.orders import ToAgent

TASKS = ["worker:0", "worker:1"]
MEMORY = Path("/dev/shm")


def main(what: str, frames: int, seed: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        began = time.monotonic()
        {"nodes": nodes, "orders": orders, "decode": decode}[what](Path(folder), frames, seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    below = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{time.monotonic() - began:.0f} s; peak memory {peak:.0f} MiB, of a child {below:.0f} MiB", flush=True)


def nodes(folder: Path, frames: int, seed: int) -> None:
    tally = Tally()
    noting_threads(tally)
    shown = 0
    while tally.frames < frames:
        run_once(folder / "run", seed, 100, tally)
        shutil.rmtree(folder / "run")
        seed += 1
        if tally.frames - shown > frames // 20:
            shown = tally.frames
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{tally.frames:,} frames, {tally.attempts:,} attempts, {len(tally.bugs)} raised, {peak:.0f} MiB",
                flush=True,
            )
    print(f"nodes: {tally.frames:,} frames, {tally.attempts:,} attempts, {tally.ended_links:,} links ended", end="; ")
    print(f"{len(tally.bugs)} raised", *tally.bugs[:5], sep="\n  ", flush=True)


def orders(folder: Path, frames: int, seed: int) -> None:
    taken = agents = peak = 0
    bugs: list[str] = []
    while taken < frames:
        abused = Abused(folder / "agent", seed, 0.0003)
        abused.feed(20_000)
        said = abused.end()
        bugs += [said] if said else []
        peak = max(peak, abused.peak_kib)
        taken, agents, seed = taken + abused.taken, agents + 1, seed + 1
        shutil.rmtree(folder / "agent", ignore_errors=True)
        if agents % 20 == 0:
            print(f"{taken:,} frames, {agents:,} agents, {len(bugs)} raised", *bugs[-1:], flush=True)
            print(f"  an agent's own memory: {peak / 1024:.0f} MiB", flush=True)
    print(f"orders: {taken:,} frames, {agents:,} agents, at most {peak / 1024:.0f} MiB each", end="; ")
    print(f"{len(bugs)} raised", *bugs[:5], sep="\n  ", flush=True)


def decode(_: Path, frames: int, seed: int) -> None:
    for union in (ToController, ToAgent):
        draw = RandomFrames(random.Random(seed), get_args(union), TASKS, 0.5)
        refused = 0
        for _number in range(frames):
            try:
                list(Decoder(union).feed(draw.draw()))
            except ProtocolError:
                refused += 1
        print(f"decode: {frames:,} frames, {refused:,} refused, none raised anything else", flush=True)


if __name__ == "__main__":
    main(
        sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000, int(sys.argv[3]) if len(sys.argv) > 3 else 1
    )

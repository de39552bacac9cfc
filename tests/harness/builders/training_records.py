"""Records of trainings that never ran: a made-up model whose state depends on all that a real one's depends on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from launcher.proof.record import Record, Save, Snapshot, State, Step

BATCHES = 4
"""Steps of an epoch."""


def mix(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


@dataclass(frozen=True)
class Trained:
    """The state after some steps. `hidden`: something that distlaunch does not see, but that the loss depends on."""

    weights: int = 1
    optimizer: int = 1
    seeds: int = 1
    iterations: int = 0
    rate: float = 0.1
    hidden: int = 1
    shuffles: int = 0
    """How often the data was shuffled."""
    epoch: int = 1
    batch: int = 0

    @property
    def state(self) -> State:
        digests = {"weights": f"{self.weights:x}", "optimizer": f"{self.optimizer:x}", "seeds": f"{self.seeds:x}"}
        return State(digests=digests, iterations=self.iterations, rate=self.rate)

    def step(self) -> tuple[Trained, Step]:
        """The next step."""
        shuffles = self.shuffles + (self.batch == 0)
        batch = mix("data", shuffles, self.batch)
        weights = mix(self.weights, self.optimizer, self.iterations, self.seeds, self.rate, self.hidden, batch)
        done = replace(
            self,
            weights=weights,
            optimizer=mix(self.optimizer, weights),
            seeds=mix(self.seeds),
            iterations=self.iterations + 1,
            rate=self.rate * 0.99,
            hidden=mix(self.hidden),
            shuffles=shuffles,
            batch=self.batch + 1,
        )
        loss = 1 + weights / 2**32
        step = Step(epoch=self.epoch, batch=done.batch, loss=loss, logs={}, input=f"{batch:x}", state=done.state)
        return done, step


@dataclass
class Training:
    """A training from some state on.

    `saved`: the state at each checkpoint. `pulls`: whether a callback changes the weights at the end of each epoch.
    """

    epochs: int = 3
    save_every: int = BATCHES
    pulls: bool = False
    saved: dict[int, Trained] = field(default_factory=dict)

    def run(self, begin: Trained | None = None, steps: int = 10**6) -> Record:
        """Trains until the end, or for this many steps, after which it is killed."""
        now = begin or Trained()
        done: list[Step] = []
        snapshots = [_snapshot("begin", 0, now)]
        saves: list[Save] = []
        while now.epoch <= self.epochs and len(done) < steps:
            now, step = now.step()
            done.append(step)
            if now.batch == BATCHES and len(done) < steps:
                now = replace(now, weights=mix(now.weights)) if self.pulls else now
                snapshots.append(_snapshot("epoch", len(done), now))
                now = replace(now, epoch=now.epoch + 1, batch=0)
            if self.save_every and now.iterations % self.save_every == 0 and len(done) < steps:
                saves.append(Save(len(done), "checkpoint"))
                self.saved[len(done)] = now
        return Record(tuple(done), tuple(snapshots), tuple(saves))


def _snapshot(kind: str, at: int, now: Trained) -> Snapshot:
    parts = {group: {f"{group}/0": digest} for group, digest in now.state.digests.items()}
    return Snapshot(kind=kind, at=at, epoch=now.epoch, logs={}, parts=parts, state=now.state)


def lose(state: Trained, names: Sequence[str]) -> Trained:
    """The state with these parts as at the beginning."""
    first = Trained()
    return replace(state, **{name: getattr(first, name) for name in names})

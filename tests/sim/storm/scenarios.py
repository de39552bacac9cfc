"""What a run is made of: a spec, a program, and the faults that happen. A seed draws them; JSON keeps them."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

TOGETHER, APART_S = 0.4, (0.0, 0.0, 0.1, 1.0, 5.0, 12.0)
"""How often a fault follows another one, and how soon: seldom does a single one show a defect."""
FATAL = ("1 ValueError: no batch", "1 UnavailableError: Socket closed", "1", "-9", "-15", "-11", "143", "42")
OUT_OF_STEP = "1 InternalError: Collective instance 7 expected group size 2, got 1"


@dataclass(frozen=True)
class Moment:
    """`delay_s` after the `number`-th time that this has happened anywhere in the run.

    `after`: `begin`; an order that a node gets, such as `Start`; `up`, once a cluster has formed; or `exit`, of a task.
    """

    after: str = "begin"
    number: int = 1
    delay_s: float = 0.0


@dataclass(frozen=True)
class Fault:
    """One thing that happens.

    `kind` is a method of `Faults`. `at`: the node or the task, if any. `seconds`: how long it lasts, 0 for ever.
    `what`: the rest.
    """

    kind: str
    when: Moment
    at: str = ""
    seconds: float = 0.0
    what: str = ""


@dataclass(frozen=True)
class Program:
    """The program of all tasks. Times are in seconds.

    `starts_s`: from the start of a task to its open port. `trains_s`: from the forming of the cluster to the end.
    `report_s`: how often it reports steps; 0: never. `saves`: whether it saves checkpoints. `on_stop`: what a task does
    when it is asked to end: `die`, `save`, which takes `save_s`, or `ignore`. `on_loss`: whether it crashes or hangs
    when another task is gone. `breaks_after_s`: how long it trains in each attempt before it fails; 0: it does not.
    `pause_s`: how long all tasks wait after their second report for something that is not a task, such as a download.
    """

    starts_s: float = 2.0
    trains_s: float = 40.0
    report_s: float = 5.0
    saves: bool = False
    on_stop: str = "die"
    save_s: float = 1.0
    on_loss: str = "crash"
    breaks_after_s: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """A run. `source`: where the nodes come from: empty, `slurm` or `kubernetes`.

    `is_whole`: whether agents and links are the real ones too.
    """

    seed: int
    spec: Mapping[str, Any]
    program: Program = Program()
    faults: tuple[Fault, ...] = ()
    source: str = ""
    checks: bool = False
    is_whole: bool = False

    def to_json(self, **more: Any) -> str:
        return json.dumps({**more, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        content = json.loads(text)
        faults = tuple(Fault(**{**fault, "when": Moment(**fault["when"])}) for fault in content["faults"])
        return cls(
            seed=content["seed"],
            spec=content["spec"],
            program=Program(**content["program"]),
            faults=faults,
            source=content["source"],
            checks=content["checks"],
            is_whole=content.get("is_whole", False),
        )

    def without(self, faults: Sequence[Fault]) -> Scenario:
        return replace(self, faults=tuple(fault for fault in self.faults if fault not in faults))


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    chance = random.Random(seed)
    source = chance.choice(["", "", "", "slurm", "kubernetes"])
    spec = _draw_spec(chance, source)
    program = _draw_program(chance)
    nodes = [node["host"] for node in spec["nodes"]]
    tasks = [*_name_tasks(spec)]
    count = chance.choice([0, 1, 1, 1, 2, 2, 3, 3, 4, 6, 8])
    drawn: list[Fault] = []
    for _ in range(count):
        fault = _draw_fault(chance, nodes, tasks, source)
        if drawn and chance.random() < TOGETHER:
            when = drawn[-1].when
            fault = replace(fault, when=replace(when, delay_s=round(when.delay_s + chance.choice(APART_S), 3)))
        drawn.append(fault)
    faults, checks = tuple(sorted(drawn, key=repr)), chance.random() < 0.2
    if "stall_s" not in spec["timeouts"]:  # the user's limit is exact
        pause_s = chance.choice([0.0, 0.0, 12.0, 25.0, 100.0])
        # Attempts that fail so far apart that no period has enough of them are repeated for ever, as the user asked.
        repeats = program.breaks_after_s and spec["restart"]["period_s"]
        program = replace(program, pause_s=0.0 if repeats else pause_s)
    return Scenario(seed, spec, program, faults, source, checks)


def draw_whole(seed: int) -> Scenario:
    """The scenario of a seed with real agents and links: without what needs more of a machine than they simulate.

    Connections break more often, and while orders and reports are under way.
    """
    scenario, chance = draw(seed), random.Random(f"{seed}/whole")
    left_out = ("tensorboard", "log_directory")
    spec = {key: value for key, value in scenario.spec.items() if key not in left_out}
    nodes = [{**node, "host": "n0"} if node["host"] == "local" else node for node in spec["nodes"]]
    spec = {**spec, "nodes": nodes, "preload": False}
    breaks = (_draw_break(chance, [node["host"] for node in nodes]) for _ in range(chance.choice([0, 1, 2, 3])))
    faults = tuple(sorted((*scenario.faults, *breaks), key=repr))
    return replace(scenario, spec=spec, faults=faults, checks=False, is_whole=True)


def _draw_break(chance: random.Random, nodes: Sequence[str]) -> Fault:
    after = chance.choice(["Hello", "Prepare", "Start", "Start", "up", "up", "exit", "exit", "exit", "Stop", "Goodbye"])
    delay_s = chance.choice([0.0, 0.0, 0.01, 0.1, chance.uniform(0, 1), chance.uniform(0, 20)])
    when = Moment(after, chance.choice([1, 1, 2, 3]), round(delay_s, 3))
    seconds = chance.choice([0.1, 0.1, 0.5, 3.0, 12.0, 40.0, 90.0])
    if chance.random() < 0.6:
        return Fault("drop", when, chance.choice(nodes), seconds)
    return Fault("cut", when, chance.choice(nodes), seconds, chance.choice(["both", "in", "out", "out"]))


def _draw_spec(chance: random.Random, source: str) -> dict[str, Any]:
    strategy = chance.choice([*["multi_worker_mirrored"] * 5, *["parameter_server"] * 2, "mirrored", "torch"])
    count = 1 if strategy == "mirrored" else chance.choice([1, 2, 2, 2, 3, 3, 4, 5, 8])
    if strategy == "parameter_server":
        count = max(count, 2)
    nodes: list[dict[str, Any]] = [
        {"host": f"n{number}", "address": f"10.0.0.{number + 1}", "tasks": {"worker": 1}} for number in range(count)
    ]
    if strategy == "parameter_server":
        nodes[0]["tasks"] = {"chief": 1, "ps": 1}
    elif strategy == "multi_worker_mirrored":
        if chance.random() < 0.3:
            nodes[0]["tasks"] = {"chief": 1}
        if chance.random() < 0.2:
            nodes[-1]["tasks"] = {**nodes[-1]["tasks"], "evaluator": 1}
        if chance.random() < 0.2:
            nodes[0]["tasks"] = {**nodes[0]["tasks"], "worker": 2}
    if not source and chance.random() < 0.2:
        nodes[0]["host"] = "local"
    spares = chance.choice([0, 0, 0, 1, 2]) if strategy != "mirrored" else 0
    nodes += [{"host": f"s{n}", "address": f"10.0.1.{n + 1}", "spare": True} for n in range(spares)]
    restart: dict[str, Any] = {"max_restarts": chance.choice([0, 0, 1, 2, 3]), "return_s": chance.choice([0, 60, 300])}
    restart["period_s"] = chance.choice([0, 0, 0, 120])
    if strategy in ("multi_worker_mirrored", "torch") and chance.random() < 0.2:
        restart["min_workers"] = 1
    if strategy == "parameter_server":
        restart["max_worker_restarts"] = chance.choice([0, 1, 3])
    timeouts = {
        "lease_s": chance.choice([30.0, 60.0]),
        "start_s": chance.choice([60.0, 120.0]),
        "drain_s": chance.choice([30.0, 60.0]),
        "stop_grace_s": chance.choice([2.0, 10.0]),
    }
    if chance.random() < 0.4:
        timeouts["stall_s"] = chance.choice([30.0, 60.0])
    spec: dict[str, Any] = {
        "nodes": nodes,
        "program": {"script": "train.py"},
        "preload": chance.random() < 0.3,
        "restart": restart,
        "timeouts": timeouts,
    }
    if strategy == "torch":
        spec["framework"] = "torch"
    else:
        spec["strategy"] = strategy
    if chance.random() < 0.15 and strategy != "torch":
        spec |= {"tensorboard": True, "log_directory": "/shared/logs"}
    return spec


def _draw_program(chance: random.Random) -> Program:
    return Program(
        starts_s=chance.choice([0.5, 2.0, 8.0]),
        trains_s=chance.choice([5.0, 20.0, 40.0, 80.0]),
        report_s=chance.choice([0.0, 3.0, 5.0, 10.0]),
        saves=chance.random() < 0.4,
        on_stop=chance.choice(["die", "die", "save", "ignore"]),
        save_s=chance.choice([0.5, 3.0, 20.0]),
        on_loss=chance.choice(["crash", "hang"]),
        breaks_after_s=chance.choice([0.0] * 9 + [10.0]),
    )


def _name_tasks(spec: Mapping[str, Any]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for node in spec["nodes"]:
        for task_type, count in node.get("tasks", {}).items():
            for _ in range(count):
                yield f"{task_type}:{counts.setdefault(task_type, 0)}"
                counts[task_type] += 1


def _draw_moment(chance: random.Random) -> Moment:
    after = chance.choice(["begin", "Hello", "Prepare", *["Start"] * 3, *["up"] * 6, *["Stop"] * 3, "Goodbye"])
    number = chance.choice([1, 1, 1, 1, 2, 3])
    delay_s = chance.choice([0.0, 0.0, chance.uniform(0, 0.3), chance.uniform(0, 5), chance.uniform(0, 40)])
    return Moment(after, number, round(delay_s, 3))


def _draw_fault(chance: random.Random, nodes: Sequence[str], tasks: Sequence[str], source: str) -> Fault:
    when, node, task = _draw_moment(chance), chance.choice(nodes), chance.choice(tasks)
    spell_s = chance.choice([0.5, 3.0, 12.0, 20.0, 40.0, 90.0])
    kinds = ["exit"] * 4 + ["late", "mute", "refuse", "hang", "halt", "drop", "drop", "cut", "cut", "die", "end_agent"]
    kinds += ["freeze", "jump", "fill_disk", "signal", "down", "outage", "suspend", "raise_in", "return_in"]
    kinds += ["kill"] * 5
    kinds += ["announce"] * 5 if source else []
    kind = chance.choice(kinds)
    match kind:
        case "exit" | "raise_in":
            what = chance.choice([*FATAL, OUT_OF_STEP, "0"] if kind == "exit" else [FATAL[0], FATAL[1], OUT_OF_STEP])
            return Fault(kind, when, task, spell_s, what)
        case "return_in" | "hang" | "halt":
            return Fault(kind, when, task, chance.choice([spell_s, 0.0]), chance.choice(["waits", "waits", "works"]))
        case "refuse":
            return Fault(kind, when, node, what=chance.choice(["no-program", "port-taken", "start-failed"]))
        case "late" | "drop" | "freeze" | "fill_disk" | "outage":
            return Fault(kind, when, node, spell_s)
        case "cut":
            return Fault(kind, when, node, spell_s, chance.choice(["both", "both", "in", "out"]))
        case "die":
            return Fault(kind, when, node, chance.choice([0.0, spell_s]))
        case "jump":
            return Fault(kind, when, chance.choice([node, "controller"]), chance.choice([-3600.0, -5.0, 5.0, 3600.0]))
        case "signal":
            name = chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]).name
            return Fault(kind, when, seconds=chance.choice([0.0, 2.0]), what=name)
        case "kill":
            effects = f"{chance.randint(0, 40)}{chance.choice(['', '', '', ' twice'])}"
            return Fault(kind, when, seconds=chance.choice([0.0, 1.0, 5.0, 15.0, 60.0]), what=effects)
        case "suspend":
            return Fault(kind, when, seconds=spell_s)
        case "announce":
            choices = ["preempted", "cancelled", "memory"] if source == "slurm" else ["evicted", "deleted"]
            return Fault(kind, when, node, chance.choice([0.0, 5.0, 20.0]), chance.choice(choices))
    return Fault(kind, when, node)

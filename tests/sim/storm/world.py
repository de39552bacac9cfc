"""Plays a scenario, and checks at each step what must always hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launcher.controller.context import AttemptSetup
from launcher.gang.decide import STACKS_S
from launcher.gang.state import AttemptState, Phase
from launcher.plan.paths import RunPaths
from launcher.rundir.directory import RunDir
from launcher.rundir.history import replay
from launcher.spec.strategies import RULES, TORCH
from launcher.tasks import parse_task_id
from tests.harness.builders.facts import facts
from tests.sim.storm.agents import NodeAgent
from tests.sim.storm.controllers import Controller
from tests.sim.storm.faults import Faults
from tests.sim.storm.invariants import check_end
from tests.sim.storm.machines import Agent, Machine
from tests.sim.storm.scenarios import Fault, Scenario
from tests.sim.storm.simulation import BEGAN, EndlessError, Simulation
from tests.sim.storm.tasks import FOREVER, TaskProcess
from worker_entry.agent.connection.lease import MARGIN_S
from worker_entry.protocol.messages import Message
from worker_entry.protocol.orders import Goodbye, Hello, Prepare, Start, Stop
from worker_entry.protocol.values import TaskExit

HORIZON_S = 50_000.0
DISTURBING = ("kill", "suspend", "drop", "cut", "outage", "freeze", "die", "fill_disk", "late", "mute")
"""Faults that delay what a controller knows or orders."""
SLACK_S = 30.0
"""How much longer than its limits a cluster may hang: a last step, and answers that are under way."""
UP_S = 15.0
"""How long after its last task has opened its port a cluster may count as not up: a connection may be silent."""
RETRY_S = 20.0
"""How long a user waits before the next try to resume."""
RETRIES = 30
RESUME_S = 30.0
"""How long an engine takes to start a requeued run."""


@dataclass(frozen=True)
class Broken:
    """A rule that did not hold."""

    rule: str
    detail: str
    time: float = 0.0

    def __str__(self) -> str:
        return f"{self.rule} at {self.time:.2f} s: {self.detail}"


@dataclass(frozen=True)
class Excuse:
    """Something that may end an attempt."""

    why: str
    since: float
    until: float
    only_delays: bool = False
    """Whether it can only keep a cluster from forming in time."""


@dataclass
class Cluster:
    """The tasks of one attempt, as they really are."""

    began: float
    tasks: dict[str, TaskProcess] = field(default_factory=dict)
    joined: dict[str, TaskProcess] = field(default_factory=dict)
    lost: dict[str, TaskProcess] = field(default_factory=dict)
    """The tasks that have joined, and whose end the others notice."""
    up: float = FOREVER
    """When its tasks had met."""
    stopped: float = FOREVER
    """When its first task was asked to end."""
    ordered: float = FOREVER
    """When the first node was asked to end its tasks, whether or not it had any left."""

    @property
    def trainers(self) -> list[TaskProcess]:
        return [task for task in self.tasks.values() if task.role == "trainer"]

    @property
    def is_up(self) -> bool:
        return self.up < FOREVER

    @property
    def is_stopped(self) -> bool:
        return self.stopped < FOREVER


class World:
    """The machines of a scenario, its controllers and its user; `folder` is the run's, and does not exist yet."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.simulation = Simulation()
        self.folder = folder
        self.began = BEGAN + self.simulation.now
        """When the run began, as run.json keeps it."""
        self.files: RunPaths = RunDir.create(folder)
        (folder / "train.py").touch()
        self.fields: dict[str, Any] = dict(scenario.spec)
        self.machines: dict[str, Machine] = {}
        self.replacements: dict[str, str] = {}
        """By host, the host that an engine has put in its place."""
        self.controllers: list[Controller] = []
        self.controller_ahead_s = 0.0
        self.is_disk_full = self.was_disk_full = False
        self.broken: list[Broken] = []
        self.clusters: dict[int, Cluster] = {}
        self.running: dict[int, dict[str, TaskProcess]] = {}
        """The live processes of all tasks, by attempt."""
        self.was_stuck = False
        """Whether any task or machine has ever been stuck, or cut off."""
        self.written: dict[tuple[int, str], bytearray] = {}
        """What the tasks have really written, by attempt and task."""
        self.excuses: list[Excuse] = []
        self.asked: list[int] = []
        """The signals that have asked the run to end."""
        self._seen: dict[str, int] = {}
        self.is_over = False
        self._retries = 0
        self._disturbed = 0.0
        """Until when something keeps controllers from seeing or stopping what hangs."""
        self.is_torch = scenario.spec.get("framework") == "torch"
        self._rules = TORCH if self.is_torch else RULES[scenario.spec["strategy"]]
        self.machine("local")
        for node in scenario.spec["nodes"]:
            self.machine(node["host"])

    def machine(self, host: str) -> Machine:
        if host not in self.machines:
            self.machines[host] = Machine(self, host)
        return self.machines[host]

    # --- the whole run ---

    def play(self) -> list[Broken]:
        """Plays the scenario to its end; returns the rules that did not hold."""
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """The user starts the run."""
        self._note("begin")
        Controller(self, 0)

    def let_pass(self, seconds: float) -> None:
        """Lets this time pass, or less, if the run ends or a rule is broken."""
        try:
            self.simulation.run(lambda: self.is_over or bool(self.broken), self.simulation.now + seconds)
        except EndlessError as error:
            self.break_rule("ends", str(error))

    def finish(self) -> list[Broken]:
        """Plays it to its end; returns the rules that did not hold."""
        self.let_pass(HORIZON_S)
        if not self.broken and not self.is_over:
            self.break_rule("ends", f"the run has not ended after {HORIZON_S:g} s")
        if not self.broken:
            lease_s = self.scenario.spec["timeouts"]["lease_s"]
            longest_s = max((fault.seconds for fault in self.scenario.faults), default=0.0)
            self.simulation.run(lambda: bool(self.broken), self.simulation.now + lease_s + MARGIN_S + longest_s + 700.0)
            check_end(self)
        for controller in [*self.controllers]:  # those that will never run again
            controller.kill()
        for machine in self.machines.values() if self.broken else ():
            for agent in machine.agents:  # otherwise, it ends when it is collected, beside later runs
                agent.vanish()
        return self.broken

    def break_rule(self, rule: str, detail: str) -> None:
        self.broken.append(Broken(rule, detail, self.simulation.now))

    # --- controllers ---

    @property
    def controller(self) -> Controller | None:
        """The latest one, if it is alive."""
        last = self.controllers[-1] if self.controllers else None
        return last if last is not None and not last.process.is_dead else None

    def note_controller(self, controller: Controller) -> None:
        if self.controllers:  # until now, the run had none
            self._disturbed = max(self._disturbed, self.simulation.now)
        self.controllers.append(controller)

    def resume(self, *, requeued: bool = False, times: int = 1) -> None:
        """The user, or the engine, starts the next controller, unless one is there; perhaps `times` at once."""
        if self.is_over or self.controller is not None:
            return
        generation = self.controllers[-1].generation + 1 if self.controllers else 0
        for _ in range(times):
            Controller(self, generation, requeued=requeued)

    def note_death(self, controller: Controller) -> None:
        controller.free_disk()
        loop = controller.supervisor.loop if controller.supervisor is not None else None
        if loop is None or loop.state.phase is not Phase.RUNNING or controller.journal is None:
            self.excuse("a controller died when nothing could be taken over", self.simulation.now)
        if controller.journal is not None and controller.journal.state != "running":
            self.excuse("a controller died before its journal said that the cluster runs", self.simulation.now)
        if self.was_disk_full:
            self.excuse("the journal may lack what the next controller needs to take over", self.simulation.now)
        if any(node["host"] == "local" for node in self.fields["nodes"]):
            self.excuse("tasks ended with the controller on their machine", self.simulation.now)

    def note_takeover(self, controller: Controller, setup: AttemptSetup) -> None:
        """Compares what the last controller knew with what its journal says."""
        before = self.controllers[-2] if len(self.controllers) > 1 else None
        if before is None or not isinstance(before.known, AttemptState) or self.was_disk_full:
            return
        assert setup.taken_over is not None
        there, here = facts(before.known), facts(replay(setup.taken_over, before.known.policy))
        changed = [name for name in there if there[name] != here[name]]
        if changed:
            details = "; ".join(f"{name}: {there[name]} became {here[name]}" for name in changed)
            self.break_rule("replay", f"generation {controller.generation} has other facts: {details}")

    def note_end_of_controller(self, controller: Controller) -> None:
        controller.free_disk()
        self._check_left(controller)
        is_last = bool(self.controllers) and controller is self.controllers[-1]
        why = controller.error.reference if controller.error is not None and controller.report is None else ""
        if controller.waits:
            self.simulation.after(RESUME_S, partial(self.resume, requeued=True))
        elif not is_last or why == "leftover":
            self._retries += 1
            self.is_over = self._retries > RETRIES
            self.simulation.after(RETRY_S, self.resume)
        else:
            self.is_over = True

    def _check_left(self, controller: Controller) -> None:
        """A report that counts no process left is right."""
        report = controller.report
        if report is None or not report.attempts or report.attempts[-1].processes_left != 0:
            return
        left = [task for machine in self.machines.values() for task in machine.processes if not task.host.is_fenced]
        if left:
            self.break_rule("left", f"the report counts none left, but {', '.join(task.name for task in left)} lives")

    # --- what nodes report to us ---

    def find_role(self, task: str) -> str:
        task_id = parse_task_id(task)
        if task_id.is_auxiliary:
            return "auxiliary"
        if task_id.type in self._rules.decides:
            return "trainer"
        return "server" if task_id.type in self._rules.serves else "watcher"

    def note_order(self, agent: Agent | NodeAgent, order: Message) -> None:
        """An agent begins to obey an order."""
        if isinstance(order, (Hello, Prepare, Start, Stop, Goodbye)):
            self._note(type(order).__name__)
        if isinstance(order, Prepare):
            self.clusters.setdefault(order.attempt, Cluster(self.simulation.now))
        if isinstance(order, (Stop, Goodbye)) and agent.attempt in self.clusters:
            cluster = self.clusters[agent.attempt]
            cluster.ordered = min(cluster.ordered, self.simulation.now)
            if agent.running:
                self.note_stop(agent)

    def note_stop(self, agent: Agent | NodeAgent) -> None:
        """A controller ends tasks: there must be a reason."""
        cluster = self.clusters[agent.attempt]
        if cluster.is_stopped:
            return
        is_done = bool(cluster.trainers) and all(task.has_succeeded for task in cluster.trainers)
        now = self.simulation.now
        # Only of the first attempt is it known when its limit began.
        limit = self.began - BEGAN + self.scenario.spec["timeouts"]["start_s"]
        formed = agent.attempt == 1 and cluster.up < limit - UP_S
        is_excused = any(
            excuse.since <= now and excuse.until >= cluster.began and not (formed and excuse.only_delays)
            for excuse in self.excuses
        )
        if not is_done and not is_excused:
            self.break_rule("healthy", f"attempt {agent.attempt} is stopped on {agent.machine.name} although it trains")
        cluster.stopped = now

    def note_expired_lease(self, machine: Machine) -> None:
        """An agent has not been heard for its lease: something must have disturbed its connection."""
        quiet_s = self.simulation.now - self._disturbed
        has_jumped = any(fault.kind == "jump" for fault in self.scenario.faults)  # the lease runs by the node's clock
        if quiet_s > self.scenario.spec["timeouts"]["lease_s"] + SLACK_S and not has_jumped and self.controller:
            self.break_rule("lease", f"it has expired on {machine.name} after {quiet_s:.0f} s without a disturbance")

    def note_end_of_tasks(self, machine: Machine) -> None:
        """All tasks of a machine are ended from outside."""
        for agent in machine.agents:
            if agent.running:
                self.note_stop(agent)

    def note_spawn(self, task: TaskProcess) -> None:
        for attempt, tasks in self.running.items():
            for other in tasks.values() if attempt < task.attempt else ():
                if not other.host.is_fenced:
                    self.break_rule(
                        "fence",
                        f"{task.name} of attempt {task.attempt} starts while {other.name} of attempt "
                        f"{attempt} runs on {other.machine.name}",
                    )
            same = tasks.get(task.name)
            if same is not None and not same.host.is_fenced:
                self.break_rule("twice", f"{task.name} runs twice: on {same.machine.name} and {task.machine.name}")
        self.running.setdefault(task.attempt, {})[task.name] = task
        self.clusters[task.attempt].tasks[task.name] = task
        self.clusters[task.attempt].lost.pop(task.name, None)
        self.written.setdefault((task.attempt, task.name), bytearray())

    def note_output(self, task: TaskProcess, line: bytes) -> None:
        self.written[task.attempt, task.name] += line
        if task.machine.is_local and not self.is_disk_full:
            path = self.files.log(task.attempt, parse_task_id(task.name))
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(line)

    def note_end(self, task: TaskProcess, how: TaskExit | None) -> None:
        self._note("exit")
        running, cluster = self.running[task.attempt], self.clusters[task.attempt]
        if running.get(task.name) is task:
            del running[task.name]
        failed = not task.has_succeeded and (how is None or not how.ok)
        if (failed or task.role == "server") and task.name in cluster.joined and cluster.tasks[task.name] is task:
            cluster.lost[task.name] = task
        if task.role == "server" or (task.role == "trainer" and failed):
            self.excuse(f"{task.name} ended with {how}", self.simulation.now)

    def excuse(self, why: str, until: float, *, only_delays: bool = False) -> None:
        self.excuses.append(Excuse(why, self.simulation.now, until, only_delays))

    def expect_stop(self, task: TaskProcess) -> None:
        """The task hangs for ever: its cluster has to be stopped within its limits, if nothing disturbs that."""
        cluster, since = self.clusters[task.attempt], self.simulation.now
        timeouts = self.scenario.spec["timeouts"]

        def check() -> None:
            is_hung = task.is_alive and task.is_stuck and cluster.is_up and not cluster.is_stopped
            if is_hung and self._disturbed < since and self.controller is not None:
                self.break_rule("hung", f"{task.name} hangs since {since:.0f} s, and attempt {task.attempt} goes on")

        if cluster.is_up:
            limit_s = max(timeouts.get("stall_s", 0.0), timeouts["drain_s"])
            self.simulation.after(limit_s + STACKS_S + SLACK_S, check)

    # --- the cluster ---

    def join(self, task: TaskProcess, expected: frozenset[str]) -> None:
        """The task has opened its port; once all have, they train."""
        cluster = self.clusters[task.attempt]
        cluster.joined[task.name] = task
        if cluster.is_up:
            task.train()
        elif all(name in cluster.joined and cluster.joined[name].is_alive for name in expected):
            cluster.up = self.simulation.now
            self._note("up")
            for member in cluster.joined.values():
                member.train()

    @property
    def is_forming(self) -> bool:
        """Whether tasks of the last attempt still wait for each other."""
        last = self.clusters.get(max(self.clusters, default=0))
        return last is not None and not last.is_up and self.scenario.spec.get("strategy") != "mirrored"

    def _peers(self, task: TaskProcess) -> list[TaskProcess]:
        """The tasks without which the task cannot do a step."""
        cluster = self.clusters[task.attempt]
        return [cluster.tasks[name] for name in cluster.joined if self._needs(task, name)]

    def _needs(self, task: TaskProcess, name: str) -> bool:
        cluster = self.clusters[task.attempt]
        if task.name not in cluster.joined or name == task.name:
            return False
        is_collective = self._rules.collective or self.is_torch
        return name.startswith("ps:") or (is_collective and cluster.tasks[name].role == "trainer")

    def find_lost_peer(self, task: TaskProcess) -> str:
        cluster = self.clusters[task.attempt]
        lost = [name for name in cluster.lost if self._needs(task, name)]
        return next(name for name in cluster.joined if name in lost) if len(lost) > 1 else "".join(lost)

    def waits_for_peer(self, task: TaskProcess) -> bool:
        cluster = self.clusters[task.attempt]
        served = cluster.joined if self._rules.serves else ()
        workers = [cluster.tasks[name] for name in served if name.startswith("worker:")]
        workers = [worker for worker in workers if worker.role == "server"]
        has_no_worker = bool(workers) and not any(worker.is_alive for worker in workers)
        if not self.was_stuck:  # asked for each of 10,000 tasks at each of its steps
            return has_no_worker
        peers = self._peers(task)
        is_cut_off = any("peers" in each.machine.cuts for each in (task, *peers))
        return has_no_worker or is_cut_off or any(peer.is_alive and peer.is_stuck for peer in peers)

    # --- faults ---

    def _note(self, place: str) -> None:
        """Something has happened that moments name."""
        number = self._seen[place] = self._seen.get(place, 0) + 1
        for fault in self.scenario.faults:
            if (fault.when.after, fault.when.number) == (place, number):
                self.simulation.after(fault.when.delay_s, partial(self.do, fault), "~")

    def do(self, fault: Fault) -> None:
        """The fault happens."""
        if not self.is_over:
            if fault.kind in DISTURBING:
                self._disturbed = max(self._disturbed, self.simulation.now + fault.seconds)
            getattr(Faults(self), fault.kind)(fault)

    def task(self, name: str) -> TaskProcess | None:
        """The task's live process."""
        alive = (task for machine in self.machines.values() for task in machine.processes if task.name == name)
        return next(alive, None)

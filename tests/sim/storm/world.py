"""Plays a scenario, and checks at each step what must always hold."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.controller.context import AttemptSetup
from launcher.gang.events import EndAnnounced
from launcher.gang.state import AttemptState, Phase
from launcher.plan.paths import RunPaths
from launcher.rundir.directory import RunDir
from launcher.rundir.history import replay
from launcher.spec.strategies import RULES, TORCH
from launcher.tasks import parse_task_id
from tests.harness.builders.facts import facts
from tests.sim.storm.controllers import Controller
from tests.sim.storm.machines import FOREVER, Agent, Machine, TaskProcess
from tests.sim.storm.scenarios import Fault, Scenario
from tests.sim.storm.simulation import BEGAN, EndlessError, Simulation
from worker_entry.agent.connection.lease import MARGIN_S
from worker_entry.protocol.messages import Message
from worker_entry.protocol.orders import Goodbye, Hello, Prepare, Start, Stop
from worker_entry.protocol.values import TaskExit

HORIZON_S = 50_000.0
RETRY_S = 20.0
"""How long a user waits before the next try to resume."""
RETRIES = 30
RESUME_S = 30.0
"""How long an engine takes to start a requeued run."""
LOST_LINES_S = 60.0
"""How long after a full disk a run may depend on lines that its journal has lost."""
STALL_S = 20.0
"""Without its network for so long, a cluster may seem to hang."""
TAKEN_S = 30.0
"""How long after the announced time an engine ends what is left."""


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


@dataclass
class Cluster:
    """The tasks of one attempt, as they really are."""

    began: float
    tasks: dict[str, TaskProcess] = field(default_factory=dict)
    joined: dict[str, TaskProcess] = field(default_factory=dict)
    is_up: bool = False
    stopped: float = FOREVER
    """When its first task was asked to end."""

    @property
    def is_stopped(self) -> bool:
        return self.stopped < FOREVER


class World:
    """The machines of a scenario, its controllers and its user; `folder` is the run's, and does not exist yet."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.simulation = Simulation()
        self.began = BEGAN + self.simulation.now
        """When the run began, as run.json keeps it."""
        self.files: RunPaths = RunDir.create(folder)
        self.fields: dict[str, Any] = dict(scenario.spec)
        self.machines: dict[str, Machine] = {}
        self.replacements: dict[str, str] = {}
        """By host, the host that an engine has put in its place."""
        self.controllers: list[Controller] = []
        self.controller_ahead_s = 0.0
        self.is_disk_full = self.was_disk_full = False
        self.broken: list[Broken] = []
        self.clusters: dict[int, Cluster] = {}
        self.written: dict[tuple[int, str], bytearray] = {}
        """What the tasks have really written, by attempt and task."""
        self.excuses: list[Excuse] = []
        self.asked: list[int] = []
        """The signals that have asked the run to end."""
        self._seen: dict[str, int] = {}
        self._is_over = False
        self._retries = 0
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
        from tests.sim.storm.invariants import check_end

        self._note("begin")
        Controller(self, 0)
        try:
            self.simulation.run(lambda: self._is_over or bool(self.broken), HORIZON_S)
        except EndlessError as error:
            self.break_rule("ends", str(error))
        if not self.broken and not self._is_over:
            self.break_rule("ends", f"the run has not ended after {HORIZON_S:g} s")
        if not self.broken:
            lease_s = self.scenario.spec["timeouts"]["lease_s"]
            longest_s = max((fault.seconds for fault in self.scenario.faults), default=0.0)
            self.simulation.run(lambda: bool(self.broken), self.simulation.now + lease_s + MARGIN_S + longest_s + 700.0)
            check_end(self)
        for controller in [*self.controllers]:  # those that will never run again
            controller.kill()
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
        self.controllers.append(controller)

    def resume(self, *, requeued: bool = False, times: int = 1) -> None:
        """The user, or the engine, starts the next controller, unless one is there; perhaps `times` at once."""
        if self._is_over or self.controller is not None:
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
            self._is_over = self._retries > RETRIES
            self.simulation.after(RETRY_S, self.resume)
        else:
            self._is_over = True

    def _check_left(self, controller: Controller) -> None:
        """A report that counts no process left is right."""
        report = controller.report
        if report is None or not report.attempts or report.attempts[-1].processes_left != 0:
            return
        left = [task for machine in self.machines.values() for task in machine.processes if not task.agent.is_fenced]
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

    def note_order(self, agent: Agent, order: Message) -> None:
        """An agent begins to obey an order."""
        if isinstance(order, (Hello, Prepare, Start, Stop, Goodbye)):
            self._note(type(order).__name__)
        if isinstance(order, Prepare):
            self.clusters.setdefault(order.attempt, Cluster(self.simulation.now))
        if isinstance(order, (Stop, Goodbye)) and agent.running:
            self.note_stop(agent)

    def note_stop(self, agent: Agent) -> None:
        """A controller ends tasks: there must be a reason."""
        cluster = self.clusters[agent.attempt]
        if cluster.is_stopped:
            return
        trainers = [task for name, task in cluster.tasks.items() if self.find_role(name) == "trainer"]
        is_done = bool(trainers) and all(task.has_succeeded for task in trainers)
        now = self.simulation.now
        is_excused = any(excuse.since <= now and excuse.until >= cluster.began for excuse in self.excuses)
        if not is_done and not is_excused:
            self.break_rule("healthy", f"attempt {agent.attempt} is stopped on {agent.machine.name} although it trains")
        cluster.stopped = now

    def note_spawn(self, task: TaskProcess) -> None:
        for machine in self.machines.values():
            for other in machine.processes:
                if other.agent.is_fenced or other is task:
                    continue
                if other.name == task.name:
                    self.break_rule("twice", f"{task.name} runs twice: on {machine.name} and {task.machine.name}")
                if other.attempt < task.attempt:
                    self.break_rule(
                        "fence",
                        f"{task.name} of attempt {task.attempt} starts while {other.name} of attempt "
                        f"{other.attempt} runs on {machine.name}",
                    )
        self.clusters[task.attempt].tasks[task.name] = task
        self.written.setdefault((task.attempt, task.name), bytearray())

    def note_output(self, task: TaskProcess, line: bytes) -> None:
        self.written[task.attempt, task.name] += line
        if task.machine.is_local and not self.is_disk_full:
            path = self.files.log(task.attempt, parse_task_id(task.name))
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(line)

    def note_end(self, task: TaskProcess, how: TaskExit | None) -> None:
        role, failed = self.find_role(task.name), not task.has_succeeded and (how is None or not how.ok)
        if role == "server" or (role == "trainer" and failed):
            self.excuse(f"{task.name} ended with {how}", self.simulation.now)

    def excuse(self, why: str, until: float) -> None:
        self.excuses.append(Excuse(why, self.simulation.now, until))

    # --- the cluster ---

    def join(self, task: TaskProcess, expected: set[str]) -> None:
        """The task has opened its port; once all have, they train."""
        cluster = self.clusters[task.attempt]
        cluster.joined[task.name] = task
        if cluster.is_up:
            task.train()
        elif all(name in cluster.joined and cluster.joined[name].is_alive for name in expected):
            cluster.is_up = True
            self._note("up")
            for member in cluster.joined.values():
                member.train()

    def _peers(self, task: TaskProcess) -> list[TaskProcess]:
        """The tasks without which the task cannot do a step."""
        cluster = self.clusters[task.attempt]
        if task.name not in cluster.joined:
            return []
        is_collective = self._rules.collective or self.is_torch
        return [
            cluster.tasks[name]
            for name in cluster.joined
            if name != task.name and (name.startswith("ps:") or (is_collective and self.find_role(name) == "trainer"))
        ]

    def find_lost_peer(self, task: TaskProcess) -> str:
        lost = (peer.name for peer in self._peers(task) if not peer.is_alive and not peer.has_succeeded)
        return next(lost, "")

    def waits_for_peer(self, task: TaskProcess) -> bool:
        cuts = ["peers" in machine.cuts for machine in (task.machine, *(peer.machine for peer in self._peers(task)))]
        workers = [name for name in self.clusters[task.attempt].joined if self.find_role(name) == "server"]
        helpers = [name for name in workers if name.startswith("worker:")]
        has_none = bool(helpers) and not any(self.clusters[task.attempt].tasks[name].is_alive for name in helpers)
        return has_none or any(peer.is_alive and peer.is_stuck for peer in self._peers(task)) or any(cuts)

    # --- faults ---

    def _note(self, place: str) -> None:
        """Something has happened that moments name."""
        number = self._seen[place] = self._seen.get(place, 0) + 1
        for fault in self.scenario.faults:
            if (fault.when.after, fault.when.number) == (place, number):
                self.simulation.after(fault.when.delay_s, partial(self._do, fault), "~")

    def _do(self, fault: Fault) -> None:
        if not self._is_over:
            getattr(Faults(self), fault.kind)(fault)

    def task(self, name: str) -> TaskProcess | None:
        """The task's live process."""
        alive = (task for machine in self.machines.values() for task in machine.processes if task.name == name)
        return next(alive, None)


class Faults:
    """What may happen, by kind."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._after = world.simulation.after

    # --- to tasks ---

    def exit(self, fault: Fault) -> None:
        task = self._world.task(fault.at)
        if task is None or task.machine.is_frozen:
            return
        self._world.excuse(f"{task.name} ends", self._world.simulation.now)
        code, _, crash = fault.what.partition(" ")
        if crash:
            task.stay(0.0)
            task.crash(crash)
        else:
            number = int(code)
            task.end(TaskExit(number) if number >= 0 else TaskExit(signal=-number))

    def raise_in(self, fault: Fault) -> None:
        """Its program raises, and its process stays for a while."""
        task = self._world.task(fault.at)
        if task is not None and not task.machine.is_frozen:
            self._world.excuse(f"{task.name} raised", self._world.simulation.now)
            task.stay(fault.seconds)
            task.crash(fault.what.partition(" ")[2])

    def return_in(self, fault: Fault) -> None:
        """Once its program ends, its process stays."""
        task = self._world.task(fault.at)
        if task is not None:
            self._world.excuse(f"{task.name} stays", self._world.simulation.now)
            task.stay(fault.seconds or FOREVER)

    def hang(self, fault: Fault) -> None:
        task = self._world.task(fault.at)
        if task is None or not self._is_watched(fault):
            return
        self._world.excuse(f"{task.name} hangs", self._world.simulation.now)
        task.hang(works=fault.what == "works")
        if fault.seconds:
            self._after(fault.seconds, task.unhang)

    def halt(self, fault: Fault) -> None:
        task = self._world.task(fault.at)
        if task is None or not self._is_watched(fault):
            return
        self._world.excuse(f"{task.name} halts", self._world.simulation.now)
        task.halt()
        if fault.seconds:
            self._after(fault.seconds, task.unhalt)

    def _is_watched(self, fault: Fault) -> bool:
        """Whether somebody would notice a task that hangs for ever; otherwise, nothing promises that the run ends."""
        if fault.seconds:
            return True
        has_limit = bool(self._world.scenario.spec["timeouts"].get("stall_s"))
        return has_limit and self._world.find_role(fault.at) == "trainer"

    # --- to nodes ---

    def _node(self, fault: Fault) -> Machine:
        return self._world.machine(self._world.replacements.get(fault.at, fault.at))

    def late(self, fault: Fault) -> None:
        self._node(fault).delays.append(fault.seconds)

    def mute(self, fault: Fault) -> None:
        self._node(fault).delays.append(FOREVER)

    def refuse(self, fault: Fault) -> None:
        self._node(fault).refusals.append(fault.what)

    def _delay_start(self, fault: Fault) -> None:
        """A cluster that has yet to form may exceed its time limit."""
        controller = self._world.controller
        loop = controller.supervisor.loop if controller is not None and controller.supervisor is not None else None
        if loop is None or loop.state.phase is not Phase.RUNNING:
            self._world.excuse(f"{fault.at or 'the controller'} is late", self._world.simulation.now + fault.seconds)

    def outage(self, fault: Fault) -> None:
        """The controller's own network is down."""
        for name in [*self._world.machines]:
            self.drop(replace(fault, at=name))

    def drop(self, fault: Fault) -> None:
        """Its connection is reset, and no new one can be made for a while."""
        machine = self._node(fault)
        if machine.is_local:
            return
        self._delay_start(fault)
        machine.cut("in", "out")
        self._after(fault.seconds, partial(machine.heal, "in", "out"))
        controller = self._world.controller
        if controller is not None:
            for link in controller.links:
                if link.wire is not None and link.wire.machine is machine:
                    controller.process.do(partial(link.drop, "it was reset"))

    def cut(self, fault: Fault) -> None:
        machine = self._node(fault)
        if machine.is_local:
            return
        self._delay_start(fault)
        directions = ("in", "out", "peers") if fault.what == "both" else (fault.what,)
        if fault.what == "both" and fault.seconds >= STALL_S:
            self._world.excuse(
                f"{machine.name} cannot be reached by its peers", self._world.simulation.now + fault.seconds
            )
        machine.cut(*directions)
        self._after(fault.seconds, partial(machine.heal, *directions))

    def die(self, fault: Fault) -> None:
        machine = self._node(fault)
        if machine.is_local or not machine.is_up:
            return
        self._world.excuse(f"{machine.name} is off", self._world.simulation.now)
        machine.turn_off()
        if fault.seconds:
            self._after(fault.seconds, machine.turn_on)

    def end_agent(self, fault: Fault) -> None:
        """The agent is killed, and its guardian ends everything below it."""
        machine = self._node(fault)
        if not machine.is_frozen:
            self._world.excuse(f"the agent of {machine.name} ended", self._world.simulation.now)
            machine.clean()

    def freeze(self, fault: Fault) -> None:
        machine = self._node(fault)
        if machine.is_local or not machine.is_up:
            return
        self._world.excuse(f"{machine.name} is frozen", self._world.simulation.now + fault.seconds)
        machine.freeze()
        self._after(fault.seconds, machine.thaw)

    def jump(self, fault: Fault) -> None:
        """A clock is set."""
        if fault.at == "controller":
            self._world.controller_ahead_s += fault.seconds
            for controller in self._world.controllers:
                controller.timing.ahead_s = self._world.controller_ahead_s
            return
        machine = self._node(fault)
        machine.ahead_s += fault.seconds

        def learn() -> None:
            machine.known_ahead_s = machine.ahead_s

        self._after(machine.chance.choice([1.0, 60.0]), learn)

    # --- to the controller ---

    def fill_disk(self, fault: Fault) -> None:
        world, controller = self._world, self._world.controller
        if controller is None or world.is_disk_full:
            return
        world.is_disk_full = world.was_disk_full = True
        world.excuse("the disk is full", world.simulation.now + fault.seconds + LOST_LINES_S)
        controller.fill_disk()

        def free() -> None:
            world.is_disk_full = False
            controller.free_disk()

        self._after(fault.seconds, free)

    def signal(self, fault: Fault) -> None:
        controller, signum = self._world.controller, signal.Signals[fault.what]
        if controller is None:
            return
        if signum != signal.SIGUSR1:
            self._world.asked.append(signum)
            self._world.excuse(f"{signum.name} was sent", FOREVER)
        controller.signal(signum)
        if fault.seconds:
            self._after(fault.seconds, partial(controller.signal, signum))

    def down(self, fault: Fault) -> None:
        del fault
        controller = self._world.controller
        if controller is not None:
            self._world.asked.append(signal.SIGTERM)
            self._world.excuse("the user asked for the end", FOREVER)
            controller.ask(signal.SIGTERM)

    def kill(self, fault: Fault) -> None:
        """The controller dies; the user resumes the run, perhaps in two terminals."""
        controller = self._world.controller
        if controller is None:
            return
        effects, _, twice = fault.what.partition(" ")
        controller.kill_soon(int(effects))
        self._after(5.0 + fault.seconds, partial(self._world.resume, times=2 if twice else 1))

    def suspend(self, fault: Fault) -> None:
        """The controller is suspended."""
        controller = self._world.controller
        if controller is not None:
            self._delay_start(fault)
            controller.process.suspend(fault.seconds)
            self._note_changes()
            self._after(fault.seconds, self._note_changes)

    def _note_changes(self) -> None:
        for machine in self._world.machines.values():
            machine.note_change()

    # --- from an engine ---

    def announce(self, fault: Fault) -> None:
        world, controller = self._world, self._world.controller
        if controller is None:
            return
        grace_s = fault.seconds
        ends_s = grace_s + (1.0 if fault.what in ("evicted", "deleted") else TAKEN_S)
        world.excuse(f"the engine announced: {fault.what}", world.simulation.now + ends_s)
        source, machine = controller.source, self._node(fault)
        match fault.what:
            case "preempted" | "cancelled":
                reference = "preempted" if fault.what == "preempted" else "interrupted"
                source.announce(EndAnnounced(reference, "the job was taken away", (), grace_s), is_told=grace_s > 0)
                for each in world.machines.values():
                    if not each.is_frozen and each.is_up:
                        for agent in each.agents:
                            if not agent.is_over:
                                agent.note_signal()
                    world.simulation.after(ends_s, partial(self._take_away, each))
            case "memory":
                end = EndAnnounced("out-of-memory", "the job exceeded its memory", (), stays=True)
                source.announce(end, is_told=False)
                self._take_away(machine)
            case "evicted" | "deleted":
                reference = "preempted" if fault.what == "evicted" else "node-lost"
                end = EndAnnounced(reference, "the pod was taken away", (), grace_s, replaced=True, node=machine.name)
                world.replacements[fault.at] = f"{machine.name}x"
                world.replacements[machine.name] = f"{machine.name}x"
                source.announce(end, is_told=True)
                world.simulation.after(ends_s, machine.turn_off)

    def _take_away(self, machine: Machine) -> None:
        if machine.is_up and not machine.is_frozen:
            machine.clean()

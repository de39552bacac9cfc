"""What may happen to a simulated run, by the kind of the fault."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from launcher.gang.events import EndAnnounced
from launcher.gang.state import Phase
from tests.sim.storm.machines import Machine
from tests.sim.storm.scenarios import Fault
from tests.sim.storm.tasks import FOREVER
from worker_entry.protocol.values import TaskExit

if TYPE_CHECKING:
    from tests.sim.storm.world import World

LOST_LINES_S = 60.0
"""How long after a full disk a run may depend on lines that its journal has lost."""
LONG_S = 30.0
"""Shorter disturbances, all together, leave every cluster the time to form."""
STALL_S = 20.0
"""Without its network for so long, a cluster may seem to hang."""
TAKEN_S = 30.0
"""How long after the announced time an engine ends what is left."""


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
        task.hang(works=fault.what == "works" and bool(fault.seconds))
        if fault.seconds:
            self._after(fault.seconds, task.unhang)
        else:
            self._world.expect_stop(task)

    def halt(self, fault: Fault) -> None:
        task = self._world.task(fault.at)
        if task is None or not self._is_watched(fault):
            return
        self._world.excuse(f"{task.name} halts", self._world.simulation.now)
        task.halt()
        if fault.seconds:
            self._after(fault.seconds, task.unhalt)
        else:
            self._world.expect_stop(task)

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
        """A cluster that has yet to form may exceed its time limit, if all that disturbs the run lasts long."""
        if sum(each.seconds for each in self._world.scenario.faults if each.kind != "jump") < LONG_S:
            return
        controller = self._world.controller
        loop = controller.supervisor.loop if controller is not None and controller.supervisor is not None else None
        is_running = loop is not None and loop.state.phase is Phase.RUNNING
        if not is_running or self._world.is_forming:
            until = self._world.simulation.now + fault.seconds
            self._world.excuse(f"{fault.at or 'the controller'} is late", until, only_delays=True)

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
            controller.drop(machine)

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
            self._world.note_end_of_tasks(machine)
            machine.clean()

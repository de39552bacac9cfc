"""Performs the gang's actions: sends orders to the nodes, made from the current plan."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence

from launcher.controller.context import AttemptSetup, RunContext
from launcher.controller.requests import StackRequests
from launcher.gang.checks.preflight import Preflight, make_subjects
from launcher.gang.checks.speed import SpeedCheck
from launcher.gang.events import (
    Action,
    AskStacks,
    Checked,
    CheckNodes,
    ClaimNodes,
    Event,
    NodeClaimed,
    NodeRefused,
    PrepareNodes,
    ReleaseNodes,
    RestartTask,
    StartTasks,
    StopNodes,
    SyncNodes,
)
from launcher.gang.faults import Fault, injections_of
from launcher.gang.state import AttemptState, Phase
from launcher.plan.launch_plan import TaskPlan
from launcher.plan.making import make_preload
from launcher.plan.rendering import render_file
from launcher.rundir.history import History
from launcher.tasks import TaskId
from launcher.transports.base import Resumption
from worker_entry.protocol import environment
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.gpus import ClaimGpus, ReleaseGpus
from worker_entry.protocol.orders import Prepare, Start, Stop, TunnelKey
from worker_entry.protocol.values import Problem, TaskStart

TAKEOVER_S = 30.0
"""How long to try to reach the agents of a run that is taken over."""
LASTS = datetime.timedelta(days=3650)
"""The certificate's validity: long, because attempts may last and clocks may be wrong. Only the nodes know the key, and
they discard it at the end."""
NAME = "distlaunch"


class Actions:
    """The actions of one attempt. `plan` is the current plan; `addresses`: those that the checks chose, by node."""

    def __init__(
        self,
        context: RunContext,
        setup: AttemptSetup,
        attempt: int,
        faults: Sequence[Fault],
        stacks: StackRequests,
    ) -> None:
        self._context = context
        self._links = context.links
        self._planner = setup.planner
        self._preflight = setup.preflight
        self._attempt = attempt
        self._faults = faults
        self._stacks = stacks
        self._checked = False
        self._measured = False
        self._callers: list[str] = []
        self._unrestored: frozenset[str] = frozenset()
        """Nodes that have yet to be offered the last checkpoint."""
        self.plan = setup.planner.plan({})
        self.addresses = setup.addresses

    def tasks_of(self, node: str) -> Iterator[TaskPlan]:
        """The planned tasks of a node."""
        return iter(self.plan.by_node.get(node, ()))

    def perform(self, action: Action, state: AttemptState) -> None:
        """Sends the action's orders to the nodes."""
        match action:
            case ClaimNodes():
                self._claim(state)
            case ReleaseNodes():
                for node in state.policy.nodes:
                    self._links.send(node, ReleaseGpus())
            case SyncNodes():
                if self._context.bundle is not None:
                    for node in sorted(state.policy.syncs & state.awaited):
                        self._links.send(node, self._context.bundle.offer)
                self._unrestored = state.policy.restores & state.awaited
            case PrepareNodes():
                self._prepare(state)
            case CheckNodes():
                assert self._preflight is not None
                for node, order in self._preflight.make_dials(state.awaited, state.ports).items():
                    self._links.send(node, order)
            case StartTasks(ports):
                self.plan = self._planner.plan(self._links.facts(), ports, self.addresses)
                self.write_plan()
                for node in state.policy.nodes:
                    self._links.send(node, self._make_start([*self.tasks_of(node)]))
                for task in self.plan.tasks:
                    self._follow(task)
            case RestartTask(task):
                self._faults = [fault for fault in self._faults if fault.task != task]
                [planned] = (plan for plan in self.plan.tasks if plan.task == task)
                self._links.send(planned.node, self._make_start([planned]))
            case AskStacks():
                self._stacks.ask(state)
            case StopNodes(grace_s, for_handlers, interrupts, longer):
                if state.signal is not None or state.is_taken_away:
                    self._links.hurry()
                for node in sorted(state.occupied):
                    of_node = {str(task): longer[task] for task in longer.keys() & state.policy.nodes[node]}
                    self._links.send(node, Stop(grace_s, for_handlers, interrupts, of_node))

    def take_over(self, state: AttemptState, history: History) -> None:
        """Reattaches to the tasks of an attempt that an earlier controller started."""
        self._links.claimed = state.claimed
        self.plan = self._planner.plan(self._links.facts(), state.ports, self.addresses)
        for task in self.plan.tasks:
            self._follow(task)
        for node in state.policy.nodes:
            tasks = [task.task for task in self.tasks_of(node)]
            self._links.resume(
                node,
                Resumption(
                    reattach_folder=history.ready[node].reattach_folder or "",
                    run_id=self._context.run_id,
                    generation=self._context.generation,
                    handled=history.frames.get(node, 0),
                    attempt=self._attempt,
                    offsets=self._context.files.log_sizes(self._attempt, tasks),
                    ready=history.ready[node],
                    within_s=TAKEOVER_S,
                ),
            )

    def _follow(self, task: TaskPlan) -> None:
        if not task.task.is_auxiliary:  # the console does not show auxiliary tasks
            self._context.console.follow(task.task, self._context.files.log(self._attempt, task.task))

    def preload(self, node: str) -> None:
        """Starts the slowest work on the node while other nodes are still connecting."""
        spec, restart = self._planner.spec, self._context.spec.restart
        again = (
            restart.max_restarts > 0
            or (restart.max_worker_restarts > 0 and bool(spec.rules.restarted_individually))
            or spec.keep_warm_s > 0
        )
        tasks = self._planner.plan_node(node, self._links.facts_of(node))
        preload = make_preload(spec, tasks, keep=again)
        if preload is not None and not self._context.only_checks:
            self._links.send(node, preload)

    def restore(self) -> None:
        """Offers the last checkpoint to the nodes once it has been collected completely."""
        if not self._unrestored or self._context.collector.is_saving:
            return
        offer = self._context.collector.offer_checkpoint()
        for node in sorted(self._unrestored):
            self._links.send(node, offer)
        self._unrestored = frozenset()

    def end_checks(self, state: AttemptState) -> None:
        """Reports the result of the checks to the gang once all nodes have answered."""
        checks = self._preflight
        if checks is None or state.phase is not Phase.CHECKING or not checks.is_complete(state.awaited):
            return
        if not self._checked:
            self._checked = True
            self._end_first_checks(checks, state)
        speed = checks.speed
        if speed is None or self._measured:
            return
        for node, order in speed.take_orders(state.awaited, self._context.timing.monotonic()):
            self._links.send(node, order)
        if speed.is_over:
            self._measured = True
            for finding in () if self._context.only_checks else speed.make_report().findings:
                self._context.console.warn(finding.message)
            self._links.put(Checked())

    def _end_first_checks(self, checks: Preflight, state: AttemptState) -> None:
        """Reports the errors of the first checks, or starts the speed check if the spec asks for one."""
        self._callers = checks.find_callers()
        self.addresses = checks.choose_addresses()
        for choice in checks.render_choices():
            self._context.console.note(choice)
        errors: list[Event] = []
        findings = checks.findings()
        for finding in () if self._context.only_checks else findings:
            if finding.level == "warning":
                self._context.console.warn(f"{finding.message}; {finding.hint}" if finding.hint else finding.message)
            else:
                problem = Problem(finding.reference, finding.message, finding.hint)
                errors.append(NodeRefused(finding.node, (problem,)))
        is_good = not any(finding.level == "error" for finding in findings)
        if is_good and self._context.spec.check_speed and self._attempt == 1:
            self._context.console.note("Measuring the speed of nodes and links")
            checks.speed = SpeedCheck(
                make_subjects(self.plan, checks.answers, self.addresses, state.ports),
                prefers_torch=self._context.spec.framework == "torch",
                nonce=checks.nonce,
                started=self._context.timing.monotonic(),
            )
            return
        for event in errors or [Checked()]:
            self._links.put(event)

    def write_plan(self) -> None:
        """Writes the current plan to plan.json."""
        self._context.files.write_json(self._context.files.plan, render_file(self.plan))

    def _claim(self, state: AttemptState) -> None:
        self.plan = self._planner.plan(self._links.facts())  # raises if a node has too few GPUs, free or not
        needed = {
            node: self._planner.find_needed_gpus(node, self._links.facts_of(node)) for node in sorted(state.asked)
        }
        if not any(count for _, count in needed.values()) and self._attempt == 1:
            self._context.console.warn("no node has a GPU that the run needs: there is nothing to wait for")
        for node, (gpus, count) in needed.items():
            if count:
                self._links.send(node, ClaimGpus(self._attempt, gpus, count))
            else:
                self._links.put(NodeClaimed(node, ()))

    def _prepare(self, state: AttemptState) -> None:
        self.plan = self._planner.plan(self._links.facts())
        for warning in self.plan.warnings if self._attempt == 1 else ():
            self._context.console.warn(warning)
        checks = self._preflight if state.policy.checks else None
        spec = self._context.spec
        order = Prepare(
            self._attempt,
            [],
            spec.ports.first,
            spec.ports.last,
            nonce=checks.nonce if checks is not None else "",
            allowed=spec.allow,
            guard=spec.guard,
            tunnel=make_tunnel_key() if spec.isolation == "tunnel" else None,
        )
        for node in sorted(state.awaited):
            self._links.send(node, replace(order, tasks=[task.request for task in self.tasks_of(node)]))
            if checks is not None:
                self._links.send(node, checks.make_inspect(node))

    def _make_start(self, tasks: Sequence[TaskPlan]) -> Start:
        return make_start(
            tasks,
            run_id=self._context.run_id,
            attempt=self._attempt,
            lease_s=self._context.spec.timeouts.lease_s,
            faults=self._faults,
            routes=self.plan.routes,
            callers=self._callers,
            readers=self.plan.find_readers(self._context.spec.stdin) if self._context.input is not None else (),
        )


def make_start(
    tasks: Sequence[TaskPlan],
    *,
    run_id: str,
    attempt: int,
    lease_s: float,
    faults: Sequence[Fault],
    routes: Mapping[str, str] | None = None,
    callers: Sequence[str] = (),
    readers: Collection[TaskId] = (),
) -> Start:
    """Makes the order to start these tasks of one node.

    Args:
        tasks: the planned tasks.
        run_id: the run's name.
        attempt: the number of the attempt, from 1.
        lease_s: how long TensorFlow's workers wait for each other's heartbeats.
        faults: the faults to inject into the attempt.
        routes: with a tunnel, the host that each address in TF_CONFIG stands for.
        callers: further addresses from which the nodes connect.
        readers: the tasks that read what distlaunch reads from stdin.
    """
    cluster = tasks[0].tf_config["cluster"] if tasks[0].tf_config is not None else {}
    env = {environment.RUN_ID: run_id, environment.ATTEMPT: str(attempt)}
    others = {address: host for address, host in (routes or {}).items() if address != tasks[0].address}
    starts = [
        replace(_make_task_start(task, cluster, env, lease_s, faults), stdin=task.task in readers) for task in tasks
    ]
    return Start(attempt, starts, cluster, others, [*callers])


def _make_task_start(
    task: TaskPlan,
    cluster: Mapping[str, Sequence[str]],
    attempt_env: Mapping[str, str],
    lease_s: float,
    faults: Sequence[Fault],
) -> TaskStart:
    joins = task.tf_config is not None and task.tf_config["cluster"] == cluster  # an evaluator sees a different cluster
    env = {**(task.env if joins else task.whole_env), **attempt_env}
    return TaskStart(
        task=str(task.task),
        program=task.program,
        env=env,
        unset=[environment.TF_CONFIG],
        patch_keras=task.patch_keras,
        coordination_timeout_s=lease_s if task.collective else 0.0,
        progress=task.progress,
        injections=injections_of(task.task, faults),
        joins=joins,
        keep_own_tf_config=task.keep_own_tf_config,
        defaults=sorted(task.defaults),
    )


def make_tunnel_key() -> TunnelKey:
    """A new key (ECDSA, P-256) with a self-signed certificate, by which an attempt's nodes authenticate each other."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LASTS)
        .not_valid_after(now + LASTS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return TunnelKey(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())

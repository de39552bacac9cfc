"""Makes the report of finished checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.gang.checks.findings import Finding
from launcher.gang.checks.preflight import Answers, Preflight
from launcher.gang.state import AttemptState, Reason
from launcher.gang.unknown_peers import render_unguarded
from launcher.report.models import CheckReport, FactsReport, JobReport, NodeReport
from launcher.spec.models import ClusterSpec
from launcher.verdict.judge import find_hint, render_place
from worker_entry.protocol.units import render_size
from worker_entry.protocol.values import MachineFacts


def make_check_report(
    spec: ClusterSpec,
    preflight: Preflight,
    state: AttemptState,
    *,
    job: JobReport | None = None,
    more: Sequence[Finding] = (),
) -> CheckReport:
    """Makes the report of finished checks; `state` names the unusable nodes.

    `job`: the Slurm job that allocates the nodes; `more`: further findings.
    """
    addresses, answers = preflight.choose_addresses(), preflight.answers
    unusable = {*state.lost, *(refusal.node for refusal in state.refusals)}
    missing = _silent(preflight, state) if state.reason is Reason.START_TIMEOUT else frozenset[str]()
    findings = [*_unusable(state), *(_render_silence(node, state) for node in sorted(missing)), *preflight.findings()]
    findings += _unguarded(state)
    speed = preflight.speed.make_report() if preflight.speed is not None and preflight.speed.is_over else None
    if speed is not None:
        findings += speed.findings
    elif spec.check_speed:
        message = "the speed was not measured, because earlier checks found errors"
        findings.append(Finding(level="warning", node=spec.nodes[0].host, reference="speed-unknown", message=message))
    findings = sorted([*findings, *more], key=lambda finding: finding.level != "error")
    return CheckReport(
        name=spec.name,
        ok=not any(finding.level == "error" for finding in findings),
        nodes=[
            _node_report(
                node.host,
                answers.get(node.host),
                addresses[node.host],
                usable=node.host not in unusable | missing,
                unguarded={
                    str(task): why for task, why in state.unguarded.items() if task in state.policy.nodes[node.host]
                },
            )
            for node in spec.nodes
        ],
        dials=preflight.dials(),
        findings=findings,
        slurm=job,
        speed=speed,
    )


def _unusable(state: AttemptState) -> Iterator[Finding]:
    refused = {refusal.node for refusal in state.refusals}
    order = list(state.policy.nodes)
    for node, reason in sorted(state.lost.items(), key=lambda item: order.index(item[0])):
        if node in refused:  # its refusal says why
            continue
        reference = "node-lost" if node in state.ready else "node-unreachable"
        yield Finding(level="error", node=node, reference=reference, message=f"node {node} cannot be used: {reason}")
    for refusal in sorted(state.refusals, key=lambda refusal: order.index(refusal.node)):
        for problem in refusal.problems:
            yield Finding(
                level="error",
                node=refusal.node,
                reference=problem.reference,
                message=f"{render_place(refusal.node, problem)}{problem.message}",
                hint=find_hint(problem, [refusal.node], is_sent=refusal.node in state.policy.syncs),
            )


def _unguarded(state: AttemptState) -> Iterator[Finding]:
    for node, tasks in state.policy.nodes.items():
        for line in render_unguarded({task: state.unguarded[task] for task in tasks & state.unguarded.keys()}):
            yield Finding(level="warning", node=node, reference="port-unguarded", message=line)


def _silent(preflight: Preflight, state: AttemptState) -> frozenset[str]:
    return state.silent or frozenset(node for node in state.awaited if not preflight.is_complete(frozenset({node})))


def _render_silence(node: str, state: AttemptState) -> Finding:
    message = f"no answer from {node} within {state.policy.start_s:g} s"
    return Finding(level="error", node=node, reference="start-timeout", message=message)


def _node_report(
    node: str, answers: Answers | None, address: str, *, usable: bool, unguarded: dict[str, str]
) -> NodeReport:
    if answers is None:
        return NodeReport(node=node, usable=False)
    ready, inspected = answers.ready, answers.inspected
    used = (
        {
            gpu.name: f" ({render_size(gpu.used_mib << 20)} of {render_size(gpu.total_mib << 20)} in use)"
            for gpu in inspected.gpus
        }
        if inspected
        else {}
    )
    return NodeReport(
        node=node,
        usable=usable,
        hostname=ready.hostname,
        address=address,
        addresses=inspected.addresses if inspected else [],
        unguarded=unguarded,
        executable=ready.executable,
        python=ready.python,
        tensorflow=ready.tensorflow,
        keras=inspected.keras if inspected else None,
        cores=ready.cores,
        gpus=[f"{name}{used.get(name, '')}" for name in ready.gpus],
        free_bytes=inspected.free_bytes if inspected else None,
        clock_offset_s=answers.clock_offset_s,
        directory=inspected.directory if inspected else None,
        program_hash=inspected.program_hash if inspected else None,
        facts=_make_facts(inspected.facts) if inspected and inspected.facts else None,
    )


def _make_facts(facts: MachineFacts) -> FactsReport:
    ports = facts.outgoing_ports.split()
    return FactsReport(
        kernel=facts.kernel,
        missing=facts.missing,
        memory=facts.memory or None,
        open_files=facts.open_files or None,
        outgoing_ports=(int(ports[0]), int(ports[1])) if len(ports) == 2 and all(map(str.isdecimal, ports)) else None,
        reserved_ports=facts.reserved_ports,
        driver=facts.driver or None,
        tensorflow_gpus=facts.tensorflow_gpus,
    )

"""A check's report as text: a table, and the findings."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.gang.checks.findings import DialReport, SpeedReport
from launcher.gang.checks.preflight import ALL_PAIRS, count_partners
from launcher.report.models import CheckReport, JobReport, NodeReport
from launcher.report.table import Column
from launcher.wording import count_of, render_age
from worker_entry.protocol.units import render_size

COLUMNS = (
    Column("node", 100, least=8),
    Column("address", 90),
    Column("Python", 80),
    Column("TensorFlow", 85),
    Column("Keras", 75),
    Column("cores", 60),
    Column("GPUs", 70),
    Column("disk free", 50),
    Column("clock", 40),
)


def make_rows(report: CheckReport) -> list[tuple[str, ...]]:
    """A row of COLUMNS for each node."""
    return [_row(node) for node in report.nodes]


def _row(node: NodeReport) -> tuple[str, ...]:
    if node.hostname is None:
        return (node.node, "cannot be used", *[""] * (len(COLUMNS) - 2))
    return (
        node.node,
        node.address or "",
        node.python or "",
        node.tensorflow or "none",
        node.keras or ("none" if node.directory else ""),
        str(node.cores),
        str(len(node.gpus)),
        "" if node.free_bytes is None else render_size(node.free_bytes),
        "" if node.clock_offset_s is None else f"{node.clock_offset_s:+.3f} s",
    )


def _render_rule(dials: Sequence[DialReport]) -> str:
    """Which nodes dialled which addresses, as a phrase."""
    nodes = len({dial.node for dial in dials})
    if nodes <= ALL_PAIRS:
        return "every node to every task's address"
    return f"the leader and {count_partners(nodes)} other nodes to each task's address, and from all to the leader's"


Table = tuple[tuple[Column, ...], list[tuple[str, ...]]]
"""Columns and rows."""
NODE_COLUMNS = (Column("node", 90, least=8), Column("matrix product", 80), Column("memory copy", 70), Column("by", 10))
LINK_COLUMNS = (Column("link", 90, least=16), Column("there", 80), Column("back", 70), Column("latency", 60))


def make_speed_tables(speed: SpeedReport) -> list[Table]:
    """Two tables, of the nodes and of the links between them; a table without rows is omitted."""
    nodes = [
        (node.node, f"{node.gflop_s:.3g} GFLOP/s", f"{node.memory_gb_s:.3g} GB/s", node.method) for node in speed.nodes
    ]
    links = [
        (
            f"{link.node} to {link.to}",
            f"{link.there_mb_s:.3g} MB/s",
            f"{link.back_mb_s:.3g} MB/s",
            f"{link.latency_s * 1000:.3g} ms",
        )
        for link in speed.links
    ]
    tables: list[Table] = [(NODE_COLUMNS, [*nodes]), (LINK_COLUMNS, [*links])]
    return [(columns, rows) for columns, rows in tables if rows]


def render_job(job: JobReport) -> str:
    """`Slurm 22.05, job 12 in batch, 58 min left; …`."""
    left = "without a time limit" if job.left_s is None else f"{render_age(job.left_s)} left"
    warning = f"warns {job.grace_s:g} s earlier" if job.grace_s else "does not warn earlier"
    preemption = "" if job.preempt_mode in ("", "OFF") else f"; preemption ({job.preempt_mode}) {warning}"
    again = "can be requeued" if job.requeues else "is not requeued"
    end = f"tasks have {job.kill_wait_s:g} s from SIGTERM to SIGKILL{preemption}"
    return f"Slurm {job.version}, job {job.job} in {job.partition}, {left}: {end}; the job {again}"


def render_findings(report: CheckReport) -> list[str]:
    """The lines below the table: one for all dials, all findings with their hints, and the result."""
    lines = []
    if report.dials:
        answered = sum(not dial.failure for dial in report.dials)
        lines.append(f"{answered} of {len(report.dials)} dials from {_render_rule(report.dials)} were answered")
    for node in report.nodes:
        if node.addresses:
            who = "anyone" if node.unguarded else "only the cluster"
            lines.append(f"{node.node} listens on {', '.join(node.addresses)}: {who} can reach its ports there")
    if report.slurm is not None:
        lines.append(render_job(report.slurm))
    for finding in report.findings:
        lines.append(f"{finding.level.capitalize()}: {finding.message} [{finding.reference}]")
        lines += [f"  {finding.hint}"] if finding.hint else []
    errors = sum(finding.level == "error" for finding in report.findings)
    result = "ok" if report.ok else f"not startable: {count_of(errors, 'error')}"
    lines.append(f"{report.name}: {result}")
    return lines

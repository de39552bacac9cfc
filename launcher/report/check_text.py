"""A check's report as text: a table, and the findings."""

from __future__ import annotations

from launcher.report.models import CheckReport, NodeReport
from launcher.wording import count_of

COLUMNS = ("node", "address", "Python", "TensorFlow", "Keras", "cores", "GPUs", "disk free", "clock")


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
        "" if node.free_bytes is None else f"{node.free_bytes / 2**30:.1f} GiB",
        "" if node.clock_offset_s is None else f"{node.clock_offset_s:+.3f} s",
    )


def render_findings(report: CheckReport) -> list[str]:
    """The lines below the table: one for all dials, all findings with their hints, and the result."""
    lines = []
    if report.dials:
        good = sum(not dial.failure for dial in report.dials)
        lines.append(f"{good} of {len(report.dials)} dials from every node to every task's address were answered")
    for node in report.nodes:
        if node.addresses:
            who = "anyone" if node.unguarded else "only the cluster"
            lines.append(f"{node.node} listens on {', '.join(node.addresses)}: {who} reaches its ports there")
    for finding in report.findings:
        lines.append(f"{finding.level.capitalize()}: {finding.message} [{finding.reference}]")
        lines += [f"  {finding.hint}"] if finding.hint else []
    errors = sum(finding.level == "error" for finding in report.findings)
    result = "good" if report.good else f"not startable: {count_of(errors, 'error')}"
    lines.append(f"{report.name}: {result}")
    return lines

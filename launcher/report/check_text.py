"""The report of a check as text for people: a table, and the findings. Pure."""

from __future__ import annotations

from launcher.report.models import CheckReport, NodeReport

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
    """What follows the table: the dials in one line, then all findings with their hints."""
    lines = []
    if report.dials:
        good = sum(not dial.failure for dial in report.dials)
        lines.append(f"{good} of {len(report.dials)} dials of every task's address from every node were answered")
    for finding in report.findings:
        lines.append(f"{finding.level.capitalize()}: {finding.message} [{finding.reference}]")
        lines += [f"  {finding.hint}"] if finding.hint else []
    lines.append(f"{report.name}: {'good' if report.good else 'cannot be started so'}")
    return lines

"""Removes impossible values from a material: files may be damaged, or come from anywhere."""

from __future__ import annotations

import math

from launcher.pages.material import Material
from launcher.report.samples import ProgressSample, Sample
from worker_entry.protocol.frozen import replace

LAST_MOMENT = 1e11
"""Unix seconds that no clock shows."""
MOST_STEPS = 10**15


def clean(material: Material) -> Material:
    """The material with only valid times; its end is not before its start."""
    started = material.started if is_moment(material.started) else 0.0
    now = material.now if is_moment(material.now) else started
    ended = material.ended
    if ended is not None:
        ended = max(ended, started) if is_moment(ended) else started
    return replace(
        material,
        started=started,
        now=max(now, started),
        ended=ended,
        records=[record for record in material.records if is_moment(record.time)],
        tasks=[
            replace(each, progress=[*filter(_is_sane, each.progress)], use=[*filter(_is_sane, each.use)])
            for each in material.tasks
        ],
        nodes=[replace(each, use=[*filter(_is_sane, each.use)]) for each in material.nodes],
    )


def is_moment(time: float) -> bool:
    return math.isfinite(time) and 0 <= time < LAST_MOMENT


def _is_sane(sample: Sample) -> bool:
    return is_moment(sample.time) and not (isinstance(sample, ProgressSample) and abs(sample.step) > MOST_STEPS)

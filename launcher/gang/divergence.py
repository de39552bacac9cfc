"""Workers whose variables are no longer the same, although they train one model together.

Each worker sends digests of its variables, always for the same moments. Different digests of a moment show that the
variables have drifted apart: then only the chief's model is saved, and no worker trains the model that a single
process would train.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from launcher.tasks import TaskId, name_tasks
from worker_entry.protocol.values import ModelDigest

KEPT = 4
"""How many digests of a task are compared: workers may report a moment at slightly different times."""

Digests = Mapping[TaskId, tuple[ModelDigest, ...]]


def note_digest(digests: Digests, task: TaskId, digest: ModelDigest) -> Digests:
    """The digests with this one added to the task's, unless it is there already."""
    known = digests.get(task, ())
    return digests if digest in known else {**digests, task: (*known, digest)[-KEPT:]}


def render_divergence(digests: Digests, task: TaskId, trainers: Collection[TaskId]) -> str:
    """The line about the moment of the task's newest digest, if all training tasks have digests of it that differ.

    `the model of worker:1 differs from that of worker:0 after epoch 3, first in dense/kernel; …`; empty if not.
    """
    newest = digests[task][-1]
    alike = {other: digest for other in trainers for digest in digests.get(other, ()) if digest.moment == newest.moment}
    groups: dict[tuple[str, ...], list[TaskId]] = {}
    for other, digest in sorted(alike.items()):
        groups.setdefault(tuple(digest.parts), []).append(other)
    if len(alike) < len(trainers) or len(groups) < 2:
        return ""
    usual = max(groups.values(), key=len)  # the first of the largest groups
    odd = sorted(alike.keys() - set(usual))
    where = _first_difference(alike[usual[0]], alike[odd[0]])
    when = "at the end" if newest.ended else f"after epoch {newest.epoch}"
    what = "model" if len(odd) == 1 else "models"
    differ = "differs" if len(odd) == 1 else "differ"
    that = "that" if len(usual) == 1 else "those"
    return (
        f"the {what} of {name_tasks(odd)} {differ} from {that} of {name_tasks(usual)} {when}, first in {where}; "
        "only the chief's is saved"
    )


def _first_difference(one: ModelDigest, other: ModelDigest) -> str:
    for name, mine, theirs in zip(one.names, one.parts, other.parts, strict=False):
        if mine != theirs:
            return name
    return "the number of variables"

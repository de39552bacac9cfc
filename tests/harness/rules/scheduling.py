"""The assignment of tests to processes: the longest units of work begin first."""

from __future__ import annotations

import functools
import re

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.harness.places import ROOT
from tests.harness.rules.tiers import mark_of

ON_KUBERNETES = "tests/hosts/kubernetes/test_runs.py"
"""The unit of all tests that use the cluster."""


@functools.cache
def _reads(module: str, pattern: str) -> bool:
    return re.search(pattern, (ROOT / module).read_text(), re.MULTILINE) is not None


def _shares(module: str) -> bool:
    """Whether tests of the module share a fixture that each process creates once, which may take minutes."""
    return _reads(module, r'scope="(module|session)"')


def _is_costly(module: str) -> bool:
    return mark_of(module) is not None or _reads(module, r"\bmark\.(tensorflow|ssh|docker|slow)\b")


def _uses_kubernetes(nodeid: str) -> bool:
    return mark_of(nodeid.partition("::")[0]) == "kubernetes" or "[kubernetes]" in nodeid


class Longest(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A scheduler that sends a module's tests to one process, or one by one if they are costly and share nothing."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        if _uses_kubernetes(nodeid):  # some tests stop daemons of the only cluster
            return ON_KUBERNETES
        return module if _shares(module) or not _is_costly(module) else nodeid

    def _assign_work_unit(self, node: WorkerController) -> None:
        first = min(self.workqueue, key=_order)
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def _order(unit: str) -> int:
    """The rank of a unit of work: the longest come first, so that no process is left with one at the end."""
    module = unit.partition("::")[0]
    if not _is_costly(module):
        return 3
    return 2 if unit != module else 1 if not _reads(module, r'scope="session"') else 0

"""The golden plans."""

from __future__ import annotations

from pathlib import Path

from launcher.slurm.allocation import Allocation, make_nodes
from launcher.spec.loading import load_spec
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import SLURM
from tests.harness.places import EXAMPLES, ROOT

SPECS = EXAMPLES
GOLDEN = ROOT / "tests" / "golden"


def load_example(file: Path) -> ClusterSpec:
    """Loads the spec; if its nodes come from Slurm, it gets those of an example job."""
    spec = load_spec(file)
    if spec.source != SLURM:
        return spec
    return spec.with_nodes(make_nodes(Allocation("12", ("node9", "node10"), (1, 1)), spec))

"""What a node imports before its run is planned is what the plan asks for."""

from __future__ import annotations

import pytest

from launcher.plan.import_env import make_early_preload
from launcher.plan.making import make_plan, make_preload
from launcher.plan.resources import NodeFacts
from launcher.spec.changes import Changes
from launcher.spec.command_line import make_program, make_spec
from launcher.tasks import LOCAL
from worker_entry.agent.tasks.warm_forkserver import find_difference
from worker_entry.protocol import environment

CORES = 8
SHELL = {"OMP_NUM_THREADS": "3", "TF_CONFIG": "{}", "PATH": "/bin"}
"""A variable that the shell sets counts more than a share of the cores."""


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("words", [[], ["train.py", "--epochs", "3"]], ids=["demo", "script"])
@pytest.mark.parametrize("variables", [{}, {"TF_CPP_MIN_LOG_LEVEL": "2", "SHOWN": "1"}], ids=["own", "user"])
def test_an_early_import_has_what_the_plan_of_a_local_run_has(
    workers: int, words: list[str], variables: dict[str, str]
) -> None:
    program = make_program(words, is_module=False, is_command=False)
    spec = make_spec(
        tasks={"worker": workers}, strategy="multi_worker_mirrored", framework="tensorflow", program=program
    )
    spec = Changes(variables=tuple(f"{name}={value}" for name, value in variables.items())).apply(spec, {})
    plan = make_plan(spec, directory="/here", environ={}, python="python", facts={LOCAL: NodeFacts(CORES)})
    order = make_preload(spec, plan.tasks, keep=False)
    assert order is not None
    early = make_early_preload(order.program, workers, CORES, variables)
    merged, planned = (environment.merge(SHELL, each.env, each.unset, each.defaults) for each in (early, order))
    assert find_difference(merged, planned) is None

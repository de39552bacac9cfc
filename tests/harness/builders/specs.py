"""Specs and clusters of every shape, for properties."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from launcher.failures import FAILURES
from launcher.plan.tf_config import format_address
from launcher.spec.contradictions import OWN_VARIABLES
from launcher.spec.models import ClusterSpec
from launcher.tasks import TaskId

# Characters that a YAML file may hold as they are.
TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn", "Zl", "Zp"), exclude_characters="\ufeff"))
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in OWN_VARIABLES)
HOSTS = st.sampled_from(["local", "gpu-a", "alice@gpu-b", "10.0.0.3", "fd00::4", "[fd00::5]"])


@st.composite
def clusters(draw: st.DrawFn) -> dict[TaskId, str]:
    """The address of every task of a run, in any order, sometimes with parameter servers."""
    counts = {
        "chief": draw(st.integers(0, 1)),
        "worker": draw(st.integers(0, 4)),
        "ps": draw(st.integers(0, 3)),
        "evaluator": draw(st.integers(0, 1)),
    }
    tasks = [TaskId(task_type, i) for task_type, n in counts.items() for i in range(n)]  # type: ignore[arg-type]
    hosts = st.sampled_from(["10.0.0.1", "gpu-a", "fd00::1", "[fd00::2]"])
    order = draw(st.permutations(tasks or [TaskId("worker", 0)]))
    return {task: format_address(draw(hosts), 20000 + i) for i, task in enumerate(order)}


@st.composite
def specs(draw: st.DrawFn) -> ClusterSpec:
    """Valid specs, as instances of the model."""
    hosts = draw(st.lists(HOSTS, min_size=1, max_size=4, unique=True))
    chief, evaluator = (draw(st.none() | st.sampled_from(hosts)) for _ in range(2))
    nodes: list[dict[str, Any]] = []
    for i, host in enumerate(hosts):
        tasks = {"worker": draw(st.integers(1, 3))}
        tasks |= {"chief": 1} if host == chief else {}
        tasks |= {"evaluator": 1} if host == evaluator else {}
        node: dict[str, Any] = {"host": host, "tasks": tasks}
        if host == "local" and len(hosts) > 1:
            node["address"] = "10.0.0.1"
        node |= draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "address": st.just(f"10.1.0.{i}"),
                    "port": st.integers(1024, 60000),
                    "gpus": st.lists(st.sampled_from("01234567"), unique=True),
                    "python": TEXT.filter(bool),
                    "env": st.dictionaries(NAMES, TEXT, max_size=2),
                },
            )
        )
        nodes.append(node)
    programs = st.one_of(
        st.fixed_dictionaries({"script": TEXT.filter(bool)}, optional={"args": st.lists(TEXT, max_size=3)}),
        st.fixed_dictionaries({"module": TEXT.filter(bool)}, optional={"args": st.lists(TEXT, max_size=3)}),
        st.fixed_dictionaries({"command": st.lists(TEXT.filter(bool), min_size=1, max_size=3)}),
    )
    others = st.fixed_dictionaries(
        {},
        optional={
            "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", fullmatch=True),
            "program": programs,
            "working_directory": TEXT.filter(bool),
            "env": st.dictionaries(NAMES, TEXT, max_size=3),
            "env_from": st.lists(NAMES, max_size=2, unique=True),
            "ports": st.sampled_from(["20000-20999", "30000 - 30100", "1-65535"]),
            "keras": st.fixed_dictionaries({"patch": st.booleans()}),
            "restart": st.fixed_dictionaries(
                {},
                optional={
                    "max_restarts": st.integers(0, 9),
                    "period_s": st.integers(0, 900),
                    "pause_s": st.integers(0, 9),
                    "on": st.lists(st.sampled_from([*FAILURES]), unique=True),
                },
            ),
            "timeouts": st.fixed_dictionaries({"start_s": st.floats(0, 1e6), "drain_s": st.floats(0, 1e6)}),
        },
    )
    return ClusterSpec.model_validate({"nodes": nodes, **draw(others)})


def restarting(limit: int = 1, **fields: Any) -> dict[str, Any]:
    return {"restart": {"max_restarts": limit, **fields}}

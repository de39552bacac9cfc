"""What Slurm prints and reads: lists of hosts, the fields of a job, why a job ends, the script of a job."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.commands.submit import check_fits
from launcher.errors import UsageError
from launcher.slurm.allocation import find_allocation, make_nodes, parse_counts, parse_host_list
from launcher.slurm.calls import parse_fields
from launcher.slurm.durations import parse_seconds
from launcher.slurm.ending import Job, explain_end, parse_job
from launcher.slurm.script import render_script
from launcher.slurm.step import make_environment
from launcher.sources.slurm import uses_resolver
from launcher.spec.models import ClusterSpec
from launcher.spec.parts import ProgramSpec

# --- lists ---


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[9-10]", ["node9", "node10"]),
        ("node[009-011,3]", ["node009", "node010", "node011", "node3"]),
        ("rack[1-2]n[01-02],gpu9-ib", ["rack1n01", "rack1n02", "rack2n01", "rack2n02", "gpu9-ib"]),
        ("n[1-2]-ib,a", ["n1-ib", "n2-ib", "a"]),
    ],
)
def test_a_slurm_host_list_is_expanded_in_order_with_leading_zeros(text: str, hosts: list[str]) -> None:
    assert parse_host_list(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "n[1-", "n]1[", "n[a-b]", "n[[1]]", "n[1-999999999]", "n[1-]", ","])
def test_an_invalid_slurm_host_list_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|bracket|name|more than"):
        parse_host_list(text)


def test_slurm_task_counts_are_expanded_to_one_per_node() -> None:
    assert parse_counts("2(x3),1") == [2, 2, 2, 1]
    assert parse_counts("16") == [16]
    for text in ("", "x", "1(x)", "1(3)", "1(x99999999)"):
        with pytest.raises(ValueError, match="expected numbers"):
            parse_counts(text)


@given(st.text(alphabet="ab1290[],-(x)", max_size=20))
def test_random_slurm_lists_raise_only_value_errors(text: str) -> None:
    for parse in (parse_host_list, parse_counts):
        with contextlib.suppress(ValueError):
            assert all(map(str, parse(text)))


# --- the job that this process is in ---


def test_the_nodes_of_a_slurm_job_are_read_from_its_environment() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[09-11]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    allocation = find_allocation(environ)
    assert (allocation.hosts, allocation.tasks) == (("n09", "n10", "n11"), (2, 2, 1))
    spec = ClusterSpec.model_validate({"nodes": "slurm", "slurm": {"spares": 1}})
    nodes = spec.with_nodes(make_nodes(allocation, spec)).nodes
    assert [(node.host, node.connection, node.spare) for node in nodes] == [
        ("n09", "slurm", False),
        ("n10", "slurm", False),
        ("n11", "slurm", True),
    ]
    assert [node.tasks for node in nodes[:2]] == [{"worker": 2}] * 2


def test_all_components_of_a_heterogeneous_slurm_job_are_used() -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a",
        "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "b[1-2]",
        "SLURM_TASKS_PER_NODE_HET_GROUP_1": "4(x2)",
    }
    allocation = find_allocation(environ)
    assert (allocation.hosts, allocation.tasks) == (("a", "b1", "b2"), (1, 4, 4))


def test_the_first_slurm_node_gets_the_chief_and_the_parameter_server() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    spec = ClusterSpec.model_validate({"nodes": "slurm", "strategy": "parameter_server"})
    nodes = make_nodes(find_allocation(environ), spec)
    assert [node["tasks"] for node in nodes] == [{"worker": 1, "chief": 1, "ps": 1}, {"worker": 1}]


def test_reading_the_allocation_outside_a_slurm_job_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="not in a Slurm job"):
        find_allocation({})


def test_the_task_count_of_a_slurm_step_does_not_limit_the_nodes() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "1"}
    assert find_allocation(environ).tasks == (1, 1, 1)


def test_resource_requests_of_a_slurm_job_are_not_passed_to_its_steps() -> None:
    request = {"SLURM_NTASKS": "4", "SLURM_MEM_PER_CPU": "1", "SLURM_CPUS_PER_TASK": "2", "SLURM_EXPORT_ENV": "NONE"}
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "PATH": "/bin", "SLURM_CLUSTER_NAME": "c"}
    assert make_environment({**request, **kept}) == {**kept, "SLURM_CPU_BIND": "none"}


# --- why a job ends ---


RUNNING = Job(
    id="7", state="RUNNING", reason="None", partition="p", restarts=0, can_requeue=True, ends=None, preempted=None
)
STEP = "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T16:28:22{} ***"


def job(**changes: object) -> Job:
    return Job(**{**vars(RUNNING), **changes})


@pytest.mark.parametrize(
    ("found", "said", "reference", "stays"),
    [
        (RUNNING, [], None, False),
        (RUNNING, [STEP.format("")], None, False),  # `scancel 7.0`
        (job(state="COMPLETING"), [STEP.format("")], "interrupted", False),
        (job(state="CANCELLED"), [], "interrupted", False),
        (job(state="COMPLETING", reason="TimeLimit"), [STEP.format("")], "preempted", False),
        (job(state="TIMEOUT"), [], "preempted", False),
        (job(ends=2100.0), [], "preempted", False),  # `--signal`
        (job(ends=5000.0), [], None, False),
        (job(state="COMPLETING"), [STEP.format(" DUE TO TIME LIMIT")], "preempted", False),
        (job(state="COMPLETING", restarts=1), [STEP.format(" DUE TO PREEMPTION")], "preempted", False),
        (job(preempted=1001.0), [STEP.format("")], "preempted", False),
        (job(preempted=900.0), [STEP.format("")], None, False),  # preempted in an earlier start
        (
            job(state="COMPLETING", restarts=1),
            [STEP.format(" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS")],
            "node-lost",
            False,
        ),
        (job(state="PENDING", restarts=1), ["srun: error: Node failure on n2"], "node-lost", False),
        (job(state="PENDING", restarts=1), [], "preempted", False),
        (
            RUNNING,
            ["slurmstepd-n1: error: StepId=7.1 exceeded memory limit (2 > 1), being killed"],
            "out-of-memory",
            True,
        ),
        (job(state="OUT_OF_MEMORY"), [], "out-of-memory", False),
        (None, [STEP.format(" DUE TO PREEMPTION")], "preempted", False),
        (None, [STEP.format("")], None, False),
    ],
)
def test_each_end_of_a_slurm_job_has_its_failure_class(
    found: Job | None, said: list[str], reference: str | None, stays: bool
) -> None:
    end = explain_end(found, "7", said, restarts=0, since=1000.5, now=2000.0)
    assert (end.reference if end is not None else None) == reference
    if end is not None:
        assert end.stays == stays
        assert "7" in end.message
        assert all(any(line in text for text in end.evidence) for line in said)


def test_the_fields_of_a_slurm_job_are_parsed() -> None:
    line = (
        "JobId=12 JobName=a b=c UserId=root(0) Requeue=1 Restarts=2 BatchFlag=1 JobState=RUNNING Reason=None "
        "EndTime=2026-11-22T16:29:04 PreemptTime=None Partition=batch Comment=x y"
    )
    fields = parse_fields(line)
    assert (fields["JobId"], fields["Comment"], fields["UserId"]) == ("12", "x y", "root(0)")
    parsed = parse_job(fields)
    assert (parsed.restarts, parsed.can_requeue, parsed.preempted) == (2, True, None)
    assert parsed.ends is not None
    assert parse_job({}).can_requeue is False


def test_slurm_durations_are_parsed() -> None:
    texts = {"30 sec": 30, "20": 20, "00:00:20": 20, "1-00:00:01": 86_401, "": 0, "UNLIMITED": 0}
    assert {text: parse_seconds(text) for text in texts} == texts


@pytest.mark.parametrize("field", ["partition", "account", "time", "gpus_per_node"])
@pytest.mark.parametrize("value", ["a b", "a\n#SBATCH --uid=0", "a'b", "a#b", "", "$HOME", "`id`"])
def test_no_slurm_field_can_inject_an_option_into_the_batch_script(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=re.escape(field)):
        ClusterSpec.model_validate({"nodes": "slurm", "slurm": {field: value}})
    with pytest.raises(ValueError, match="extra"):
        ClusterSpec.model_validate({"nodes": "slurm", "slurm": {"extra": [f"--comment={value}\n"]}})


def test_folders_with_spaces_are_quoted_for_sbatch(tmp_path: Path) -> None:
    spec = ClusterSpec.model_validate({"nodes": "slurm"})
    script = render_script(spec, Path('/a "b\\ c'), ["true"], "/d e")
    assert '#SBATCH --chdir="/d e"' in script
    assert '#SBATCH --output="/a \\"b\\\\ c/slurm-%j.log"' in script


def test_a_spec_that_does_not_fit_a_slurm_job_is_rejected() -> None:
    with pytest.raises(UsageError, match="names its own nodes"):
        check_fits(ClusterSpec.model_validate({"nodes": [{"host": "a"}]}))
    with pytest.raises(UsageError, match="does not fit the spec"):
        check_fits(ClusterSpec.model_validate({"nodes": "slurm", "strategy": "mirrored", "slurm": {"nodes": 2}}))
    check_fits(ClusterSpec.model_validate({"nodes": "slurm", "strategy": "parameter_server", "slurm": {"nodes": 2}}))


# --- the program ---


def test_slurm_cluster_resolver_is_found_in_code_but_not_in_comments_or_strings(tmp_path: Path) -> None:
    texts = {
        "import tensorflow as tf\ntf.distribute.cluster_resolver.SlurmClusterResolver()\n": True,
        "# SlurmClusterResolver\nx = 'SlurmClusterResolver'\n": False,
        "broken(": False,
    }
    script = tmp_path / "train.py"
    for text, used in texts.items():
        script.write_text(text)
        assert uses_resolver(ProgramSpec(script="train.py"), tmp_path) == used
        assert uses_resolver(ProgramSpec(module="train"), tmp_path) == used
    assert not uses_resolver(ProgramSpec(script="missing.py"), tmp_path)
    assert not uses_resolver(ProgramSpec(command=["train.py"]), tmp_path)

"""How a run interprets the state of a pod, including fields that only newer clusters have."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.kubernetes.job import make_job
from launcher.kubernetes.pod import make_name
from launcher.kubernetes.pod_state import explain_end, explain_wait, parse_pod
from launcher.spec.pods import PodsSpec


def shown(
    phase: str = "Running",
    *,
    state: dict[str, Any] | None = None,
    conditions: dict[str, Any] | None = None,
    deleting_s: int | None = None,
    **status: Any,
) -> dict[str, Any]:
    """A pod as the API shows it. `conditions`: each as (status, reason, message)."""
    deleting = {} if deleting_s is None else {"deletionTimestamp": "now", "deletionGracePeriodSeconds": deleting_s}
    listed = [
        {"type": kind, "status": values[0], "reason": values[1], "message": values[2]}
        for kind, values in (conditions or {"Ready": ("True", "", "")}).items()
    ]
    return {
        "metadata": {"name": "p-1", "uid": "u", **deleting},
        "spec": {"nodeName": "machine", "containers": [{"name": "node"}, {"name": "other"}]},
        "status": {
            "phase": phase,
            "podIP": "10.1.2.3",
            "conditions": listed,
            "containerStatuses": [
                {"name": "other", "state": {"waiting": {"reason": "ErrImagePull", "message": "of another container"}}},
                {"name": "node", "state": state or {"running": {}}},
            ],
            **status,
        },
    }


def test_a_pod_is_usable_only_while_it_is_ready_and_not_being_deleted() -> None:
    assert parse_pod(shown()).is_usable
    assert parse_pod(shown()).address == "10.1.2.3"
    assert not parse_pod(shown("Pending")).is_usable
    assert not parse_pod(shown(conditions={"Ready": ("False", "", "")})).is_usable
    assert not parse_pod(shown(deleting_s=30)).is_usable
    assert not parse_pod(shown("Failed")).is_usable
    assert not parse_pod({}).is_usable


@pytest.mark.parametrize(
    ("pod", "events", "reason"),
    [
        (
            shown("Pending", conditions={"PodScheduled": ("False", "Unschedulable", "0/3 nodes have it")}),
            [],
            "0/3 nodes have it",
        ),
        (
            shown("Pending", state={"waiting": {"reason": "ErrImagePull", "message": "no such image"}}),
            ["Failed: older"],
            "ErrImagePull: no such image",
        ),
        (
            shown("Pending", state={"waiting": {"reason": "ContainerCreating"}}),
            ["FailedMount: no claim"],
            "FailedMount: no claim",
        ),
        (
            shown("Pending", state={"waiting": {"reason": "ContainerCreating"}}),
            [],
            "its container is being created on machine",
        ),
        (shown(deleting_s=3), [], "the pod is being deleted"),
        (shown(conditions={"Ready": ("False", "", "")}), [], "the pod is not ready on machine"),
        (
            shown("Failed", state={"terminated": {"reason": "Error", "exitCode": 3}}),
            [],
            "the pod has ended: Error, exit status 3",
        ),
    ],
)
def test_the_reason_for_a_waiting_pod_is_found_in_its_state_and_events(
    pod: dict[str, Any], events: list[str], reason: str
) -> None:
    assert explain_wait(parse_pod(pod), events) == reason


def disruption(reason: str) -> dict[str, Any]:
    return {"Ready": ("True", "", ""), "DisruptionTarget": ("True", reason, "because")}


@pytest.mark.parametrize(
    ("pod", "events", "is_there", "reference", "words"),
    [
        (
            shown("Failed", state={"terminated": {"reason": "OOMKilled", "exitCode": 137}}),
            [],
            True,
            "out-of-memory",
            "container: OOMKilled, exit status 137",
        ),
        (
            shown("Failed", reason="Evicted", message="The node was low on resource: memory."),
            [],
            True,
            "preempted",
            "status: Evicted: The node was low on resource: memory.",
        ),
        (
            shown(conditions=disruption("PreemptionByScheduler"), deleting_s=30),
            [],
            True,
            "preempted",
            "DisruptionTarget: PreemptionByScheduler: because",
        ),
        (shown(conditions=disruption("DeletionByTaintManager")), [], True, "node-lost", "DisruptionTarget"),
        (shown(conditions=disruption("DeletionByPodGC")), [], False, "node-lost", "DisruptionTarget"),
        (shown(conditions=disruption("PreemptionByKueue")), [], True, "preempted", "PreemptionByKueue"),
        (
            shown(deleting_s=30),
            ["Preempted: by default/urgent on node machine"],
            True,
            "preempted",
            "event Preempted: by default/urgent on node machine",
        ),
        (
            shown(deleting_s=30),
            ["TaintManagerEviction: Marking for deletion Pod"],
            True,
            "node-lost",
            "event TaintManagerEviction",
        ),
        (
            shown(conditions={"Ready": ("False", "", "")}),
            ["Started: once", "NodeNotReady: Node is not ready"],
            True,
            "node-lost",
            "event NodeNotReady: Node is not ready",
        ),
        (shown(deleting_s=30), [], True, "preempted", ""),
        (shown(), [], False, "preempted", ""),
        (
            shown("Failed", state={"terminated": {"reason": "Error", "exitCode": 255}}),
            [],
            True,
            "preempted",
            "container: Error, exit status 255",
        ),
    ],
)
def test_the_reason_for_an_evicted_pod_is_found_in_its_state_and_events(
    pod: dict[str, Any], events: list[str], is_there: bool, reference: str, words: str
) -> None:
    end = explain_end(parse_pod(pod), events, is_there=is_there, grace_s=7)
    assert end is not None
    assert (end.reference, end.node, end.grace_s, end.replaced) == (reference, "p-1", 7, True)
    assert end.message.startswith("pod p-1 on machine ")
    assert any(line.startswith(words) for line in end.evidence) or words in "".join(end.evidence)
    assert not any("Started" in line for line in end.evidence)


def test_a_running_pod_has_no_announced_end() -> None:
    assert explain_end(parse_pod(shown()), ["Started: once"], is_there=True) is None


def test_names_of_runs_become_valid_kubernetes_labels() -> None:
    assert make_name("20261122-My_Cluster.a-9f") == "20261122-my-cluster-a-9f"
    assert len(make_name("x" * 80, 52)) == 52
    assert make_name("a" * 51 + "--b", 52) == "a" * 51
    assert make_name("___") == "run"


def test_the_job_of_pods_combines_the_spec_with_the_pod_template() -> None:
    source = PodsSpec(
        image="i", count=3, gpus=2, cpus="4", memory="8Gi", queue="q", priority_class="low", volumes={"data": "/data"}
    )
    template = {
        "metadata": {"labels": {"team": "a", "distlaunch/run": "forged"}, "annotations": {"note": "b"}},
        "spec": {
            "tolerations": [{"key": "gpu"}],
            "restartPolicy": "Always",
            "containers": [
                {"name": "main", "env": [{"name": "A", "value": "1"}], "resources": {"limits": {"x/y": "1"}}},
                {"name": "side"},
            ],
        },
    }
    job = make_job(source, template, run="my run", grace_s=10, idle_s=60)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert (job["spec"]["suspend"], job["spec"]["completions"], job["spec"]["parallelism"]) == (True, 3, 3)
    metadata, pod = job["spec"]["template"]["metadata"], job["spec"]["template"]["spec"]
    assert metadata["labels"]["team"] == "a"
    assert metadata["labels"]["distlaunch/run"] == job["metadata"]["labels"]["distlaunch/run"] == "my-run"
    assert metadata["annotations"]["kubectl.kubernetes.io/default-container"] == "main"
    assert (pod["restartPolicy"], pod["priorityClassName"]) == ("Never", "low")
    assert pod["tolerations"] == [{"key": "gpu"}]
    assert pod["terminationGracePeriodSeconds"] == 25
    assert [container["name"] for container in pod["containers"]] == ["main", "side"]
    main = pod["containers"][0]
    assert main["image"] == "i"
    assert [each for each in main["env"] if each["name"] not in ("HOME", "USER")] == [{"name": "A", "value": "1"}]
    assert main["resources"] == {
        "requests": {"cpu": "4", "memory": "8Gi"},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": "2", "x/y": "1"},
    }
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert main["securityContext"]["readOnlyRootFilesystem"] is True
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"name": "HOME", "value": "/tmp"} in main["env"]
    assert {"/tmp", "/dev/shm"} <= {mount["mountPath"] for mount in main["volumeMounts"]}
    assert {"name": "claim-data", "mountPath": "/data"} in main["volumeMounts"]
    assert {"name": "claim-data", "persistentVolumeClaim": {"claimName": "data"}} in pod["volumes"]

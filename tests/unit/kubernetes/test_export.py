"""`distlaunch export kubernetes` writes objects that the API accepts, with rules that do what the spec says."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from launcher.cli import specs
from launcher.cli.main import cli
from launcher.errors import UsageError
from launcher.kubernetes.exported import KINDS, Kind
from tests.harness.hosts.exported import (
    CASES,
    EVERYTHING,
    PODS,
    SERVERS,
    SPECS,
    TWO_MACHINES,
    WITH_CHIEF,
    Exported,
    env_of,
    expand,
    export,
    export_case,
    jobs_of,
    make,
    pods_of,
    read_file,
)
from worker_entry.protocol import pod_statuses

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""Valid names of a Service."""


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_exported_names_of_objects_and_volumes_are_valid_in_kubernetes(name: str, kind: Kind) -> None:
    objects = export_case(name, kind).objects
    for manifest in objects.values():
        assert NAME.fullmatch(manifest["metadata"]["name"])
    for template in pods_of(objects):
        for volume in template["spec"]["volumes"]:
            assert NAME.fullmatch(volume["name"])
            assert len(volume["name"]) <= 63


def test_run_names_that_kubernetes_rejects_are_changed_in_the_export() -> None:
    long = export(f"name: {'n' * 63}\n{PODS}").objects["JobSet"]["metadata"]["name"]
    assert len(f"{long}-evaluator-0-9999-abcde") <= 63
    assert export(f"name: 2nd_Run.\n{PODS}").objects["JobSet"]["metadata"]["name"] == "run-2nd-run"


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_exported_pods_have_minimal_privileges(name: str, kind: Kind) -> None:
    for template in pods_of(export_case(name, kind).objects):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        [container] = spec["containers"]
        context = container.get("securityContext")
        assert context == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable >= {"/tmp", "/dev/shm"}


# --- names, roles, environment ---


@pytest.mark.parametrize(
    ("kind", "hosts"),
    [
        ("jobset", [f"cluster-worker-0-{index}.cluster:2222" for index in range(3)]),
        ("job", [f"cluster-{index}.cluster:2222" for index in range(3)]),
        ("trainjob", [f"cluster-node-0-{index}.cluster:2222" for index in range(3)]),
    ],
)
def test_exported_tf_config_has_the_host_names_of_the_future_pods(kind: Kind, hosts: list[str]) -> None:
    exported = export_case("pods", kind)
    for index in range(3):
        env = env_of(exported, index)
        assert json.loads(env["TF_CONFIG"]) == {
            "cluster": {"worker": hosts},
            "task": {"type": "worker", "index": index},
        }
        assert env["DISTLAUNCH_TASK"] == f"worker:{index}"


def test_exported_pods_have_the_subdomain_of_their_headless_service() -> None:
    objects = export_case("pods", "job").objects
    service, spec = objects["Service"], objects["Job"]["spec"]["template"]
    assert spec["spec"]["subdomain"] == service["metadata"]["name"] == "cluster"
    assert service["spec"]["selector"].items() <= spec["metadata"]["labels"].items()
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)


def test_a_jobset_has_a_job_per_task_type_and_hides_the_evaluator() -> None:
    exported = export_case("chief", "jobset")
    jobs = exported.objects["JobSet"]["spec"]["replicatedJobs"]
    assert [(job["name"], job["template"]["spec"]["completions"]) for job in jobs] == [
        ("chief", 1),
        ("worker", 2),
        ("evaluator", 1),
    ]
    assert json.loads(env_of(exported, 1, 1)["TF_CONFIG"]) == {
        "cluster": {
            "chief": ["cluster-chief-0-0.cluster:2222"],
            "worker": ["cluster-worker-0-0.cluster:2222", "cluster-worker-0-1.cluster:2222"],
        },
        "task": {"type": "worker", "index": 1},
    }
    assert "evaluator" in json.loads(env_of(exported, 0, 2)["TF_CONFIG"])["cluster"]


@pytest.mark.parametrize(("name", "kind"), [("pods", "tfjob"), ("one pod", "jobset"), ("mirrored", "job")])
def test_tf_config_is_not_exported_for_tfjob_or_a_single_process(name: str, kind: Kind) -> None:
    assert "TF_CONFIG" not in env_of(export_case(name, kind), 0)


def test_an_exported_tfjob_has_the_names_that_its_controller_expects() -> None:
    spec = export_case("servers", "tfjob").objects["TFJob"]["spec"]
    assert {role: each["replicas"] for role, each in spec["tfReplicaSpecs"].items()} == {
        "Chief": 1,
        "Worker": 3,
        "PS": 2,
        "Evaluator": 1,
    }
    for each in spec["tfReplicaSpecs"].values():
        [container] = each["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"
        assert container["ports"] == [{"name": "tfjob-port", "containerPort": 2222, "protocol": "TCP"}]
        assert each["template"]["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}


def test_an_exported_trainjob_refers_to_its_runtime_and_orders_its_variables() -> None:
    objects = export_case("everything", "trainjob").objects
    job, runtime = objects["TrainJob"]["spec"], objects["TrainingRuntime"]
    assert job["runtimeRef"] == {"name": runtime["metadata"]["name"], "kind": "TrainingRuntime"}
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == node["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert job["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 4
    names = [each["name"] for each in job["trainer"]["env"]]
    assert names.index("TASK_INDEX") < names.index("TF_CONFIG")
    assert "env" not in node["template"]["spec"]["template"]["spec"]["containers"][0]


def test_only_workers_of_an_exported_parameter_server_cluster_request_gpus() -> None:
    exported = export("nodes: {from: kubernetes, image: a, count: 2, gpus: 4}\nstrategy: parameter_server\n")
    jobs = exported.objects["JobSet"]["spec"]["replicatedJobs"]
    specs = {job["name"]: job["template"]["spec"] for job in jobs}
    assert {name: spec["completions"] for name, spec in specs.items()} == {"chief": 1, "worker": 2, "ps": 1}
    asking = [name for name, spec in specs.items() if "gpu" in str(spec["template"]["spec"]["containers"][0])]
    assert asking == ["worker"]


def test_dollar_references_in_user_text_are_not_expanded_by_kubernetes() -> None:
    exported = export_case("everything", "jobset")
    assert env_of(exported, 0)["MODE"] == "a $(HOME) $$"
    [template] = pods_of(exported.objects)
    words = [expand(word, {"HOME": "/tmp"}) for word in template["spec"]["containers"][0]["args"]]
    assert words[-4:] == ["--epochs", "3", "--note", "$(HOME) costs $5"]
    assert words[:-5] == ["--stop-grace", "90", "--no-keras-patch", "--no-progress", "--keep-own-tf-config"]


def test_exported_pytorch_pods_have_torch_variables_and_no_tf_config() -> None:
    env = env_of(export_case("torch", "jobset"), 2)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("2", "3", "0")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("cluster-worker-0-0.cluster", "2222")
    assert "TF_CONFIG" not in env


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("jobset", "cluster-worker-0-0.cluster:2222"),
        ("job", "cluster-0.cluster:2222"),
        ("trainjob", "cluster-node-0-0.cluster:2222"),
    ],
)
def test_exported_jax_pods_connect_to_the_pod_of_their_first_task(kind: Kind, first: str) -> None:
    exported = export_case("jax", kind)
    for index in range(3):
        env = env_of(exported, index)
        assert (
            env.items()
            >= {
                "KERAS_BACKEND": "jax",
                "KERAS_DISTRIBUTION_JOB_ADDRESSES": first,
                "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
                "KERAS_DISTRIBUTION_PROCESS_ID": str(index),
                "JAX_COORDINATOR_ADDRESS": first,
                "JAX_NUM_PROCESSES": "3",
                "JAX_PROCESS_ID": str(index),
                "JAX_NUM_CPU_DEVICES": "2",
                "DISTLAUNCH_TASK": f"worker:{index}",
            }.items()
        )
        assert "TF_CONFIG" not in env


def test_exported_jax_pods_limit_their_start_and_let_gloo_reach_every_port() -> None:
    objects = export_case("jax", "jobset").objects
    [template] = pods_of(objects)
    words = template["spec"]["containers"][0]["args"]
    assert words[words.index("--start-timeout") + 1] == "600"
    [rule] = objects["NetworkPolicy"]["spec"]["ingress"]
    assert "ports" not in rule


def test_exported_jax_pods_run_the_demo_of_jax_if_the_spec_names_no_program() -> None:
    exported = export_case("jax", "jobset")
    [template] = pods_of(exported.objects)
    assert template["spec"]["containers"][0]["args"][-2:] == ["-m", "worker_entry.demo.train_jax"]
    with zipfile.ZipFile(io.BytesIO(read_file(exported, "entry.pyz"))) as archive:
        assert {f"worker_entry/demo/{name}" for name in ("train_jax.py", "digits.py", "digits.npz")} <= {
            *archive.namelist()
        }


def test_each_worker_of_a_machine_is_exported_as_a_pod_with_its_gpus() -> None:
    [template] = pods_of(export_case("machines", "jobset").objects)
    [job] = jobs_of(export_case("machines", "jobset").objects)
    assert job["completions"] == job["parallelism"] == 3
    [container] = template["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert container["image"] == "registry/other:2"


def test_spec_fields_for_resources_and_scheduling_reach_the_exported_pods() -> None:
    objects = export_case("everything", "jobset").objects
    job_set = objects["JobSet"]
    assert {manifest["metadata"]["namespace"] for manifest in objects.values()} == {"team"}
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    [template] = pods_of(objects)
    spec = template["spec"]
    assert (spec["priorityClassName"], spec["terminationGracePeriodSeconds"]) == ("high", 95)
    [container] = spec["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "500m", "memory": "16Gi"},
        "limits": {"memory": "16Gi", "amd.com/gpu": "8"},
    }
    claims = {
        each["name"]: each["persistentVolumeClaim"]["claimName"] for each in spec["volumes"] if "Claim" in str(each)
    }
    mounts = {claims[each["name"]]: each["mountPath"] for each in container["volumeMounts"] if each["name"] in claims}
    assert mounts == {"checkpoints": "/checkpoints", "data.v2": "/data"}


def test_a_pod_template_of_the_user_is_kept_except_for_tf_config(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(
        "metadata: {labels: {team: a}}\nspec:\n  nodeSelector: {pool: gpu}\n  securityContext: {runAsUser: 7}\n"
        "  containers: [{name: mine, env: [{name: A, value: b}, {name: TF_CONFIG, value: x}],\n"
        "    imagePullPolicy: Always}]\n"
    )
    pods = f"nodes: {{from: kubernetes, image: registry/train:1, count: 2, template: {file}}}\n"
    [template] = pods_of(export(pods).objects)
    spec = template["spec"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert (spec["nodeSelector"], spec["securityContext"]) == ({"pool": "gpu"}, {"runAsUser": 7})
    [container] = spec["containers"]
    assert (container["name"], container["imagePullPolicy"]) == ("task", "Always")
    assert container["env"][0] == {"name": "A", "value": "b"}
    names = [each["name"] for each in container["env"]]
    assert names.count("TF_CONFIG") == 1
    assert json.loads(env_of(export(pods), 1)["TF_CONFIG"])["task"]["index"] == 1


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_exported_container_sets_a_variable_twice(name: str, kind: Kind) -> None:
    """Server-side apply would reject it."""
    for template in pods_of(export_case(name, kind).objects):
        names = [each["name"] for each in template["spec"]["containers"][0].get("env", ())]
        assert len(names) == len(set(names))


# --- network policy ---


@pytest.mark.parametrize("kind", ["jobset", "job", "tfjob", "trainjob"])
def test_the_network_policy_admits_only_pods_of_the_same_run(kind: Kind) -> None:
    objects = export_case("pods", kind).objects
    policy = objects["NetworkPolicy"]["spec"]
    selector = policy["podSelector"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [
        {"from": [{"podSelector": selector}], "ports": [{"port": 2222, "protocol": "TCP"}]},
    ]
    for template in pods_of(objects):
        assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_network_policy_admits_allowed_networks_and_all_ports_for_nccl() -> None:
    blocks = [{"ipBlock": {"cidr": "10.0.0.0/24"}}, {"ipBlock": {"cidr": "fd00::/8"}}]
    rules = export_case("everything", "jobset").objects["NetworkPolicy"]["spec"]["ingress"]
    assert rules[1] == {"from": blocks, "ports": [{"port": 2222, "protocol": "TCP"}]}
    assert "ports" in rules[0]  # communication: ring
    nccl = export(EVERYTHING.replace("communication: ring", "communication: nccl")).objects["NetworkPolicy"]["spec"]
    assert ["ports" in rule for rule in nccl["ingress"]] == [False, True]


def test_guard_off_exports_no_network_policy() -> None:
    assert "NetworkPolicy" not in export_case("unguarded", "jobset").objects


# --- the consequences of an exit status ---


FREE = "RestartJobSetAndIgnoreMaxRestarts"
STATUSES = range(256)
ENDS = {0: "succeeded", 2: "FailJobSet", 42: FREE, 76: "replaced", 93: "FailJobSet", 143: FREE}
"""The consequence of each exit status that does not lead to a counted restart."""


def follow_pod(job: Mapping[str, Any], status: int, *, disrupted: bool = False) -> tuple[str, str]:
    """What a Job does after a pod's end, as documented: `succeeded`, `replaced`, or fails with a reason and message."""
    if status == 0:
        return "succeeded", ""
    container = job["template"]["spec"]["containers"][0]["name"]
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes")
        if codes is not None:
            matches = codes["operator"] == "In" and codes["containerName"] == container and status in codes["values"]
            why = f"Container {container} for pod default/a-0-x failed with exit code {status} matching"
        else:
            matches = disrupted and any(each["type"] == "DisruptionTarget" for each in rule["onPodConditions"])
            why = "Pod default/a-0-x has condition DisruptionTarget matching"
        if matches and rule["action"] == "Ignore":
            return "replaced", ""
        if matches and rule["action"] == "FailJob":
            return "PodFailurePolicy", f"{why} FailJob rule at index {index}"
    if job.get("backoffLimit", job.get("backoffLimitPerIndex")) > 0:
        return "replaced, counted", ""
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def follow(job_set: Mapping[str, Any], job: Mapping[str, Any], status: int, *, disrupted: bool = False) -> str:
    """What a JobSet does after the first failure of a pod."""
    reason, message = follow_pod(job, status, disrupted=disrupted)
    if not message:
        return reason
    policy = job_set["failurePolicy"]
    actions = [
        rule["action"]
        for rule in policy.get("rules", ())
        if reason in rule["onJobFailureReasons"]
        and any(re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"])
    ]
    action = next(iter(actions), "RestartJobSet")
    return "FailJobSet" if action == "RestartJobSet" and policy["maxRestarts"] == 0 else str(action)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_exported_failure_policies_handle_every_exit_status_and_disruption(kind: Kind) -> None:
    objects = export_case("restarted", kind).objects
    spec = objects["JobSet"]["spec"] if kind == "jobset" else objects["TrainingRuntime"]["spec"]["template"]["spec"]
    [job] = jobs_of(objects)
    followed = {status: follow(spec, job, status) for status in STATUSES}
    assert followed == {**dict.fromkeys(STATUSES, "RestartJobSet"), **ENDS}
    disrupted = {status: follow(spec, job, status, disrupted=True) for status in STATUSES}
    assert disrupted == {**dict.fromkeys(STATUSES, FREE), 0: "succeeded"}


def test_an_exported_jobset_without_restarts_does_not_restart() -> None:
    objects = export_case("pods", "jobset").objects
    [job] = jobs_of(objects)
    followed = {status: follow(objects["JobSet"]["spec"], job, status) for status in STATUSES}
    assert followed == {**dict.fromkeys(STATUSES, "FailJobSet"), 0: "succeeded", 76: "replaced"}
    assert follow_pod(export_case("pods", "job").objects["Job"]["spec"], 143)[0] == "PodFailurePolicy"


def test_an_exported_job_replaces_preempted_pods_and_fails_with_the_first_failure() -> None:
    [job] = jobs_of(export_case("restarted", "job").objects)
    ends = {0: "succeeded", **dict.fromkeys((2, 93), "PodFailurePolicy"), **dict.fromkeys((42, 76, 143), "replaced")}
    followed = {status: follow_pod(job, status)[0] for status in STATUSES}
    assert followed == {**dict.fromkeys(STATUSES, "BackoffLimitExceeded"), **ends}
    disrupted = {follow_pod(job, status, disrupted=True)[0] for status in STATUSES if status}
    assert disrupted == {"replaced"}


def test_only_a_failed_chief_or_server_restarts_an_exported_parameter_server_cluster() -> None:
    job_set = export_case("servers", "jobset").objects["JobSet"]["spec"]
    jobs = {job["name"]: job["template"]["spec"] for job in job_set["replicatedJobs"]}
    assert job_set["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["chief"]}
    assert {name: follow(job_set, job, 1) for name, job in jobs.items()} == {
        "chief": "RestartJobSet",
        "worker": "replaced, counted",
        "ps": "RestartJobSet",
        "evaluator": "replaced, counted",
    }
    assert {name: follow(job_set, job, 143) for name, job in jobs.items()} == {
        "chief": FREE,
        "worker": "replaced",
        "ps": FREE,
        "evaluator": "replaced",
    }
    assert (jobs["worker"]["backoffLimitPerIndex"], jobs["worker"]["maxFailedIndexes"]) == (3, 0)


def test_the_success_policy_of_a_jobset_ignores_the_evaluator() -> None:
    assert export_case("chief", "jobset").objects["JobSet"]["spec"]["successPolicy"] == {
        "operator": "All",
        "targetReplicatedJobs": ["chief", "worker"],
    }
    assert "successPolicy" not in export_case("pods", "jobset").objects["JobSet"]["spec"]


def test_an_exported_tfjob_restarts_only_preempted_pods() -> None:
    """TFJob restarts only pods with an exit status of 128 or more."""
    told = {status: pod_statuses.for_tfjob(status) for status in STATUSES}
    assert {status for status in STATUSES if told[status] >= 128} == {42, 76, 143}
    assert {status for status in STATUSES if told[status] == 0} == {0}


def test_an_exported_tfjob_without_restarts_never_restarts_pods() -> None:
    policies = [
        {
            role["restartPolicy"]
            for role in export_case(name, "tfjob").objects["TFJob"]["spec"]["tfReplicaSpecs"].values()
        }
        for name in ("pods", "restarted")
    ]
    assert policies == [{"Never"}, {"ExitCode"}]


# --- secrets, comments, files ---


@pytest.mark.parametrize("kind", ["jobset", "job", "tfjob", "trainjob"])
def test_exported_secrets_are_references_with_a_command_that_creates_the_secret(kind: Kind) -> None:
    exported = export_case("everything", kind)
    assert "hunter2" not in exported.text
    assert "Secret" not in exported.objects
    for name in ("WANDB_API_KEY", "MY_TOKEN"):
        assert f'--from-literal={name}="${name}"' in exported.text
        reference = f"secretKeyRef:\n\\s+name: mnist-large-run-env\n\\s+key: {name}\n"
        assert re.search(reference, exported.text)
    assert "kubectl -n team create secret generic mnist-large-run-env" in exported.text
    assert "kubectl create secret" not in export_case("pods", kind).text


def test_commands_in_the_exported_file_name_the_kubectl_context() -> None:
    text = export(f"{PODS.replace('count: 3', 'context: lab a')}env_from: [A]\n").text
    assert "kubectl --context 'lab a' apply --server-side -f THIS_FILE" in text
    assert "kubectl --context 'lab a' create secret generic" in text


def test_comments_in_the_exported_file_name_the_spec_fields() -> None:
    text = export_case("everything", "jobset").text
    for field, key in (
        ("nodes.queue", "kueue.x-k8s.io/queue-name: team-a"),
        ("restart.max_restarts", "maxRestarts: 5"),
        ("nodes.priority_class", "priorityClassName: high"),
        ("allow", "from:"),
        ("nodes.volumes, or --volume", "name: claim-checkpoints"),
        ("timeouts.start_s, timeouts.stop_grace_s, keras.patch, progress, keep_own_tf_config, program", "args:"),
        ("guard", "spec:"),
        ("env.MODE", "name: MODE"),
        ("env_from", "name: WANDB_API_KEY"),
        ("devices", "name: DISTLAUNCH_DEVICES"),
    ):
        assert re.search(rf"# {re.escape(field)}\n\s*{re.escape(key)}", text), field


def test_exporting_a_spec_twice_gives_the_same_bytes() -> None:
    assert export(EVERYTHING).text == export(EVERYTHING).text


def test_the_exported_archive_contains_the_demo_only_if_it_runs() -> None:
    names = {name: archived(export_case(name, "jobset")) for name in ("pods", "machines")}
    assert names["pods"] - names["machines"] == {"demo"}


def archived(exported: Exported) -> set[str]:
    """The folders and modules of `worker_entry` in the archive."""
    with zipfile.ZipFile(io.BytesIO(read_file(exported, "entry.pyz"))) as bundle:
        return {Path(name).parts[1] for name in bundle.namelist() if "/" in name}


# --- specs that cannot be exported ---


REFUSED = {
    "nodes[1].spare": "nodes: [{host: a}, {host: b, spare: true}]\n",
    "nodes[0].addresses": "nodes: [{host: a, addresses: [10.0.0.1, 10.0.0.2]}, {host: b}]\n",
    "nodes[0].address": "nodes: [{host: a, address: 10.0.0.1}, {host: b}]\n",
    "nodes[0].ssh": "nodes: [{host: a, ssh: {user: eve}}]\n",
    "nodes[1].env": "nodes: [{host: a}, {host: b, env: {A: b}}]\n",
    "nodes[1].python": "nodes: [{host: a}, {host: b, python: python3.12}]\n",
    "nodes[1].gpus": "nodes: [{host: a, gpus: [0, 1]}, {host: b, gpus: [0]}]\n",
    "nodes.workers_per_pod": "nodes: {from: kubernetes, image: a, workers_per_pod: 2}\n",
    "nodes.count": "nodes: {from: kubernetes, image: a, count: 2}\nstrategy: mirrored\n",
    "nodes": "nodes: slurm\n",
    "connection": f"{TWO_MACHINES}connection: openssh\n",
    "ssh": f"{TWO_MACHINES}ssh: {{user: eve}}\n",
    "host_keys": f"{TWO_MACHINES}host_keys: accept-new\n",
    "isolation": f"{TWO_MACHINES}isolation: tunnel\n",
    "guard": f"{PODS}guard: required\n",
    "tensorboard": f"{PODS.replace('3}', '3, volumes: {c: /logs}}')}tensorboard: keep\nlog_directory: /logs\n",
    "strategy": "nodes: {from: kubernetes, image: a}\nstrategy: tpu\n",
    "checkpoint_directory": f"{PODS}checkpoint_directory: /elsewhere\n",
    "log_directory": f"{PODS}log_directory: /elsewhere\n",
    "working_directory": f"{PODS}working_directory: ~/job\n",
    "program.script": f"{TWO_MACHINES}program: {{script: /home/eve/train.py}}\n",
    "program.command": f"{TWO_MACHINES}program: {{command: [/home/eve/train.sh]}}\n",
    "program.args": f"{PODS}program: {{script: a.py, args: [--api-key, abc]}}\n",
    "env.TASK_INDEX": f"{PODS}env: {{TASK_INDEX: 1}}\n",
    "check_speed": f"{PODS}check_speed: true\n",
    "cache": f"{PODS}cache: /cache\n",
    "stdin": f"{PODS}stdin: all\n",
    "metrics": f"{PODS}metrics: 9400\n",
    "report": f"{PODS}report: true\n",
    "notify": f"{PODS}notify: {{command: [./tell]}}\n",
    "restart.period_s": f"{PODS}restart: {{max_restarts: 1, period_s: 60}}\n",
    "restart.on": f"{PODS}restart: {{on: [preempted]}}\n",
    "timeouts.stall_s": f"{PODS}timeouts: {{stall_s: 60}}\n",
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_spec_field_that_no_manifest_can_express_is_rejected(field: str) -> None:
    with pytest.raises(UsageError) as raised:
        make(REFUSED[field])
    assert {line.partition(": ")[0] for line in raised.value.evidence} == {field}


@pytest.mark.parametrize(
    ("text", "kind", "field"),
    [
        (WITH_CHIEF, "job", "nodes.tasks.chief"),
        (SERVERS, "trainjob", "nodes.tasks.ps"),
        (SPECS["torch"], "tfjob", "framework"),
        (SPECS["jax"], "tfjob", "framework"),
        (f"{PODS}strategy: parameter_server\n", "job", "strategy"),
    ],
)
def test_a_spec_field_that_one_manifest_kind_cannot_express_is_rejected(text: str, kind: Kind, field: str) -> None:
    with pytest.raises(UsageError) as raised:
        make(text, kind)
    assert any(line.startswith(f"{field}: ") for line in raised.value.evidence)


def test_a_cluster_too_large_for_an_environment_variable_is_not_exported() -> None:
    with pytest.raises(UsageError, match="too long for an environment variable"):
        export("nodes: {from: kubernetes, image: a, count: 9000}\n")


# --- the command ---


def run_command(*words: str) -> tuple[int, str]:
    ran = CliRunner().invoke(cli, ["export", "kubernetes", *words], prog_name="distlaunch", obj={})
    return ran.exit_code if ran.exception is None else 2, ran.output + str(ran.exception or "")


def test_the_export_command_applies_its_options_to_the_manifests(tmp_path: Path) -> None:
    spec = tmp_path / "a.yaml"
    spec.write_text(f"{TWO_MACHINES}program: {{script: train.py}}\n")
    words = [str(spec), "--image", "registry/x:3", "--volume", "ckpt:/ckpt", "--as", "job"]
    options = ["--set", "checkpoint_directory=/ckpt/a", "-e", "A=b"]
    status, text = run_command(*options, *words, "--", "--epochs", "3")
    assert status == 0, text
    objects = {each["kind"]: each for each in yaml.safe_load_all(text) if each}
    [container] = objects["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/x:3"
    assert container["args"][-3:] == ["train.py", "--epochs", "3"]
    assert {"name": "A", "value": "b"} in container["env"]
    assert {"name": "claim-ckpt", "mountPath": "/ckpt"} in container["volumeMounts"]


def test_the_export_command_does_not_overwrite_a_file(tmp_path: Path) -> None:
    spec, out = tmp_path / "a.yaml", tmp_path / "out.yaml"
    spec.write_text(PODS)
    assert run_command(str(spec), "-o", str(out)) == (0, "")
    assert "kind: JobSet" in out.read_text()
    status, text = run_command(str(spec), "-o", str(out))
    assert status == 2
    assert "exists" in text


def test_exporting_a_spec_of_machines_requires_an_image(tmp_path: Path) -> None:
    spec = tmp_path / "a.yaml"
    spec.write_text(TWO_MACHINES)
    status, text = run_command(str(spec))
    assert status == 2
    assert "--image" in text


def test_the_export_command_offers_every_manifest_kind() -> None:
    assert isinstance(specs.export.commands["kubernetes"].params[0].type, click.Choice)
    assert tuple(specs.export.commands["kubernetes"].params[0].type.choices) == KINDS


@pytest.mark.parametrize("volume", ["ckpt", "ckpt:relative", "A_B:/x", ":/x"])
def test_the_export_command_rejects_a_volume_without_claim_and_absolute_path(tmp_path: Path, volume: str) -> None:
    spec = tmp_path / "a.yaml"
    spec.write_text(PODS)
    status, text = run_command("--volume", volume, str(spec))
    assert status == 2
    assert "CLAIM:PATH" in text

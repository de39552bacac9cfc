"""The objects of each kind of export."""

from __future__ import annotations

from launcher.kubernetes.exported import Export, Role
from launcher.kubernetes.pod import RUN, Manifest
from launcher.kubernetes.statuses import is_replaced_alone, make_failure_policy, make_pod_failure_policy
from launcher.kubernetes.workload import make_config_map, make_metadata, make_network_policy, make_pod_template
from launcher.kubernetes.yaml_comments import noted

_UNLIMITED = 2_147_483_647
_REPLICA_TYPES = {"chief": "Chief", "worker": "Worker", "ps": "PS", "evaluator": "Evaluator"}
_TRAINER = ("image", "command", "args", "env", "resources")
"""Fields of a container that a TrainJob has in its `trainer`."""


def make_manifests(export: Export) -> list[Manifest]:
    """All objects, in the order in which they have to exist."""
    made = [make_config_map(export)]
    if export.spec.guard != "off":
        made.append(make_network_policy(export))
    match export.kind:
        case "jobset":
            return [*made, _make_job_set(export)]
        case "job":
            return [*made, _make_service(export), _make_job(export)]
        case "tfjob":
            return [*made, _make_tf_job(export)]
        case "trainjob":
            return [*made, _make_runtime(export), _make_train_job(export)]


def _make_job_set(export: Export) -> Manifest:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": make_metadata(export, export.name, queued=True),
        "spec": _make_job_set_spec(export),
    }


def _make_job_set_spec(export: Export) -> Manifest:
    decides = [role.type for role in export.roles if role.type in export.spec.rules.decides]
    success: Manifest = {}
    if len(decides) < len(export.roles):
        why = "strategy: the others never end on their own."
        success = {noted("successPolicy", why): {"operator": "All", "targetReplicatedJobs": decides}}
    return {
        noted("failurePolicy", "restart"): make_failure_policy(export),
        **success,
        "replicatedJobs": [
            {
                noted("name", "nodes: a Job for each type of task."): role.type,
                "replicas": 1,
                "template": {"spec": _make_job_spec(export, role)},
            }
            for role in export.roles
        ],
    }


def _make_job_spec(export: Export, role: Role, *, subdomain: bool = False) -> Manifest:
    count = noted("completions", "nodes.count, or one for each task of the nodes")
    return {
        "completionMode": "Indexed",
        count: role.count,
        "parallelism": role.count,
        **_make_backoff(export, role),
        noted("podReplacementPolicy", "No task runs twice at the same time."): "Failed",
        noted("podFailurePolicy", "What follows from an exit status."): make_pod_failure_policy(export, role),
        "template": make_pod_template(export, role, subdomain=subdomain),
    }


def _make_backoff(export: Export, role: Role) -> Manifest:
    if role.type == "evaluator":
        return {noted("backoffLimit", "An evaluator that fails is replaced, and fails nothing else."): _UNLIMITED}
    if is_replaced_alone(export, role):
        limit = noted("backoffLimitPerIndex", "restart.max_worker_restarts")
        return {limit: export.spec.restart.max_worker_restarts, "maxFailedIndexes": 0}
    return {noted("backoffLimit", "A pod that fails alone cannot rejoin the cluster."): 0}


def _make_service(export: Export) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": make_metadata(export, export.name),
        "spec": {
            noted("clusterIP", "Gives each pod a name, even before it is ready."): "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN: export.name},
        },
    }


def _make_job(export: Export) -> Manifest:
    [role] = export.roles
    count = export.spec.restart.max_restarts
    why = "An Indexed Job cannot restart all pods together"
    if count:
        why += (
            f", so restart.max_restarts={count} is left out: a failure of the program ends the Job. Preempted "
            "pods and those that fail because of them are replaced one by one, without a limit"
        )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": make_metadata(export, export.name, queued=True),
        noted("spec", f"{why}; `--as jobset` restarts them."): _make_job_spec(export, role, subdomain=True),
    }


def _make_tf_job(export: Export) -> Manifest:
    restarts = bool(export.spec.restart.max_restarts)
    policy = noted(
        "restartPolicy",
        "restart.max_restarts, which TFJob knows only as zero or not: it replaces each pod that was preempted, or "
        "failed because another was gone, one by one and without a limit; any other failure ends the TFJob.",
    )
    success = "AllWorkers" if "worker" in export.spec.rules.decides else ""
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": make_metadata(export, export.name, queued=True),
        "spec": {
            "runPolicy": {noted("cleanPodPolicy", "The others end with the first that fails."): "Running"},
            noted("successPolicy", "strategy"): success,
            "tfReplicaSpecs": {
                _REPLICA_TYPES[role.type]: {
                    "replicas": role.count,
                    policy: "ExitCode" if restarts else "Never",
                    "template": _without_restart_policy(make_pod_template(export, role)),
                }
                for role in export.roles
            },
        },
    }


def _without_restart_policy(template: Manifest) -> Manifest:
    """The template; TFJob sets the policy of its pods itself."""
    return {**template, "spec": {name: value for name, value in template["spec"].items() if name != "restartPolicy"}}


def _make_runtime(export: Export) -> Manifest:
    """The template from which Trainer makes the JobSet; the rest is in the TrainJob."""
    [role] = export.roles
    job = _make_job_spec(export, role)
    first, *others = job["template"]["spec"]["containers"]
    rest = {name: value for name, value in first.items() if name not in _TRAINER}
    # Trainer takes the image from here if a TrainJob has none; a container without an image would not be valid.
    first = {**rest, "image": first["image"]}
    template = {**job["template"], "spec": {**job["template"]["spec"], "containers": [first, *others]}}
    node = {
        noted("name", "Trainer's own names: the job and its container are called `node`."): "node",
        "replicas": 1,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {**job, "template": template},
        },
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": make_metadata(export, export.name),
        "spec": {
            noted("mlPolicy", "Trainer sets no TF_CONFIG: it is in the TrainJob."): {"numNodes": role.count},
            "template": {"spec": {**_make_job_set_spec(export), "replicatedJobs": [node]}},
        },
    }


def _make_train_job(export: Export) -> Manifest:
    [role] = export.roles
    [first, *_] = make_pod_template(export, role)["spec"]["containers"]
    trainer = {name: value for name, value in first.items() if name in _TRAINER}
    resources = trainer.pop("resources", None)
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": make_metadata(export, export.name, queued=True),
        "spec": {
            "runtimeRef": {"name": export.name, "kind": "TrainingRuntime"},
            "trainer": {
                noted("numNodes", "nodes.count, or one for each task of the nodes"): role.count,
                **({noted("resourcesPerNode", "nodes: cpus, memory, gpus"): resources} if resources else {}),
                **trainer,
            },
        },
    }

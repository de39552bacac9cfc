"""Runs on the pods of a real Kubernetes cluster: how they start, and what happens when pods disappear."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.harness.hosts.kubernetes import IMAGE, KubernetesCluster, find_cluster
from tests.harness.places import PROGRAMS
from tests.harness.polling import HANG_S
from tests.harness.processes.commands import distlaunch_command, read_events
from tests.harness.processes.jax import LOOK, PYTHON, read_look, skip_without_jax
from tests.harness.witness import assert_none_left, await_none_left, make_mark, marked, wait_until

COVERS = (
    "launcher/program_calls.py",
    "launcher/sources/base.py",
    "launcher/sources/kubernetes.py",
    "launcher/sources/pods.py",
    "launcher/transports/programs.py",
)

SAVES = str(PROGRAMS / "saves.py")
TRAINS = {
    "demo": "{module: worker_entry.demo.train, args: [--epochs, '2']}",
    "fit": f"{{script: {PROGRAMS / 'plain_fit.py'}}}",
}


@pytest.fixture(scope="module")
def cluster() -> KubernetesCluster:
    return find_cluster()


@pytest.fixture(autouse=True)
def _nothing_is_left(cluster: KubernetesCluster) -> Iterator[None]:
    yield
    try:
        cluster.await_empty()
    finally:  # leftovers of a failed test must not disturb the next one
        cluster.kubectl("delete", "jobs", "--selector=app.kubernetes.io/managed-by=distlaunch")


@dataclass
class Run:
    """A run on pods, started by `begin`."""

    cluster: KubernetesCluster
    directory: Path
    process: subprocess.Popen[str]
    mark: dict[str, str]
    said: str = ""
    _reader: threading.Thread = field(default_factory=threading.Thread)

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return loaded

    @property
    def verdict(self) -> dict[str, Any]:
        """The first attempt's verdict."""
        found: dict[str, Any] = self.report["attempts"][0]["verdict"]
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        return read_events(self.directory, kind)

    def log(self, worker: int, attempt: int = 1) -> str:
        path = self.directory / f"attempt-{attempt}" / f"worker-{worker}.log"
        return path.read_text() if path.exists() else ""

    def await_text(self, text: str, attempt: int = 1, workers: tuple[int, ...] = (0, 1)) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None or all(text in self.log(w, attempt) for w in workers), self.said
            return all(text in self.log(worker, attempt) for worker in workers)

        wait_until(is_there, f"logs have {text!r}")

    def await_steps(self) -> None:
        """Waits until both workers have saved something."""
        saved = self.directory.parent / "checkpoints"
        self.await_text("begins at")
        wait_until(lambda: all((saved / f"worker-{n}").exists() for n in (0, 1)), "both have saved")

    def await_end(self, status: int = 0) -> None:
        """Waits for the end, and checks that neither processes nor objects of the cluster are left."""
        assert self.process.wait(HANG_S) == status, self.said
        self._reader.join(10)
        print(self.said)  # shown if something is left
        assert_none_left(self.mark)
        assert self.cluster.pods() == []
        if (self.directory / "report.json").exists() and self.report["attempts"]:
            assert self.report["pods_left"] == 0
            assert self.report["attempts"][-1]["processes_left"] == 0

    def assert_resumed(self) -> None:
        """Checks that the second attempt resumed from the first one's saved state, and that the run succeeded."""
        assert self.report["outcome"] == "succeeded", self.said
        assert len(self.report["attempts"]) == 2
        for worker in (0, 1):
            assert "begins at 0\n" in self.log(worker)
            first = int(self.log(worker, 2).partition("begins at ")[2].split()[0])
            assert first > 0
            assert self.log(worker, 2).endswith(f"ends at {first + 20}\n")


def begin(
    cluster: KubernetesCluster,
    folder: Path,
    program: str,
    *,
    pods: str = "count: 2",
    image: str = IMAGE,
    more: str = "restart: {max_restarts: 2}",
    env: dict[str, str] | None = None,
    pod_env: Mapping[str, str] = MappingProxyType({}),
    shared: Sequence[Path] = (),
    python: str | None = sys.executable,
) -> Run:
    """Starts a run whose pods share a folder for checkpoints, and the folders in `shared`."""
    mark, saved = make_mark(), folder / "checkpoints"
    saved.mkdir()
    saved.chmod(0o777)
    template = cluster.write_template(folder, saved, *shared, env={**mark, **pod_env})
    spec = folder / "spec.yaml"
    pods = pods if python is None else f"{pods}, python: {python}"
    spec.write_text(
        f"name: test\nnodes: {{from: kubernetes, image: '{image}', template: {template}, "
        f"{pods}}}\nprogram: {program}\ncheckpoint_directory: {saved}\n"
        f"{more}\n"
    )
    process = subprocess.Popen(
        distlaunch_command("up", "--run-dir", str(folder / "a run"), str(spec)),
        cwd=folder,
        env={**os.environ, **cluster.env, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = Run(cluster, folder / "a run", process, mark)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            run.said += line

    run._reader = threading.Thread(target=read, daemon=True)
    run._reader.start()
    return run


def saving(steps: int, *arguments: object) -> str:
    return f"{{script: {SAVES}, args: {json.dumps([str(steps), *map(str, arguments)])}}}"


# --- starts ---


@pytest.mark.tensorflow
@pytest.mark.parametrize(("pods", "program"), [pytest.param(2, "fit", marks=pytest.mark.smoke), (4, "demo")])
def test_the_demo_and_an_unmodified_fit_train_on_all_pods(
    cluster: KubernetesCluster, tmp_path: Path, pods: int, program: str
) -> None:
    run = begin(cluster, tmp_path, TRAINS[program], pods=f"count: {pods}")
    run.await_end()
    assert run.report["outcome"] == "succeeded", run.said
    assert f"0 processes left on {pods} nodes, 0 pods left" in run.said
    tasks = run.report["attempts"][0]["tasks"]
    assert len({task["node"] for task in tasks}) == pods
    assert len({task["address"].split(":")[0] for task in tasks}) == pods
    assert {task["unguarded"] for task in tasks} == {None}  # pods have no IPv6 here
    if program == "fit":
        said = {run.log(worker).splitlines()[-1] for worker in range(pods)}
        assert len(said) == 1, said
        assert next(iter(said)).startswith(f"{pods} replicas, loss ")


@pytest.mark.jax
def test_processes_of_jax_train_on_two_pods(cluster: KubernetesCluster, tmp_path: Path) -> None:
    skip_without_jax()
    environment = Path(PYTHON).parent.parent
    more = f"framework: jax\npython: {PYTHON}"
    run = begin(cluster, tmp_path, f"{{script: {LOOK}}}", more=more, python=None, shared=[environment])
    run.await_end()
    assert run.report["outcome"] == "succeeded", run.said
    found = [read_look(run.log(worker)) for worker in range(2)]
    assert [(each["index"], each["ranks"], each["all"]) for each in found] == [(0, [0, 1], 2), (1, [0, 1], 2)]


def test_an_unknown_peer_does_not_reach_a_port_of_a_pod(cluster: KubernetesCluster, tmp_path: Path) -> None:
    run = begin(cluster, tmp_path, saving(100))
    run.await_steps()
    plan = json.loads((run.directory / "plan.json").read_text())
    for task in plan["tasks"]:
        host, port = task["address"], task["port"]
        with (
            contextlib.suppress(ConnectionResetError),
            socket.create_connection((host, port), 5) as stranger,  # this machine is not in the cluster
        ):
            stranger.settimeout(5)
            assert stranger.recv(1) == b""
    run.await_end()
    strangers = [event for event in run.events("connection-rejected") if event["count"]]
    assert {event["task"] for event in strangers} == {"worker:0", "worker:1"}


# --- pods disappear ---


@pytest.mark.smoke
def test_the_tasks_of_a_deleted_pod_can_save_and_the_pod_is_replaced(
    cluster: KubernetesCluster, tmp_path: Path
) -> None:
    run = begin(cluster, tmp_path, saving(300))
    run.await_steps()
    pod = cluster.pods()[0]
    cluster.kubectl("delete", "pod", pod, "--wait=false")
    run.await_end()
    run.assert_resumed()
    assert run.verdict["reference"] == "preempted", run.said
    assert f"pod {pod}" in run.verdict["message"]
    assert all("for the end" in run.log(worker) for worker in (0, 1))
    nodes = [{task["node"] for task in attempt["tasks"]} for attempt in run.report["attempts"]]
    assert len(nodes[0] & nodes[1]) == 1  # the other pod stays


def test_an_evicted_pod_is_replaced(cluster: KubernetesCluster, tmp_path: Path) -> None:
    run = begin(cluster, tmp_path, saving(300))
    run.await_steps()
    pod = cluster.pods()[1]
    eviction = {
        "apiVersion": "policy/v1beta1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": "default"},
    }
    cluster.kubectl(
        "create", "--raw", f"/api/v1/namespaces/default/pods/{pod}/eviction", "-f", "-", stdin=json.dumps(eviction)
    )
    run.await_end()
    run.assert_resumed()
    assert run.verdict["reference"] == "preempted", run.said


def test_a_pod_preempted_by_a_higher_priority_pod_is_reported_and_replaced(
    cluster: KubernetesCluster, tmp_path: Path
) -> None:
    [node] = cluster.show("nodes")
    cores = int(node["status"]["allocatable"]["cpu"])
    run = begin(cluster, tmp_path, saving(300), pods=f"count: 2, cpus: {cores * 400}m")
    run.await_steps()
    meta = {"metadata": {"name": "urgent"}}
    scheduling = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps({**scheduling, **meta}))
    try:
        pod = json.loads(cluster.write_template(tmp_path).read_text()) | {"apiVersion": "v1", "kind": "Pod"} | meta
        pod["spec"] |= {"priorityClassName": "urgent", "terminationGracePeriodSeconds": 1}
        requests = {"resources": {"requests": {"cpu": f"{cores * 400}m"}}}
        pod["spec"]["containers"][0] |= {"image": IMAGE, "command": ["sleep", "600"], **requests}
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(pod))
        try:
            cluster.kubectl("wait", "--for=condition=Ready", f"--timeout={HANG_S:g}s", "pod/urgent")
            wait_until(lambda: "Waiting for 1 of 2 pods" in run.said, "it waits for room")
        finally:
            cluster.kubectl("delete", "pod", "urgent")
    finally:
        cluster.kubectl("delete", "priorityclass", "urgent")
    run.await_end()
    run.assert_resumed()
    assert run.verdict["reference"] == "preempted"
    assert "was preempted by another pod" in run.verdict["message"], run.verdict
    assert "1 Insufficient cpu" in run.said


def test_a_force_deleted_pod_is_replaced_without_waiting_for_the_lease(
    cluster: KubernetesCluster, tmp_path: Path
) -> None:
    more = "restart: {max_restarts: 2}\ntimeouts: {lease_s: 600}"
    run = begin(cluster, tmp_path, saving(300), more=more)
    run.await_steps()
    pod = cluster.pods()[0]
    cluster.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
    run.await_end()  # does not wait for a lease
    run.assert_resumed()
    assert run.verdict["reference"] in ("preempted", "node-lost"), run.said
    assert pod in run.verdict["message"]


def test_a_pod_that_exceeds_its_memory_limit_is_out_of_memory(cluster: KubernetesCluster, tmp_path: Path) -> None:
    text = (
        "import os, time\n"
        "eaten = [b'x' * (1 << 20) for _ in range(900 * (os.environ['DISTLAUNCH_TASK'] == 'worker:1'))]\n"
        "time.sleep(60)"
    )
    words = ["python3", "-c", text]
    run = begin(
        cluster, tmp_path, f"{{command: {json.dumps(words)}}}", pods="count: 2, memory: 300Mi", more="timeouts: {}"
    )
    run.await_end(status=1)
    assert run.verdict["reference"] == "out-of-memory", run.said
    assert "worker:1" in run.verdict["message"]


def test_a_run_resumes_after_its_kubernetes_node_was_lost_and_returned(
    cluster: KubernetesCluster, tmp_path: Path
) -> None:
    run = begin(cluster, tmp_path, saving(900), more="restart: {max_restarts: 2}\ntimeouts: {lease_s: 30}")
    run.await_steps()
    kubelet = cluster.stop("kubelet")
    try:
        wait_until(lambda: "node-lost" in run.said, "the node is lost")
    finally:
        cluster.start("kubelet", kubelet)
    cluster.await_node()
    run.await_end()
    run.assert_resumed()
    assert run.verdict["reference"] == "node-lost", run.said
    assert "not ready" in json.dumps(run.verdict) or "NodeNotReady" in json.dumps(run.verdict)


def test_a_run_continues_while_the_api_server_restarts(cluster: KubernetesCluster, tmp_path: Path) -> None:
    run = begin(cluster, tmp_path, saving(250))
    run.await_steps()
    cluster.restart("kube-apiserver")
    cluster.await_api()
    run.await_end()
    assert run.report["outcome"] == "succeeded", run.said
    assert len(run.report["attempts"]) == 1
    assert all(run.log(worker).endswith("ends at 250\n") for worker in (0, 1))


# --- a controller that is gone ---


def test_resume_takes_over_the_pods_of_a_killed_controller_and_removes_them(
    cluster: KubernetesCluster, tmp_path: Path
) -> None:
    run = begin(cluster, tmp_path, saving(200))
    run.await_steps()
    run.process.kill()
    run.process.wait()
    pods = cluster.pods()
    done = call(cluster, "resume", str(run.directory))
    assert done.returncode == 0, done.stderr
    assert len(run.report["attempts"]) == 1
    assert run.log(0).endswith("ends at 200\n")
    assert {task["node"] for task in run.report["attempts"][0]["tasks"]} == {*pods}
    assert run.report["pods_left"] == 0
    assert_none_left(run.mark)


def test_clean_removes_the_pods_of_a_run_without_a_controller(cluster: KubernetesCluster, tmp_path: Path) -> None:
    run = begin(cluster, tmp_path, saving(600))
    run.await_steps()
    run.process.kill()
    run.process.wait()
    done = call(cluster, "clean", str(run.directory))
    assert done.returncode == 0, done.stderr
    assert cluster.show("pods,jobs", "--selector=app.kubernetes.io/managed-by=distlaunch") == []
    assert_none_left(run.mark)


@pytest.mark.smoke
def test_check_creates_pods_and_removes_them(cluster: KubernetesCluster, tmp_path: Path) -> None:
    template = cluster.write_template(tmp_path)
    spec = tmp_path / "spec.yaml"
    pods = f"image: '{IMAGE}', template: {template}, python: {distlaunch_command()[0]}, count: 2"
    spec.write_text(f"nodes: {{from: kubernetes, {pods}}}\nprogram: {{command: ['true']}}\nworking_directory: /tmp\n")
    done = call(cluster, "check", "--json", str(spec))
    assert done.returncode == 0, done.stderr + done.stdout
    assert cluster.show("pods,jobs", "--selector=app.kubernetes.io/managed-by=distlaunch") == []


def test_tasks_in_pods_have_no_privileges_and_a_writable_home(cluster: KubernetesCluster, tmp_path: Path) -> None:
    template = cluster.write_template(tmp_path, as_root=False)
    pods = f"image: '{IMAGE}', template: {template}, python: {distlaunch_command()[0]}"
    show = "id -u; touch /made 2>/dev/null && echo root; touch ~/made && echo home; "
    show += "grep -E 'NoNewPrivs|CapEff' /proc/self/status"
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"nodes: {{from: kubernetes, {pods}}}\nsync: {{path: ., to: ~/project}}\n"
        f"program: {{command: [sh, -c, {json.dumps(show)}]}}\n"
    )
    done = call(cluster, "up", "--run-dir", str(tmp_path / "run"), str(spec))
    assert done.returncode == 0, done.stderr + done.stdout
    lines = (tmp_path / "run" / "attempt-1" / "worker-0.log").read_text().split()
    assert lines == ["1000", "home", "CapEff:", "0000000000000000", "NoNewPrivs:", "1"]


def call(cluster: KubernetesCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`distlaunch ARGUMENTS`."""
    return subprocess.run(
        distlaunch_command(*arguments),
        env={**os.environ, **cluster.env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


# --- pods that do not start ---


def test_a_missing_image_ends_the_run_with_the_reason(cluster: KubernetesCluster, tmp_path: Path) -> None:
    run = begin(cluster, tmp_path, saving(1), image="no-such-image:local")
    run.await_end(status=3)
    assert "ErrImageNeverPull" in run.said
    assert "worker:0, worker:1" in run.said
    assert "[kubernetes]" in run.said


def test_unschedulable_pods_are_waited_for_and_named_with_the_reason(
    cluster: KubernetesCluster, tmp_path: Path
) -> None:
    run = begin(cluster, tmp_path, saving(1), pods="count: 2, gpus: 1, wait_s: 8")
    run.await_end(status=3)
    assert "Waiting for 2 of 2 pods" in run.said
    assert "worker:0, worker:1: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu." in run.said
    assert "0 of 2 pods run within 8 s" in run.said


def test_an_exceeded_pod_quota_is_reported_as_the_reason(cluster: KubernetesCluster, tmp_path: Path) -> None:
    cluster.kubectl("create", "namespace", "small")
    try:
        cluster.kubectl("create", "quota", "one", "--hard=pods=1", "--namespace=small")
        run = begin(cluster, tmp_path, saving(1), pods="count: 2, namespace: small, wait_s: 10")
        run.await_end(status=3)
        assert "1 of 2 pods run within 10 s" in run.said
        assert "exceeded quota: one" in run.said
        assert "worker:1: Failed" in run.said
    finally:
        cluster.kubectl("delete", "namespace", "small")


def test_a_signal_ends_the_wait_for_pods(cluster: KubernetesCluster, tmp_path: Path) -> None:
    run = begin(cluster, tmp_path, saving(1), pods="count: 2, gpus: 1")
    wait_until(lambda: "Insufficient nvidia.com/gpu" in run.said, "it waits")
    run.process.send_signal(signal.SIGINT)
    run.await_end(status=130)


def test_pods_that_are_deleted_during_the_start_of_python_end_immediately(
    cluster: KubernetesCluster, tmp_path: Path
) -> None:
    """The kernel drops a signal without a handler for process 1; the pods would stay for their whole grace period."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text("import time; time.sleep(6)\n")
    more = "timeouts: {stop_grace_s: 600}"
    run = begin(cluster, tmp_path, saving(1), more=more, pod_env={"PYTHONPATH": str(slow)}, shared=[slow])
    wait_until(lambda: len(cluster.pods("Running")) == 2, "the containers run")
    run.process.send_signal(signal.SIGINT)
    run.await_end(status=130)


def test_missing_kubernetes_permissions_are_reported(cluster: KubernetesCluster, tmp_path: Path) -> None:
    run = begin(cluster, tmp_path, saving(1), env={"KUBECONFIG": str(_restricted(cluster, tmp_path))})
    run.await_end(status=3)
    assert "forbidden" in run.said.lower(), run.said
    assert "[kubernetes]" in run.said


def _restricted(cluster: KubernetesCluster, folder: Path) -> Path:
    """A kubeconfig for a user without permissions."""
    config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
    config["users"][0]["user"]["as"] = "nobody"
    path = folder / "restricted.json"
    path.write_text(json.dumps(config))
    path.chmod(0o600)
    return path


# --- a controller in a pod ---


def write_config(cluster: KubernetesCluster, folder: Path) -> Path:
    """A kubeconfig for clients in pods: they reach the API server without a proxy, with the token of their account."""
    config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
    token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    config["users"][0]["user"] = {"tokenFile": token}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.tensorflow
@pytest.mark.parametrize("program", ["demo", "fit"])
def test_a_controller_in_a_pod_trains_the_demo_and_an_unmodified_fit(
    cluster: KubernetesCluster, tmp_path: Path, program: str
) -> None:
    env = {"KUBECONFIG": str(write_config(cluster, tmp_path))}
    template = cluster.write_template(tmp_path, tmp_path, env=env)
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"nodes: {{from: kubernetes, image: '{IMAGE}', template: {template}, count: 2, "
        f"python: {distlaunch_command()[0]}}}\nprogram: {TRAINS[program]}\n"
        f"working_directory: {tmp_path}\ncheckpoint_directory: {tmp_path}\n"
    )
    done = call(cluster, "submit", "--json", str(spec))
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)["job"]
    try:
        cluster.kubectl("wait", "--for=condition=Complete", f"--timeout={HANG_S:g}s", f"job/{job}")
    finally:
        said = cluster.kubectl("logs", f"job/{job}", "--tail=-1")
        cluster.kubectl("delete", "job", job)
    assert said.count({"demo": " of 2: validation accuracy ", "fit": "2 replicas, loss "}[program]) == 2, said
    assert "0 processes left on 2 nodes, 0 pods left" in said


def test_a_controller_pod_has_minimal_permissions_and_its_pods_end_with_its_job(
    cluster: KubernetesCluster, tmp_path: Path
) -> None:
    saved = tmp_path / "checkpoints"
    saved.mkdir()
    mark = make_mark()
    env = {**mark, "KUBECONFIG": str(write_config(cluster, tmp_path))}
    template = cluster.write_template(tmp_path, tmp_path, env=env)
    project = tmp_path / "project"
    project.mkdir()
    show = "import os\nprint(os.environ['API_TOKEN'][::-1], os.environ['PRICE'], flush=True)\n"
    (project / "saves.py").write_text(f"{show}{Path(SAVES).read_text()}")
    (project / "saves.py").chmod(0o755)
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"name: test\nnodes: {{from: kubernetes, image: '{IMAGE}', template: {template}, count: 2, "
        f"python: {distlaunch_command()[0]}}}\nsync: {{path: project, to: /tmp/project}}\n"
        f"program: {{script: saves.py, args: ['3000']}}\ncheckpoint_directory: {saved}\n"
        "env: {PRICE: '$5 ${HOME}'}\nenv_from: [API_TOKEN]\n"
        "timeouts: {stop_grace_s: 5}\n"
    )
    done = subprocess.run(
        distlaunch_command("submit", "--json", str(spec)),
        cwd=tmp_path,
        env={**os.environ, **cluster.env, "API_TOKEN": "s3cret"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)["job"]
    selector = f"--selector=distlaunch/run={job}"

    def has_said(text: str) -> bool:
        return text in cluster.kubectl("logs", selector, "--tail=-1", check=False)

    wait_until(lambda: has_said("worker:1 │ begins at 0"), "it trains")
    assert has_said("worker:0 │ terc3s $5 ${HOME}\n")
    wait_until(lambda: (saved / "worker-1").exists(), "it saves")
    assert marked(mark) != []
    assert "s3cret" not in json.dumps([*cluster.show("jobs,pods,configmaps")])
    account = f"--as=system:serviceaccount:default:{job}"

    def may(words: str) -> bool:
        return cluster.kubectl("auth", "can-i", *words.split(), account, check=False).strip() == "yes"

    assert all(map(may, ("create jobs.batch", "delete pods", "create pods --subresource=exec")))
    denied = ("create pods", "get secrets", "get configmaps", "list nodes", "create jobs.batch -n kube-system")
    assert not any(map(may, denied))
    cluster.kubectl("delete", "job", job, "--wait=false")
    await_none_left(mark)
    assert int((saved / "worker-0").read_text()) > 0

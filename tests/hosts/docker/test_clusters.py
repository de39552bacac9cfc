"""Clusters of real containers, started from a container and from the host, and all failures of a container."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.spec.loading import load_spec
from tests.harness.hosts.containers import (
    COMPOSE_FILE,
    Cluster,
    build_image,
    compose_versions,
    image_config,
    layers_of,
    output_of,
    running_cluster,
    skip_without_docker,
)
from tests.harness.places import PROGRAMS, ROOT
from tests.harness.polling import eventually
from tests.harness.processes.commands import distlaunch_command
from tests.harness.rules.second_chance import NoSecondChanceError

COVERS = ("docker", "cluster_specs", "launcher/plan", "launcher/transports")

LONG = "import time\nprint('works', flush=True)\ntime.sleep(600)\n"
HUNGRY = """
import os, time
print("works", flush=True)
if os.environ["DISTLAUNCH_TASK"] == "worker:1":
    held = [b"x" * (16 << 20) for _ in range(200)]
time.sleep(600)
"""
CHATTY = "while True:\n    print('x' * 1000)\n"
ALL_REDUCE = """
import os, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)
print("sum", float(total), os.getcwd(), os.path.isdir("/shared/checkpoints"), flush=True)
"""
TRAINING = "program: {script: resume_keras.py, args: [8, own, 1]}\ncheckpoint_directory: /checkpoints\n"
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime")
CLOCK_S = 90
OVERRIDE = f"""
services:
  worker-3:
    tmpfs: ["/home/trainer/.local:size=2m,uid=1000,gid=1000"]
  worker-4:
    volumes: ["{FAKETIME}:/faketime:ro"]
    command:
      - /usr/sbin/sshd
      - -D
      - -e
      - -f
      - /etc/distlaunch/sshd_config
      - -o
      - "SetEnv=PATH=/opt/venv/bin:/usr/bin:/bin LD_PRELOAD=/faketime/libfaketime.so.1 FAKETIME=+{CLOCK_S}s"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes; the third has a small disk, the fourth a wrong clock. Tests undo their changes to them."""
    skip_without_docker()
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "override.yaml").write_text(OVERRIDE)
    project = folder / "project"
    project.mkdir()
    for name, text in {"long.py": LONG, "hungry.py": HUNGRY, "chatty.py": CHATTY}.items():
        (project / name).write_text(text)
    shutil.copy(PROGRAMS / "resume_keras.py", project)
    with running_cluster(project, folder / "override.yaml", env={"NODE_MEMORY": "1g"}) as made:
        made.up("worker-1", "worker-2", "worker-3", "worker-4")
        yield made


def assert_empty(cluster: Cluster, *services: str) -> None:
    """Fails without a second chance if something runs in these containers."""
    left = [process for service in services for process in cluster.processes(service)]
    if left:
        raise NoSecondChanceError(f"left in {', '.join(services)}: {left}")


# --- as in the README ---


@pytest.mark.tensorflow
@pytest.mark.parametrize("version", ["v1", pytest.param("v2", marks=pytest.mark.smoke)])
def test_the_demo_runs_from_the_controller_container_and_leaves_no_process(version: str, tmp_path: Path) -> None:
    skip_without_docker()
    if version not in compose_versions():
        pytest.skip(f"Compose {version} is not installed")
    project = tmp_path / "project"
    shutil.copytree(ROOT / "cluster_specs", project / "cluster_specs")
    with running_cluster(project, version=version) as made:
        said = made.compose(
            "run", "--rm", "-T", "controller", "up", "cluster_specs/compose.yaml", "--", "--epochs", "3"
        )
        accuracies = re.findall(r"worker:\d of 2: validation accuracy (0\.\d+)", said)
        assert len(accuracies) == 2
        assert accuracies[0] == accuracies[1] > "0.9"
        report = made.compose("run", "--rm", "-T", "controller", "check", "--json", "cluster_specs/compose.yaml")
        assert '"ok": true' in report
        assert '"cores": 1' in report  # the limit of `cpus:`, not the cores of the machine
        assert_empty(made, "worker-1", "worker-2")


@pytest.mark.tensorflow
def test_the_demo_runs_on_containers_from_the_host(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.start(tmp_path, "program: {module: worker_entry.demo.train, args: [--epochs, 3]}\n")
    assert run.end() == 0, run.said
    assert b"worker:0 of 2: validation accuracy 0." in run.log(0)
    assert "0 processes left on 2 nodes" in run.said
    assert_empty(cluster, "worker-1", "worker-2")


@pytest.mark.smoke
def test_docker_exec_reaches_containers_without_sshd(cluster: Cluster, tmp_path: Path) -> None:
    (cluster.project / "train.py").write_text(ALL_REDUCE)
    names = [
        output_of("docker", "inspect", "-f", "{{.Name}}", cluster.container(f"worker-{number}")).strip().lstrip("/")
        for number in (1, 2)
    ]
    nodes = "".join(f"  - {{host: {name}, address: worker-{number}}}\n" for number, name in enumerate(names, 1))
    spec = cluster.project / "exec.yaml"
    spec.write_text(f"connection: docker\nnodes:\n{nodes}working_directory: /project\nprogram: {{script: train.py}}\n")
    command = distlaunch_command("up", "--run-dir", str(tmp_path / "run"), str(spec))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0 /project") == 2
    assert "0 processes left on 2 nodes" in done.stderr
    assert_empty(cluster, "worker-1", "worker-2")


def test_the_example_specs_for_the_host_match_the_compose_file() -> None:
    for number, node in enumerate(load_spec(ROOT / "cluster_specs" / "compose_exec.yaml").nodes, 1):
        assert (node.host, node.address) == (f"docker-worker-{number}-1", f"worker-{number}")
    spec = load_spec(ROOT / "cluster_specs" / "compose_from_host.yaml")
    for number, node in enumerate(spec.nodes, 1):
        assert node.host == node.address == f"worker-{number}"
        assert f'"127.0.0.1:${{PORT_{number}:-{node.ssh.port}}}:10022"' in COMPOSE_FILE.read_text()
    assert (spec.ssh.identity_file, spec.ssh.known_hosts_file) == ("docker/keys/id_ed25519", "docker/keys/known_hosts")


# --- containers that fail ---


def test_training_continues_after_a_container_pause_shorter_than_the_lease(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.start(tmp_path, f"{TRAINING}timeouts: {{lease_s: 30}}\n")
    run.wait_for(b"epoch 3 begins", 1)
    output_of("docker", "pause", cluster.container("worker-2"))
    time.sleep(12)
    output_of("docker", "unpause", cluster.container("worker-2"))
    assert run.end() == 0, run.said
    assert "node worker-2: no data for 10 s; its tasks continue" in run.said
    assert "node worker-2: reconnected after 1" in run.said
    assert run.log(0).count(b"begins") == run.log(1).count(b"begins") == 8


def test_a_container_paused_beyond_its_lease_is_lost_and_later_stops_its_tasks(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = cluster.start(tmp_path, "program: {script: long.py}\ntimeouts: {lease_s: 4}\n")
    run.wait_for(b"works")
    output_of("docker", "pause", cluster.container("worker-2"))
    try:
        assert run.end() == 3, run.said
        assert "Error: node worker-2 was lost: no data for 2 s" in run.said
        assert_empty(cluster, "worker-1")
    finally:
        output_of("docker", "unpause", cluster.container("worker-2"))
    eventually(lambda: assert_empty(cluster, "worker-2"))


def test_training_continues_after_a_container_network_loss_shorter_than_the_lease(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = cluster.start(tmp_path, f"{TRAINING}timeouts: {{lease_s: 40}}\n")
    run.wait_for(b"epoch 3 begins", 1)
    with cluster.cable_pulled("worker-2"):
        run.wait_until_said("node worker-2: no data for 10 s")
        time.sleep(2)
    assert run.end() == 0, run.said
    assert "node worker-2: reconnected after 1" in run.said
    assert run.log(0).count(b"begins") == run.log(1).count(b"begins") == 8


def test_a_container_without_network_beyond_its_lease_is_lost_and_stops_its_tasks(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = cluster.start(tmp_path, "program: {script: long.py}\ntimeouts: {lease_s: 4}\n")
    run.wait_for(b"works")
    with cluster.cable_pulled("worker-2"):
        assert run.end() == 3, run.said
        assert "Error: node worker-2 was lost: no data for 2 s" in run.said
        eventually(lambda: assert_empty(cluster, "worker-1", "worker-2"))


def test_exceeding_the_memory_limit_of_a_container_is_reported_as_out_of_memory(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = cluster.start(tmp_path, "program: {script: hungry.py}\n")
    assert run.end() == 1, run.said
    assert "Error: worker:1 on worker-2 ran out of memory: it was killed by SIGKILL" in run.said
    assert run.report["attempts"][0]["verdict"]["reference"] == "out-of-memory"
    assert_empty(cluster, "worker-1", "worker-2")


def test_a_full_disk_of_a_container_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.start(tmp_path, "program: {script: chatty.py}\n", workers=(1, 3))
    assert run.end() == 3, run.said
    assert run.report["attempts"][0]["verdict"]["reference"] == "disk-full"
    assert "worker-3" in run.said
    assert_empty(cluster, "worker-1", "worker-3")


def test_a_wrong_container_clock_is_warned_about_and_its_times_are_corrected(cluster: Cluster, tmp_path: Path) -> None:
    if not (FAKETIME / "libfaketime.so.1").exists():
        pytest.skip("libfaketime is not installed")
    before = time.time()
    # The first exit stops the other tasks; the sleep lets all of them start before that.
    run = cluster.start(tmp_path, "program: {command: [sh, -c, 'sleep 1; exit 1']}\n", workers=(1, 4))
    assert run.end() == 1, run.said
    told = re.search(r"the clock of worker-4 is (\d+\.\d) s ahead of ours", run.said)
    assert told is not None, run.said
    assert float(told[1]) == pytest.approx(CLOCK_S, abs=2)
    for task in run.report["attempts"][0]["tasks"]:
        assert before < task["started"] <= task["ended"] < time.time()


@pytest.mark.smoke
def test_a_killed_container_is_a_lost_node(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.start(tmp_path, "program: {script: long.py}\ntimeouts: {lease_s: 5}\n")
    run.wait_for(b"works")
    output_of("docker", "kill", cluster.container("worker-2"))
    assert run.end() == 3, run.said
    assert "Error: node worker-2 was lost: " in run.said
    assert_empty(cluster, "worker-1")
    cluster.up("worker-2")


@pytest.mark.tensorflow
def test_training_resumes_in_a_fresh_container_from_its_last_epoch(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.start(
        tmp_path,
        "program: {script: resume_keras.py, args: [8, shared, 1]}\ncheckpoint_directory: /checkpoints\n"
        "timeouts: {lease_s: 5}\nrestart: {max_restarts: 1}\n",
    )
    run.wait_for(b"epoch 4 begins")
    old = cluster.container("worker-2")
    output_of("docker", "rm", "-f", old)
    run.wait_until_said("waiting up to 300 s for worker-2 to come back")
    cluster.up("worker-2")
    assert cluster.container("worker-2") != old
    assert run.end() == 0, run.said
    assert "worker-2: back after " in run.said
    assert b"epoch 3 begins" not in run.log(1, attempt=2)
    assert run.log(0, attempt=2).count(b"begins") == run.log(1, attempt=2).count(b"begins") >= 4
    assert_empty(cluster, "worker-1", "worker-2")


# --- a spec for machines, in containers ---


@pytest.mark.tensorflow
def test_a_spec_for_real_machines_is_rehearsed_on_three_containers(tmp_path: Path) -> None:
    skip_without_docker()
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(ALL_REDUCE)
    (project / "spec.yaml").write_text(
        "name: real\nnodes:\n  - {host: gpu-a, address: 10.0.0.11, gpus: [0, 1], python: /opt/python}\n"
        "  - {host: me@10.0.0.12, ssh: {port: 2200, identity_file: ~/.ssh/cluster}}\n"
        "program: {script: train.py}\ncheckpoint_directory: /shared/checkpoints\n"
    )
    command = distlaunch_command("compose", "spec.yaml", "--nodes", "3")
    file = project / "compose.yaml"
    file.write_text(output_of(*command, cwd=project, env={"PYTHONPATH": str(ROOT)}))
    with running_cluster(project, file=file, env={"NODE_CPUS": "0.5"}) as made:
        said = made.compose("run", "--rm", "-T", "controller")
        assert said.count("sum 3.0 /project True") == 3
        assert_empty(made, "gpu-a", "node-2", "node-3")


def test_every_compose_version_accepts_every_generated_compose_file(tmp_path: Path) -> None:
    skip_without_docker()
    files = [[COMPOSE_FILE], [COMPOSE_FILE, ROOT / "docker" / "compose.gpus.yaml"]]
    for spec in (ROOT / "cluster_specs").glob("*.yaml"):
        file = tmp_path / spec.name
        alone = spec.stem in ("mirrored", "one_device", "central_storage", "tpu")  # one process needs one node
        words = ["compose", f"cluster_specs/{spec.name}", "-n", "1" if alone else "10"]
        file.write_text(output_of(*distlaunch_command(*words)))
        files.append([file])
    for version in compose_versions():
        for chosen in files:
            Cluster("anything", chosen, tmp_path, {}, version).compose("config", "--quiet")


# --- the image ---


def test_no_layer_of_the_docker_image_contains_a_secret() -> None:
    skip_without_docker()
    image = build_image()
    count = 0
    for name, content in layers_of(image):
        count += 1
        assert not re.search(r"ssh_host_.*_key|(^|/)(id_(rsa|ed25519|ecdsa)|authorized_keys)$|^keys/.", name), name
        assert not re.match(rb"-----BEGIN [A-Z ]*PRIVATE KEY", content), name
    assert count > 1000  # the image does have files
    assert not re.search(r"(?i)password=|token=|secret=", image_config(image))
    asked = ["docker", "run", "--rm", "--network", "none", image, "id", "-u"]
    assert subprocess.run(asked, capture_output=True, check=True).stdout == b"1000\n"

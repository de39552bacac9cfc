"""Runs in the jobs of a real Slurm cluster: how they start, and what happens when Slurm takes nodes away."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from launcher.transports.base import LinkError
from launcher.transports.connector import Opening
from launcher.transports.gathering import Gathering
from tests.harness.hosts.slurm import KILL_WAIT_S, SlurmCluster, running_slurm
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import distlaunch_command
from tests.harness.processes.jax import LOOK, PYTHON, read_look, skip_without_jax
from tests.harness.witness import await_none_left, make_mark, wait_until

COVERS = (
    "launcher/slurm",
    "launcher/program_calls.py",
    "launcher/sources/base.py",
    "launcher/rundir/queued.py",
    "launcher/sources/slurm.py",
    "launcher/transports/gathering.py",
    "launcher/transports/slurm.py",
)

SAVES = str(PROGRAMS / "saves.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _nothing_is_left(cluster: SlurmCluster) -> Iterator[None]:
    yield
    cluster.run("scancel", "--user=root", check=False)
    wait_until(lambda: cluster.run("squeue", "-h", check=False) == "", "no job is left")
    assert cluster.steps() == []


@dataclass
class Submitted:
    """A job that `distlaunch submit` has queued."""

    cluster: SlurmCluster
    job: str
    directory: Path
    mark: dict[str, str]

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return loaded

    @property
    def said(self) -> str:
        return "".join(path.read_text() for path in self.directory.glob("slurm-*.log"))

    def log(self, worker: int, attempt: int) -> str:
        path = self.directory / f"attempt-{attempt}" / f"worker-{worker}.log"
        return path.read_text() if path.exists() else ""

    def await_text(self, text: str, attempt: int = 1, workers: tuple[int, ...] = (0, 1)) -> None:
        wait_until(lambda: all(text in self.log(worker, attempt) for worker in workers), f"logs have {text!r}")

    def await_steps(self, attempt: int = 1) -> None:
        """Waits until both workers have saved something."""
        wait_until(
            lambda: all((self.directory / "checkpoints" / f"worker-{worker}").exists() for worker in (0, 1)),
            "both have saved",
        )
        self.await_text("begins at", attempt)

    def await_report(self, attempts: int) -> dict[str, Any]:
        """Waits for a report with at least this number of attempts."""

        def has_ended() -> bool:
            path = self.directory / "report.json"
            return path.exists() and len(json.loads(path.read_text())["attempts"]) >= attempts

        wait_until(has_ended, f"{attempts} attempts are reported")
        return self.report

    def begin_again(self) -> None:
        """Starts a requeued job after two seconds, instead of Slurm's two minutes.

        Not earlier: Slurm's credentials are stamped in whole seconds, and those of the job's end would block the start.
        """
        wait_until(lambda: self.cluster.state(self.job) == "PENDING", "the job is queued again")
        self.cluster.run("scontrol", "update", f"JobId={self.job}", "StartTime=now+2seconds")

    def await_end(self) -> None:
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY")
        wait_until(lambda: self.cluster.state(self.job) in ended, "the job has ended")
        await_none_left(self.mark)


def call(
    cluster: SlurmCluster, *arguments: str, mark: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`distlaunch ARGUMENTS` on a machine of the cluster that is outside of any job."""
    return subprocess.run(
        distlaunch_command(*arguments),
        cwd=cluster.folder,
        env={**os.environ, **cluster.env, **(mark or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def submit(
    cluster: SlurmCluster,
    folder: Path,
    program: str,
    slurm: str = "nodes: 2",
    more: str = "restart: {max_restarts: 2}",
    env: Mapping[str, str] = MappingProxyType({}),
) -> Submitted:
    mark = {**make_mark(), **env}
    spec = folder / "spec.yaml"
    spec.write_text(f"name: test\nnodes: slurm\nslurm: {{{slurm}}}\nprogram: {program}\n{more}\n")
    done = call(cluster, "submit", "--json", "--run-dir", str(folder / "a run"), str(spec), mark=mark)
    assert done.returncode == 0, done.stderr
    submitted = json.loads(done.stdout)
    return Submitted(cluster, submitted["job"], Path(submitted["directory"]), mark)


def saving(steps: int, *arguments: object) -> str:
    return f"{{script: {SAVES}, args: {json.dumps([str(steps), *map(str, arguments)])}}}"


def preempt(job: Submitted) -> str:
    """Queues an urgent job that needs the nodes of this one; returns its id."""
    nodes = job.cluster.field(job.job, "NodeList")
    words = ("sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-w", nodes, "-o", "/dev/null")
    return job.cluster.run(*words, "--wrap", "sleep 1").strip()


# --- starts ---


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("by", "nodes", "program"),
    [
        pytest.param("salloc", 2, "demo", marks=pytest.mark.smoke),
        ("sbatch", 2, "fit"),
        ("submit", 2, "fit"),
    ],
)
def test_the_demo_and_an_unmodified_fit_train_on_all_nodes_of_a_job(
    cluster: SlurmCluster, tmp_path: Path, by: str, nodes: int, program: str
) -> None:
    directory = tmp_path / "run"
    demo = ("-m", "worker_entry.demo.train", "--epochs", "3")
    words = demo if program == "demo" else [str(PROGRAMS / "plain_fit.py")]
    if by == "submit":
        job = submit(cluster, tmp_path, f"{{script: {words[0]}}}", f"nodes: {nodes}")
        directory = job.directory
        job.await_report(1)
        job.await_end()
    else:
        up = distlaunch_command("up", "--run-dir", str(directory), "--slurm", *words)
        if by == "salloc":
            cluster.run("salloc", f"-N{nodes}", *up, timeout=150)
        else:
            script = f"#!/bin/sh\n#SBATCH -N{nodes}\n#SBATCH -o {tmp_path}/out\nexec {' '.join(up)}\n"
            (tmp_path / "job.sh").write_text(script)
            cluster.run("sbatch", "-W", str(tmp_path / "job.sh"), timeout=150, check=False)
    report = json.loads((directory / "report.json").read_text())
    assert report["outcome"] == "succeeded", report["verdict"]
    assert report["attempts"][-1]["processes_left"] == 0
    if program == "fit":
        said = {(directory / "attempt-1" / f"worker-{n}.log").read_text().splitlines()[-1] for n in range(nodes)}
        assert len(said) == 1, said
        assert next(iter(said)).startswith(f"{nodes} replicas, loss ")
    tasks = report["attempts"][-1]["tasks"]
    assert [task["node"] for task in tasks] == cluster.nodes[:nodes]
    assert {task["progress"]["step"] for task in tasks if task["progress"]} != {0}


def test_two_slurm_jobs_on_the_same_nodes_do_not_disturb_each_other(cluster: SlurmCluster, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    meet = f"{{script: {PROGRAMS / 'meet.py'}, args: [%s, '5']}}"
    jobs = [submit(cluster, tmp_path / name, meet % name, "nodes: 4") for name in ("a", "b")]
    for job in jobs:
        job.await_report(1)
        job.await_end()
    assert [job.report["outcome"] for job in jobs] == ["succeeded"] * 2
    nodes = [{task["node"] for task in job.report["attempts"][0]["tasks"]} for job in jobs]
    assert nodes[0] == nodes[1] == {*cluster.nodes[:4]}
    addresses = [task["address"] for job in jobs for task in job.report["attempts"][0]["tasks"]]
    assert len({*addresses}) == 8


@pytest.mark.jax
def test_a_bare_initialize_connects_jax_on_all_nodes_of_a_slurm_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The tasks are children of an agent in a step: JAX would take the step's variables for its own."""
    skip_without_jax()
    more = f"framework: jax\npython: {PYTHON}"
    job = submit(cluster, tmp_path, f"{{script: {LOOK}}}", "nodes: 2, tasks_per_node: 2", more)
    job.await_report(1)
    job.await_end()
    assert job.report["outcome"] == "succeeded", job.said
    found = [read_look(job.log(index, 1)) for index in range(4)]
    assert [(each["index"], each["local"], each["all"]) for each in found] == [(index, 1, 4) for index in range(4)]


@pytest.mark.smoke
def test_tasks_per_node_and_cores_come_from_the_slurm_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    spec = "--slurm", "--run-dir", str(tmp_path / "run"), "--", "sh", "-c", "echo $SLURM_JOB_ID"
    cluster.run("salloc", "-N2", "--ntasks-per-node=3", "--cpus-per-task=1", *distlaunch_command("up", *spec))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [task["node"] for task in report["attempts"][0]["tasks"]] == ["node1"] * 3 + ["node2"] * 3
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    cores = {event["node"]: event["ready"]["cores"] for event in events if event["event"] == "node-met"}
    assert cores == {"node1": min(3, os.cpu_count() or 1), "node2": min(3, os.cpu_count() or 1)}


ONE_STEP = {"DISTLAUNCH_SLURM_STEPS": "1"}
"""Lets the agents of two nodes call back, as the agents of more than 64 nodes do."""


def test_agents_of_a_shared_step_call_back_and_survive_its_srun(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, saving(100), env=ONE_STEP)
    job.await_steps()
    [step] = [line.split()[0] for line in cluster.run("squeue", "-h", "-s", "-o", "%i %N").splitlines() if ".0" in line]
    assert "node[1-2]" in cluster.run("squeue", "-h", "-s", "-o", "%i %N")
    clients = [each for each in psutil.process_iter(["name", "cmdline"]) if each.info["name"] == "srun"]
    own = [each for each in clients if f"--jobid={job.job}" in (each.info["cmdline"] or ())]  # None: a zombie
    assert len(own) == 2, step  # both are killed: if only the first dies, the second cancels the step
    for process in own:
        process.suspend()
    for process in own:
        process.kill()
    job.await_text("ends at")
    job.await_end()
    assert job.report["outcome"] == "succeeded"
    assert len(job.report["attempts"]) == 1
    assert "reconnecting" not in job.said


def test_an_agent_of_a_shared_step_is_reached_again_after_its_connection_breaks(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, saving(300), env=ONE_STEP)
    job.await_steps()
    [connection] = [
        process for process in cluster.steps("node2") if process.name().startswith("python") and is_agent(process)
    ]
    connection.suspend()
    wait_until(lambda: "reconnecting" in job.said, "the connection counts as broken")
    connection.resume()
    wait_until(lambda: "nothing was lost" in job.said, "it is replaced")
    job.await_text("ends at")
    job.await_end()
    assert job.report["outcome"] == "succeeded"
    assert job.log(1, 1).endswith("ends at 300\n")


def is_agent(process: psutil.Process) -> bool:
    """Whether the process has a TCP connection and is not a task."""
    tasks = any("saves.py" in word for word in process.cmdline())
    return not tasks and any(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("tcp"))


def test_the_callback_port_is_closed_when_all_agents_have_called() -> None:
    env = {**os.environ, "SLURMD_NODENAME": "a", "SLURM_SRUN_COMM_HOST": "127.0.0.1"}
    gathering = Gathering(["sh", "-c", 'exec "$@"', "sh"], env, ["a"], lambda _: True)
    stream = gathering.take("a", sys.executable, Opening(within_s=20))
    try:
        server = gathering._server
        assert server is not None
        wait_until(lambda: server._listener.fileno() == -1, "it is closed")
    finally:
        stream.abandon()


def test_a_caller_without_the_secret_is_not_accepted_as_an_agent(tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 20", "sh"]
    gathering = Gathering(command, {**os.environ}, ["a"], lambda _: True)
    found: list[LinkError] = []

    def take() -> None:
        try:
            gathering.take("a", sys.executable, Opening(within_s=3))
        except LinkError as error:
            found.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    own = psutil.Process()
    wait_until(lambda: any(each.status == psutil.CONN_LISTEN for each in own.net_connections("tcp")), "it listens")
    ports = {each.laddr.port for each in own.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    for port in ports:
        for proof in ("", "0" * 64):
            with socket.create_connection(("127.0.0.1", port), 5) as stranger:
                stranger.settimeout(5)
                assert json.loads(stranger.recv(1 << 12)).keys() == {"nonce"}
                hello = {"node": "a", "nonce": "1", "proof": proof}
                stranger.sendall(json.dumps(hello).encode() + b"\n")
                assert stranger.recv(1) == b""
    thread.join(10)
    assert "has not called within 3.5 s" in str(found[0])


def test_all_parts_of_a_heterogeneous_job_train(cluster: SlurmCluster, tmp_path: Path) -> None:
    up = distlaunch_command("up", "--run-dir", str(tmp_path / "run"), "--slurm", "--", "true")
    cluster.run("salloc", "-N1", ":", "-N1", "--ntasks-per-node=2", *up)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["outcome"] == "succeeded"
    nodes = [task["node"] for task in report["attempts"][0]["tasks"]]
    assert len(nodes) == 3
    assert nodes[0] != nodes[1] == nodes[2]


def test_the_gpus_of_a_step_are_divided_among_its_tasks(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm names them in the environment of the step; the test cluster has no GPUs, so the test sets the variable."""
    up = distlaunch_command(
        "up", "--run-dir", str(tmp_path / "run"), "--slurm", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"
    )
    cluster.run("salloc", "-N1", "--ntasks-per-node=2", *up, env={"CUDA_VISIBLE_DEVICES": "2,3"})
    logs = [(tmp_path / "run" / "attempt-1" / f"worker-{number}.log").read_text() for number in (0, 1)]
    assert logs == ["2\n", "3\n"]


def test_resume_takes_over_the_tasks_of_a_slurm_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster.run("salloc", "--no-shell", "-N2")
    env = {**cluster.env, "SLURM_JOB_ID": cluster.run("squeue", "-h", "-o", "%i").strip()}
    run = tmp_path / "run"
    program = (SAVES, "100")
    up = distlaunch_command("up", "--run-dir", str(run), "--set", "restart.max_restarts=1", "--slurm", *program)
    with subprocess.Popen(up, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        # A cluster that still forms according to the journal is not taken over.
        events, running = run / "events.jsonl", b'"state":"running"'
        wait_until(lambda: events.exists() and running in events.read_bytes(), "it runs")
        wait_until(lambda: (run / "checkpoints" / "worker-1").exists(), "both have saved")
        first.kill()
    second = call(cluster, "resume", str(run), mark=env)
    assert second.returncode == 0, second.stderr
    assert "Taking over attempt 1" in second.stderr
    for worker in (0, 1):
        log = (run / "attempt-1" / f"worker-{worker}.log").read_text()
        assert log == "begins at 0\nends at 100\n"


def test_check_shows_how_the_job_ends_and_warns_about_the_slurm_resolver(cluster: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import tensorflow as tf\ntf.distribute.cluster_resolver.SlurmClusterResolver()\n")
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"nodes: slurm\nprogram: {{script: {script}}}\nrestart: {{max_restarts: 1}}\n")
    words = ("salloc", "-N2", "-p", "graceful", "-t", "30", *distlaunch_command("check", "--json", str(spec)))
    report = json.loads(cluster.run(*words, check=False))
    job = report["slurm"]
    assert (job["partition"], job["preempt_mode"], job["grace_s"]) == ("graceful", "REQUEUE", 20)
    assert job["kill_wait_s"] == KILL_WAIT_S
    assert 1700 < job["left_s"] <= 1800
    assert {finding["reference"] for finding in report["findings"]} >= {"slurm-resolver", "no-requeue"}
    text = cluster.run(*(word for word in words if word != "--json"), check=False)
    assert "preemption (REQUEUE) warns 20 s earlier; the job is not requeued" in text


# --- ends ---


@pytest.mark.smoke
def test_a_cancelled_job_is_interrupted_and_its_tasks_have_time_to_save(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, saving(600, 2))
    job.await_steps()
    cluster.run("scancel", job.job)
    report = job.await_report(1)
    assert (report["outcome"], report["exit_status"]) == ("interrupted", 143)
    assert report["verdict"]["reference"] == "interrupted"
    assert f"job {job.job} was cancelled" in report["verdict"]["message"]
    assert any("CANCELLED AT" in line for line in report["verdict"]["evidence"])
    for worker in (0, 1):
        assert job.log(worker, 1).count("got SIGTERM") == 1
        assert "for the end" in job.log(worker, 1)
    job.await_end()
    assert cluster.field(job.job, "Restarts") == "0"


def test_a_task_that_ignores_sigterm_is_killed_before_slurm_kills_the_controller(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, saving(600, -1))
    job.await_steps()
    begun = time.monotonic()
    cluster.run("scancel", job.job)
    report = job.await_report(1)
    assert time.monotonic() - begun > 2
    assert report["outcome"] == "interrupted"
    assert {task["exit_signal"] for task in report["attempts"][0]["tasks"]} == {signal.SIGKILL}
    job.await_end()


def test_a_run_stops_before_the_job_time_limit_and_continues_after_requeueing(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, saving(900, 1, 42), "nodes: 2, time: '1', stop_early_s: 50")
    job.await_steps()
    report = job.await_report(1)
    assert report["verdict"]["reference"] == "preempted"
    assert f"the time of job {job.job} ends in " in report["verdict"]["message"]
    check_resumed(job)


def test_the_slurm_time_limit_counts_as_a_preemption(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, saving(900, 1), "nodes: 2, time: '1', stop_early_s: 0")
    job.await_steps()
    cluster.run("scontrol", "update", f"JobId={job.job}", f"EndTime=now+{3}seconds")
    report = job.await_report(1)
    assert report["verdict"]["reference"] == "preempted"
    assert "at its time limit" in report["verdict"]["message"]
    assert any("DUE TO TIME LIMIT" in line for line in report["verdict"]["evidence"])
    check_resumed(job)


def test_the_warning_signal_of_a_job_counts_as_preemption_and_stops_no_agent(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(
        cluster, tmp_path, saving(900, 0.5), "nodes: 2, time: '2', stop_early_s: 0, extra: [--signal=USR1@115]"
    )
    job.await_steps()
    report = job.await_report(1)
    assert report["verdict"]["reference"] == "preempted"
    assert {task["exit_signal"] for task in report["attempts"][0]["tasks"]} <= {signal.SIGUSR1, None}
    assert report["attempts"][0]["processes_left"] == 0
    wait_until(lambda: cluster.state(job.job) == "PENDING", "the job is queued again")


@pytest.mark.parametrize("partition", ["batch", "graceful", "cancelled"])
def test_a_preempted_job_saves_and_continues_after_requeueing(
    cluster: SlurmCluster, tmp_path: Path, partition: str
) -> None:
    job = submit(cluster, tmp_path, saving(900, 1.5, 42), f"nodes: 2, partition: {partition}")
    job.await_steps()
    preempt(job)
    report = job.await_report(1)
    assert report["verdict"]["reference"] == "preempted"
    assert f"Slurm preempted job {job.job}" in report["verdict"]["message"]
    check_resumed(job)


def check_resumed(job: Submitted) -> None:
    """Checks that both workers have saved at the end, and that the run resumes from there in the same folder."""
    ends = [int(job.log(worker, 1).split("saved ")[1].split()[0]) for worker in (0, 1)]
    wait_until(lambda: "is requeued; the run continues" in job.said, "a message says that the job is requeued")
    job.begin_again()
    job.await_text("ends at", attempt=2)
    report = job.await_report(2)
    assert report["outcome"] == "succeeded"
    assert [job.log(worker, 2).splitlines()[0] for worker in (0, 1)] == [f"begins at {end}" for end in ends]
    job.await_end()
    assert job.cluster.field(job.job, "Restarts") == "1"
    assert job.cluster.state(job.job) == "COMPLETED"


def test_a_lost_node_requeues_the_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, saving(900, 0.5))
    job.await_steps()
    lose(cluster, "node2")
    try:
        report = job.await_report(1)
        assert report["verdict"]["reference"] == "node-lost"
        job.begin_again()
        job.await_text("ends at", attempt=2)
        assert {task["node"] for task in job.await_report(2)["attempts"][1]["tasks"]}.isdisjoint({"node2"})
        job.await_end()
    finally:
        cluster.start_daemon("node2")
        cluster.await_idle()


def lose(cluster: SlurmCluster, node: str) -> None:
    """Kills a node and all of its processes at once, as a power failure does."""
    processes = [psutil.Process(cluster.daemons[node].pid), *cluster.steps(node)]
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                act(process)
    cluster.stop_daemon(node, signal.SIGKILL)


def test_a_run_continues_while_slurmctld_restarts(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, saving(80))
    job.await_steps()
    cluster.stop_daemon("slurmctld")
    time.sleep(1)
    cluster.start_daemon("slurmctld")
    job.await_end()
    assert job.report["outcome"] == "succeeded"
    assert len(job.report["attempts"]) == 1
    cluster.await_idle()


def test_a_run_continues_on_a_drained_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, saving(40))
    job.await_steps()
    cluster.run("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=test")
    try:
        job.await_end()
        assert job.report["outcome"] == "succeeded"
    finally:
        cluster.run("scontrol", "update", "NodeName=node1", "State=RESUME")
    cluster.await_idle()


def test_a_run_continues_after_scontrol_requeue(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, saving(900, 0.5))
    job.await_steps()
    cluster.run("scontrol", "requeue", job.job)
    report = job.await_report(1)
    assert report["verdict"]["reference"] == "preempted"
    assert "was requeued" in report["verdict"]["message"]
    check_resumed(job)


def test_a_job_beyond_its_memory_limit_is_reported_with_the_slurm_message(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    program = json.dumps({"command": [sys.executable, "-c", "import time; x = b'x' * 300_000_000; time.sleep(60)"]})
    job = submit(cluster, tmp_path, program, "nodes: 2, extra: [--mem=200]", "")
    report = job.await_report(1)
    assert report["verdict"]["reference"] == "out-of-memory"
    assert any("memory limit" in line for line in report["verdict"]["evidence"])
    job.await_end()


def test_a_spare_node_replaces_a_lost_node_in_the_same_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(
        cluster,
        tmp_path,
        saving(900, 0.2),
        "nodes: 2, spares: 1",
        "restart: {max_restarts: 1}\ntimeouts: {lease_s: 5}",
    )
    job.await_steps()
    lose(cluster, "node2")
    try:
        job.await_text("ends at", attempt=2)
        report = job.await_report(2)
        assert report["outcome"] == "succeeded"
        assert [task["node"] for task in report["attempts"][1]["tasks"]] == ["node1", "node3"]
        job.await_end()
        assert cluster.field(job.job, "Restarts") == "0"
    finally:
        cluster.start_daemon("node2")
        cluster.await_idle()


def test_a_job_with_a_program_that_never_trained_is_not_requeued(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, json.dumps({"command": ["false"]}))
    report = job.await_report(1)
    assert report["verdict"]["reference"] == "task-failed"
    job.await_end()
    assert cluster.field(job.job, "Restarts") == "0"
    assert cluster.state(job.job) == "FAILED"


# --- commands ---


def test_a_queued_run_can_be_listed_followed_and_cancelled(cluster: SlurmCluster, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"name: waits\nnodes: slurm\nslurm: {{nodes: 2, extra: [--hold]}}\nprogram: {saving(20)}\n")
    done = call(cluster, "submit", str(spec), mark=state)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    assert f"Queued job {job}" in done.stderr
    assert "pending in Slurm's queue: JobHeldUser" in call(cluster, "ls", mark=state).stdout
    assert f"pending (job {job}: JobHeldUser)" in call(cluster, "status", mark=state).stdout
    follow = subprocess.Popen(
        distlaunch_command("logs", "-f"),
        env={**os.environ, **cluster.env, **state},
        stdout=subprocess.PIPE,
        text=True,
    )
    time.sleep(1)
    assert follow.poll() is None
    cluster.run("scontrol", "release", job)
    said, _ = follow.communicate(timeout=60)
    assert said.count("ends at 20") == 2
    wait = call(cluster, "wait", mark=state)
    assert (wait.returncode, "succeeded" in wait.stdout) == (0, True)
    again = call(cluster, "submit", "--json", str(spec), mark=state)
    held = json.loads(again.stdout)
    down = call(cluster, "down", held["run"], mark=state)
    assert down.returncode == 0, down.stderr
    wait_until(lambda: cluster.state(held["job"]) == "CANCELLED", "the job is cancelled")
    ended = call(cluster, "wait", held["run"], mark=state)
    assert (ended.returncode, "interrupted" in ended.stdout) == (143, True)


def test_down_stops_a_run_in_a_slurm_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, saving(600, 0.2))
    job.await_steps()
    done = call(cluster, "down", str(job.directory))
    assert done.returncode == 0, done.stderr
    assert job.report["outcome"] == "interrupted"
    job.await_end()


def test_a_run_can_be_inspected_and_stopped_from_another_machine(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, saving(900, 0.2))
    job.await_steps()

    def elsewhere(*words: str) -> subprocess.CompletedProcess[str]:
        """Runs the command where the processes of the run are invisible."""
        return subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", *distlaunch_command(*words)],
            env={**os.environ, **cluster.env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    status = elsewhere("status", str(job.directory))
    assert status.returncode == 0, status.stderr
    assert "running, attempt 1" in status.stdout
    assert "worker:1" in status.stdout
    assert "saves.py" in elsewhere("stacks", str(job.directory)).stdout
    down = elsewhere("down", str(job.directory))
    assert down.returncode == 0, down.stderr
    assert job.report["outcome"] == "interrupted"
    job.await_end()


def test_a_job_that_slurm_refuses_leaves_no_run_folder(cluster: SlurmCluster, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("nodes: slurm\nslurm: {nodes: 2, partition: none}\n")
    done = call(cluster, "submit", "--run-dir", str(tmp_path / "run"), str(spec))
    assert done.returncode == 3
    assert "invalid partition specified: none" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.smoke
def test_secrets_reach_the_job_but_no_file(cluster: SlurmCluster, tmp_path: Path) -> None:
    program = json.dumps({"command": ["sh", "-c", 'printf %s "$API_KEY" | cksum']})
    job = submit(cluster, tmp_path, program, "nodes: 1", "env: {API_KEY: very-secret-words}")
    job.await_end()
    expected = subprocess.run(["cksum"], input=b"very-secret-words", capture_output=True, check=True).stdout.decode()
    assert job.log(0, 1) == expected
    for path in job.directory.rglob("*"):
        assert not path.is_file() or b"very-secret-words" not in path.read_bytes()
    assert "very-secret-words" not in cluster.run("scontrol", "write", "batch_script", job.job, "-")

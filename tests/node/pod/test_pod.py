"""A task in a pod without an agent: how its end is reported to Kubernetes, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cases import first_quick
from tests.harness.hosts import loopback
from tests.harness.hosts.exported import PODS, Exported, env_of, expand, export, pods_of, read_file
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.processes.jax import PYTHON as JAX_PYTHON
from tests.harness.processes.jax import has_jax
from worker_entry.pod.outcome import MESSAGE_LIMIT, End, find_status, render_message
from worker_entry.protocol.values import CrashRecord, TaskExit

COVERS = ("worker_entry/pod",)

PEER_GONE = "Collective ops is aborted by: Connection reset by peer\nThe error could be from a previous operation."
CLEARED = ("TF_CONFIG", "PYTHONPATH", "KERAS_BACKEND", "DISTLAUNCH_CHILDREN", "DISTLAUNCH_RESTARTS")


@dataclass(frozen=True)
class Ended:
    status: int
    message: str
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of a ConfigMap."""
    path = tmp_path_factory.mktemp("entry") / "entry.pyz"
    path.write_bytes(read_file(export(PODS), "entry.pyz"))
    return path


@dataclass(frozen=True)
class Container:
    """A container, simulated by its own folder without isolation by the kernel."""

    entry: Path
    folder: Path
    name: str = "a"
    python: str = sys.executable

    @property
    def log(self) -> Path:
        return self.folder / f"termination-log-{self.name}"

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        temporary = self.folder / f"tmp-{self.name}"
        temporary.mkdir(exist_ok=True)
        clean = {name: value for name, value in os.environ.items() if name not in CLEARED}
        return subprocess.Popen(
            [self.python, str(self.entry), "pod", "--termination-log", str(self.log), *words],
            env={**clean, "TMPDIR": str(temporary), **(env or {})},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self, process: subprocess.Popen[str], timeout_s: float = 60.0) -> Ended:
        stdout, stderr = process.communicate(timeout=timeout_s)
        return Ended(process.returncode, self.log.read_text() if self.log.exists() else "", stdout, stderr)

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> Ended:
        return self.wait(self.start(*words, env=env))

    def run_source(self, source: str, *words: str, env: Mapping[str, str] | None = None) -> Ended:
        (self.folder / "train.py").write_text(source)
        return self.run(*words, "train.py", env=env)


@pytest.fixture
def container(entry: Path, tmp_path: Path) -> Container:
    return Container(entry, tmp_path)


# --- statuses and messages ---

UNAVAILABLE = f"class UnavailableError(Exception): pass\nraise UnavailableError({PEER_GONE!r})"


@pytest.mark.parametrize(
    ("source", "status"),
    first_quick(
        [
            ("pass", 0),
            ("raise ValueError('no label')", 1),
            ("raise SystemExit(7)", 1),
            ("raise SystemExit('no data')", 1),
            ("raise SystemExit(76)", 1),  # if a program's own 76 were passed on, it would be ignored for ever
            ("raise SystemExit(3)", 1),
            ("import argparse; argparse.ArgumentParser().parse_args(['--x'])", 2),
            ("import a_module_that_is_not_there", 2),
            ("x = (", 2),
            ("raise SystemExit(42)", 1),  # without a handler that saves, it would be restarted for ever
            ("raise SystemExit(143)", 1),
            ("raise SystemExit(93)", 93),
            (UNAVAILABLE, 76),
            ("import os; os.kill(os.getpid(), 9)", 137),
            ("import os; os.abort()", 134),
            ("import os, sys; sys.stderr.write('UNAVAILABLE: Socket closed\\n'); sys.stderr.flush(); os.abort()", 76),
        ],
        5,
    ),
)
def test_a_pod_exits_with_the_status_for_each_kind_of_program_end(
    container: Container, source: str, status: int
) -> None:
    ended = container.run_source(source)
    assert ended.status == status, ended


def test_a_missing_program_exits_with_the_status_for_no_restart(container: Container) -> None:
    assert container.run("none.py").status == 2
    missing = container.run("--", "none-of-these-commands")
    assert missing.status == 2
    assert "none-of-these-commands: No such file or directory" in missing.message


def test_the_termination_message_names_the_exception_and_its_line(container: Container) -> None:
    source = "def load():\n    raise ValueError('batch 20 has no label')\n\nload()\n"
    ended = container.run_source(source, env={"DISTLAUNCH_TASK": "worker:3"})
    assert ended.message.splitlines() == [
        "worker:3: the task failed (exit status 1)",
        f"{container.folder / 'train.py'}:2",
        "ValueError: batch 20 has no label",
    ]
    assert "batch 20 has no label" in ended.stderr.partition("distlaunch:")[0]  # Python's own traceback
    assert container.log.read_text() in ended.stderr


def test_a_termination_message_contains_the_end_of_a_long_exception() -> None:
    crash = CrashRecord(1.0, "InternalError", f"first{'x' * 10_000}the cause", "train.py", 3)
    message = render_message("worker:0", End(TaskExit(code=1), crash), 1)
    assert len(message) <= MESSAGE_LIMIT
    assert b"train.py:3" in message
    assert message.endswith(b"the cause\n")


def test_the_termination_message_of_a_command_has_its_status_and_last_output(container: Container) -> None:
    ended = container.run("--", "sh", "-c", "echo out; echo lost >&2; exit 5")
    assert (ended.status, ended.stdout) == (1, "out\n")
    assert ended.message.splitlines() == ["worker:0: the task failed (exit status 5)", "lost"]


def test_a_tfjob_pod_exits_with_the_statuses_that_tfjob_restarts(container: Container) -> None:
    for source, status in (
        (UNAVAILABLE, 138),
        ("raise SystemExit(42)", 1),
        ("import os; os.kill(os.getpid(), 9)", 1),
    ):
        assert container.run_source(source, "--tfjob").status == status
        assert "worker:0: " in container.log.read_text()


@pytest.mark.parametrize("code", [42, 143])
def test_a_preemption_status_counts_only_if_the_program_saves_at_preemption(code: int) -> None:
    exits = CrashRecord(1.0, "SystemExit", f"sys.exit({code})", exit_status=code)
    assert find_status(End(TaskExit(code), exits, saves=True)) == code
    assert find_status(End(TaskExit(code), exits)) == 1
    assert find_status(End(TaskExit(code), CrashRecord(1.0, "ValueError", "no"), saves=True)) == 1


def test_a_pod_that_receives_sigterm_exits_as_preempted_with_any_program_status(container: Container) -> None:
    (container.folder / "train.py").write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\nprint('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = container.start("train.py")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    ended = container.wait(process)
    assert ended.status == 143
    assert ended.message.startswith("worker:0: preempted: asked to stop")


def test_a_pod_kills_a_program_that_ignores_sigterm_and_reports_it(container: Container) -> None:
    """TensorFlow ignores SIGTERM; Kubernetes would kill the first process as well, with status 137."""
    process = container.start("--stop-grace", "0.2", "--", "sh", "-c", "trap '' TERM; echo up; sleep 63 & wait; wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    ended = container.wait(process, 20.0)
    assert ended.status == 143
    assert "SIGKILL" in ended.message


def test_sigterm_to_a_pod_stops_child_processes_of_the_program(container: Container) -> None:
    process = container.start("--", "sh", "-c", "sleep 61 & echo $!; wait; sleep 62")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert container.wait(process).status == 143
    eventually(lambda: _assert_gone(child))


def _assert_gone(pid: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "Z"  # this machine's init has not reaped it yet


TF_CONFIG = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})
OF_JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}


@pytest.mark.parametrize("env", [{"TF_CONFIG": TF_CONFIG}, OF_JAX], ids=["tensorflow", "jax"])
def test_a_pod_gives_up_a_cluster_that_does_not_form_in_time(container: Container, env: Mapping[str, str]) -> None:
    (container.folder / "train.py").write_text("import time\ntime.sleep(60)\n")
    ended = container.run("--start-timeout", "0.5", "train.py", env=env)
    assert ended.status == 3
    assert "no cluster within 0.5 s (timeouts.start_s)" in ended.message


def test_each_restart_of_a_pod_is_an_attempt(container: Container) -> None:
    source = "import os; print(os.environ['DISTLAUNCH_ATTEMPT'], 'DISTLAUNCH_RESTARTS' in os.environ)"
    assert container.run_source(source, env={"DISTLAUNCH_RESTARTS": "2"}).stdout == "3 False\n"
    assert container.run_source(source, env={"DISTLAUNCH_RESTARTS": ""}).stdout == "1 False\n"


@pytest.mark.parametrize("words", [(), ("--unknown", "a.py"), ("-m",), ("--sync", "a.py")])
def test_an_invalid_pod_command_line_is_a_usage_error(container: Container, words: Sequence[str]) -> None:
    ended = container.run(*words)
    assert ended.status == 2
    assert "usage: " in ended.stderr


def test_a_pod_stops_processes_that_its_program_leaves_behind(container: Container) -> None:
    """Such a process may hold the log's pipe, and with it the pod."""
    ended = container.run("--", "sh", "-c", "sleep 64 & echo $!")
    assert ended.status == 0
    eventually(lambda: _assert_gone(int(ended.stdout)))


def test_a_pod_unpacks_the_program_folder_to_the_path_in_the_spec(container: Container, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    (folder / "inner").mkdir(parents=True)
    (folder / "train.py").write_text("import inner.name, os, sys; print(inner.name.NAME, os.getcwd(), *sys.argv[1:])\n")
    (folder / "inner" / "name.py").write_text("NAME = 'mine'\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho script\n")
    (folder / "run.sh").chmod(0o755)
    target = tmp_path / "srv" / "job"
    spec = f"{PODS}sync: {{path: {folder}, to: {target}}}\nprogram: {{script: train.py, args: [--epochs, '3']}}\n"
    exported = export(spec)
    archive = tmp_path / "folder.zip"
    archive.write_bytes(read_file(exported, "folder.zip"))
    [template] = pods_of(exported.objects)
    words = [
        str(archive) if word.endswith("folder.zip") else word for word in template["spec"]["containers"][0]["args"]
    ]
    assert container.run(*words).stdout == f"mine {target} --epochs 3\n"
    assert container.run("--sync", str(archive), str(target), "--", "./run.sh").stdout == "script\n"


def test_the_pod_archive_refuses_python_38(entry: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(entry) as bundle:
        source = bundle.read("__main__.py").decode()
    old = "import sys; sys.version_info = (3, 8, 10)\n"
    done = subprocess.run([sys.executable, "-c", old + source], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is Python 3.8; it needs 3.9 or newer" in done.stderr


def test_a_program_that_finished_before_its_interpreter_failed_has_succeeded() -> None:
    assert find_status(End(TaskExit(signal=6), finished=True)) == 0


# --- with TensorFlow ---


def start_all(
    entry: Path, folder: Path, exported: Exported, ports: Sequence[int], python: str = sys.executable
) -> dict[str, tuple[Container, subprocess.Popen[str]]]:
    """All containers of a JobSet, with addresses of this machine in place of the pods' names."""
    jobs = exported.objects["JobSet"]["spec"]["replicatedJobs"]
    pods = [(job["name"], place, index) for place, job in enumerate(jobs) for index in range(count_of(job))]
    free = iter(ports)
    addresses = {f"cluster-{role}-0-{index}.cluster:2222": f"127.0.0.1:{next(free)}" for role, _, index in pods}
    started = {}
    for role, place, index in pods:
        env = env_of(exported, index, place)
        for name, address in addresses.items():
            env = {variable: value.replace(name, address) for variable, value in env.items()}
        spec = [*pods_of(exported.objects)][place]["spec"]["containers"][0]
        container = Container(entry, folder, f"{role}-{index}", python)
        more = {"CUDA_VISIBLE_DEVICES": "-1", "HOME": str(folder)}
        words = [expand(word, env) for word in spec["args"]]
        started[f"{role}:{index}"] = container, container.start(*words, env={**env, **more})
    return started


def count_of(job: Mapping[str, Any]) -> int:
    count: int = job["template"]["spec"]["completions"]
    return count


@pytest.fixture
def ports() -> Sequence[int]:
    return loopback.ports()[-4:]


def run_workers(entry: Path, folder: Path, ports: Sequence[int], program: str, *words: str) -> list[Ended]:
    """Runs a program of the tests on two workers, as an export would."""
    spec = f"nodes: {{from: kubernetes, image: a, count: 2}}\nprogram: {{script: {PROGRAMS / program}}}\n"
    if words:
        spec = spec.replace(".py}", f".py, args: [{', '.join(map(json.dumps, words))}]}}")
    started = start_all(entry, folder, export(spec), ports).values()
    return [container.wait(process, 120.0) for container, process in started]


@pytest.mark.tensorflow
def test_an_unmodified_fit_trains_on_two_pods(entry: Path, tmp_path: Path, ports: Sequence[int]) -> None:
    ended = run_workers(entry, tmp_path, ports, "plain_fit.py")
    assert [each.status for each in ended] == [0, 0], ended
    [one, other] = [each.stdout.splitlines()[-1] for each in ended]
    assert one == other
    assert one.startswith("2 replicas, loss ")
    assert "last step: 16" in ended[0].message


@pytest.mark.tensorflow
def test_an_unmodified_fit_trains_in_a_single_pod(entry: Path, tmp_path: Path) -> None:
    spec = f"nodes: {{from: kubernetes, image: a}}\nprogram: {{script: {PROGRAMS / 'plain_fit.py'}}}\n"
    exported = export(spec)
    words = next(pods_of(exported.objects))["spec"]["containers"][0]["args"]
    ended = Container(entry, tmp_path).run(*words, env={**env_of(exported, 0), "HOME": str(tmp_path)})
    assert ended.status == 0, ended
    assert ended.stdout.splitlines()[-1].startswith("1 replicas, loss ")


@pytest.mark.tensorflow
def test_parameter_servers_in_pods_serve_until_the_chief_has_succeeded(tmp_path: Path, ports: Sequence[int]) -> None:
    exported = export("nodes: {from: kubernetes, image: a, count: 2}\nstrategy: parameter_server\n")
    entry = tmp_path / "entry.pyz"
    entry.write_bytes(read_file(exported, "entry.pyz"))  # with the demo
    started = start_all(entry, tmp_path, exported, ports)
    assert started.keys() == {"chief:0", "worker:0", "worker:1", "ps:0"}
    container, process = started.pop("chief:0")
    chief = container.wait(process, 120.0)
    for _, other in started.values():
        other.terminate()
    others = {task: container.wait(process) for task, (container, process) in started.items()}
    assert chief.status == 0, chief
    assert {each.status for each in others.values()} == {143}
    assert re.search(r"chief:0: validation accuracy 0\.9", chief.stdout)


@pytest.mark.tensorflow
def test_a_pod_that_fails_because_its_peer_was_killed_exits_with_status_76(
    entry: Path, tmp_path: Path, ports: Sequence[int]
) -> None:
    killed, survivor = run_workers(entry, tmp_path, ports, "fail_in_training.py", "worker:0", "kill")
    assert (survivor.status, killed.status) == (76, 137)
    assert survivor.message.startswith("worker:1: failed only because another task was gone")
    assert "fail_in_training.py:" in survivor.message
    assert "worker:0: ended by a signal (SIGKILL (signal 9))" in killed.message


@pytest.mark.tensorflow
def test_a_pod_that_raises_exits_with_1_and_its_peer_with_76(entry: Path, tmp_path: Path, ports: Sequence[int]) -> None:
    survivor, failed = run_workers(entry, tmp_path, ports, "fail_in_training.py", "worker:1", "raise")
    assert (survivor.status, failed.status) == (76, 1)
    assert "KeyError: 'bad sample 20'" in failed.message
    assert "fail_in_training.py:" in failed.message


# --- with JAX ---


@pytest.fixture
def jax_pods(tmp_path: Path) -> tuple[Exported, Path]:
    """The export of JAX's demo on two workers, and its archive."""
    if not has_jax():
        pytest.skip("no Python with JAX, Keras and TensorFlow: name it in DISTLAUNCH_JAX_PYTHON")
    exported = export(
        "nodes: {from: kubernetes, image: a, count: 2}\nframework: jax\n"
        "program: {module: worker_entry.demo.train_jax, args: [--epochs, '2']}\n"
    )
    entry = tmp_path / "entry.pyz"
    entry.write_bytes(read_file(exported, "entry.pyz"))
    return exported, entry


@pytest.mark.jax
def test_the_demo_of_jax_trains_on_two_pods_and_agrees(
    jax_pods: tuple[Exported, Path], tmp_path: Path, ports: Sequence[int]
) -> None:
    exported, entry = jax_pods
    started = start_all(entry, tmp_path, exported, ports, JAX_PYTHON).values()
    ended = [container.wait(process, 240.0) for container, process in started]
    assert [each.status for each in ended] == [0, 0], ended
    lasts = [each.stdout.splitlines()[-1].partition(": ") for each in ended]
    assert [name for name, _, _ in lasts] == ["worker:0 of 2", "worker:1 of 2"]
    assert len({rest.partition(",")[0] for _, _, rest in lasts}) == 1


@pytest.mark.jax
def test_a_pod_of_jax_gives_up_the_start_if_a_peer_never_comes(
    jax_pods: tuple[Exported, Path], tmp_path: Path, ports: Sequence[int]
) -> None:
    """The program has reported that it joins; JAX then waits for the others as long as it is let."""
    exported, entry = jax_pods
    (tmp_path / "train.py").write_text("import jax\njax.distributed.initialize()\n")
    env = {**env_of(exported, 0), "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{ports[0]}", "HOME": str(tmp_path)}
    ended = Container(entry, tmp_path, python=JAX_PYTHON).run("--start-timeout", "8", "train.py", env=env)
    assert ended.status == 3, ended
    assert "no cluster within 8 s (timeouts.start_s)" in ended.message

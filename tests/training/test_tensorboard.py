"""TensorBoard and its profiler with a real cluster."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

import worker_entry
from tests.harness.apart import linux
from tests.harness.places import PROGRAMS
from tests.harness.processes.background import BackgroundRun, running
from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.warm_python import WarmPython
from tests.harness.witness import wait_until
from worker_entry.protocol import environment
from worker_entry.task.profiling import ATTEMPTS, _make_messages

COVERS = (
    "launcher/exporters/tensorboard.py",
    "worker_entry/agent/tensorboard.py",
    "worker_entry/agent/helpers/profile.py",
    "worker_entry/task/profiling.py",
    "launcher/controller/requests.py",
    "launcher/exporters/start.py",
)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")

DEMO = ["-m", "worker_entry.demo.train", "--epochs"]
PACED = [str(PROGRAMS / "paced_demo.py"), "--epochs"]


def address_of(run: BackgroundRun) -> str:
    run.wait_until_said("TensorBoard is at http://")
    found = re.search(r"TensorBoard is at (http://127\.0\.0\.1:\d+/)", run.said)
    assert found is not None
    return found[1]


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def test_tensorboard_shows_all_workers_and_ends_with_the_run(warm_python: WarmPython, tmp_path: Path) -> None:
    options = ("-n", "2", "--set", "guard=required", "--tensorboard")
    with running(tmp_path, *options, *DEMO, "8", command=warm_python.command) as run:
        address = address_of(run)
        wait_until(lambda: {"worker-0/train", "worker-1/train"} <= set(ask(f"{address}data/runs")), "it shows both")
        port = urllib.parse.urlsplit(address).port
        sockets: list[Any] = psutil.net_connections("tcp")
        listening = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
        assert {address.ip for address in listening if address.port == port} == {"127.0.0.1"}
        assert run.end() == 0, run.said
    assert "tensorboard:0" not in run.said.replace("tensorboard:0  ", "")
    assert "0 processes left on this machine" in run.said


def test_tensorboard_keep_runs_after_training_until_ctrl_c(warm_python: WarmPython, tmp_path: Path) -> None:
    with running(tmp_path, "-n", "1", "--set", "tensorboard=keep", *DEMO, "1", command=warm_python.command) as run:
        address = address_of(run)
        run.wait_until_said("Training has ended; TensorBoard keeps running until Ctrl-C")
        wait_until(lambda: "worker-0/train" in ask(f"{address}data/runs"), "it shows the worker")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 0, run.said
    assert run.report["outcome"] == "succeeded"


@linux
@pytest.mark.slow
@pytest.mark.parametrize("shell", [{}, {"OMP_NUM_THREADS": "3", "TF_CPP_MIN_LOG_LEVEL": "2"}], ids=["none", "some"])
def test_tasks_with_tensorboard_are_forked_with_the_variables_of_the_shell(
    distlaunch: Distlaunch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: dict[str, str]
) -> None:
    for name in environment.DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "program.py").write_text(
        "import os, tensorflow\n"
        "print('forked', 'forkserver' in open('/proc/self/cmdline').read())\n"
        f"print('sees', *[os.environ[name] for name in {[*shell]}])\n"
    )
    ran = distlaunch("local", "-n", "2", "--tensorboard", "program.py", cwd=tmp_path, env=shell)
    assert ran.status == 0, ran.stderr
    for task in ("worker-0", "worker-1"):
        assert ran.line("forked True", task)
        assert ran.line(" ".join(("sees", *shell.values())), task)


def test_a_tensorboard_that_cannot_start_is_reported_and_the_tasks_continue(
    distlaunch: Distlaunch, tmp_path: Path
) -> None:
    broken = tmp_path / "tensorboard"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ModuleNotFoundError('not here')\n")
    ran = distlaunch("local", "-n", "1", "--tensorboard", "--", "sleep", "3")
    assert ran.status == 0, ran.stderr
    assert "TensorBoard ended with exit status 1; the tasks continue; see tensorboard-0.log\n" in ran.stderr
    assert b"ModuleNotFoundError: not here" in ran.log("tensorboard-0")


def test_a_profile_covers_all_workers_and_ends_none_of_them(
    distlaunch: Distlaunch, warm_python: WarmPython, tmp_path: Path
) -> None:
    """TensorFlow's own method recorded operations of all workers, and those that follow sometimes died."""
    options = ("-n", "2", "--evaluator")  # which has no server
    with running(tmp_path, *options, *PACED, "2000", command=warm_python.command) as run:
        run.wait_for(b"Epoch 3/2000", 0)
        captures, trained = 0, False
        while not trained:  # on a busy machine, a worker may wait for the other during a whole capture
            captures += 1
            folder = capture(distlaunch, 2, {"worker-0", "worker-1"})
            assert folder.is_relative_to(tmp_path / "run" / "tensorboard")
            leader, follower = events_of(folder, "worker-0", "worker-1")
            assert not operations(follower)
            trained = all(any("epoch_iterator.py" in event for event in events) for events in (leader, follower))
        assert operations(leader)
        for _ in range(3):
            done = distlaunch("profile", "./run", "--duration", "1", run_dir=False)
            assert done.status == 0 or "no task recorded anything" in done.stderr  # the tasks have only waited
        said = len(run.log(1))
        wait_until(lambda: len(run.log(1)) > said, "training continues")


def test_a_profile_covers_all_parameter_server_tasks_in_a_network_namespace(
    distlaunch: Distlaunch, tmp_path: Path
) -> None:
    """From outside, only TensorBoard is reachable; distlaunch shows the tasks as always."""
    options = (
        "--set",
        "isolation=namespace",
        "--tensorboard",
        "--strategy",
        "parameter_server",
        "-n",
        "2",
        "--ps",
        "1",
    )
    with running(tmp_path, *options, *PACED, "2000") as run:
        captures, log = 1, run.directory / "attempt-1" / "chief-0.log"
        wait_until(lambda: log.exists() and b"Epoch 2/2000" in log.read_bytes(), "it trains")
        names = ("chief-0", "worker-0", "worker-1", "ps-0")
        seen = [operations(events) for events in events_of(capture(distlaunch, 1, set(names)), *names)]
        while not all(seen):  # a step goes to a free worker: on a busy machine, a worker may have none in a second
            captures += 1
            more = [operations(events) for events in events_of(capture(distlaunch, 1, set(names)), *names)]
            seen = [before | now for before, now in zip(seen, more, strict=True)]
        wait_until(
            lambda: "distlaunch/chief-0" in ask(f"{address_of(run)}data/runs"), "TensorBoard shows the chief", 60
        )
        stacks = distlaunch("stacks", "./run", run_dir=False)
        assert (stacks.status, stacks.stderr) == (0, "")
        assert "chief:0" in stacks.stdout


def capture(distlaunch: Distlaunch, duration_s: float, names: set[str]) -> Path:
    """Takes a profile; returns the folder with the files of all these tasks."""
    done = distlaunch("profile", "./run", "--duration", str(duration_s), run_dir=False)
    assert (done.status, done.stderr) == (0, "")
    files = [Path(line) for line in done.stdout.splitlines()]
    assert sorted(file.name for file in files) == sorted(f"{name}.xplane.pb" for name in names)
    [folder] = {file.parent for file in files}
    return folder


def events_of(folder: Path, *names: str) -> list[set[str]]:
    """The names of the events captured of each task, by TensorFlow's own format, which needs no other part of it."""
    tensorflow = importlib.util.find_spec("tensorflow")
    assert tensorflow is not None
    assert tensorflow.origin is not None
    module = runpy.run_path(str(Path(tensorflow.origin).parent / "tsl" / "profiler" / "protobuf" / "xplane_pb2.py"))
    spaces = [module["XSpace"].FromString((folder / f"{name}.xplane.pb").read_bytes()) for name in names]
    return [
        {
            plane.event_metadata[event.metadata_id].name
            for plane in space.planes
            for line in plane.lines
            for event in line.events
        }
        for space in spaces
    ]


def operations(events: set[str]) -> set[str]:
    """The events of TensorFlow's executor, which must not be recorded at a worker that follows."""
    return {event for event in events if event.startswith(("ExecutorState::", "ThreadpoolListener::"))}


def test_profiling_an_ended_run_is_a_usage_error(distlaunch: Distlaunch, tmp_path: Path) -> None:
    assert distlaunch("local", "-n", "1", "--", "true").status == 0
    done = distlaunch("profile", "./run", run_dir=False)
    assert done.status == 2
    assert f"Error: the run {tmp_path}/run has ended" in done.stderr


def test_a_profile_retries_tasks_without_events_and_then_names_them(tmp_path: Path) -> None:
    """One of two servers never has anything to record."""
    grpc: Any = importlib.import_module("grpc")
    response = _make_messages()["Response"]
    asked: list[str] = []

    class Profiler(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
        def __init__(self, name: str, *, empty: bool) -> None:
            self.name = name
            self.answer = response(empty_trace=empty).SerializeToString()

        def service(self, _: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(self.profile)

        def profile(self, _: bytes, context: Any) -> Any:
            asked.append(self.name)
            return self.answer

    with ThreadPoolExecutor(4) as pool, ExitStack() as servers:
        tasks = {}
        for name, empty in (("worker-0", False), ("worker-1", True)):
            server = grpc.server(pool)
            server.add_generic_rpc_handlers([Profiler(name, empty=empty)])
            tasks[name] = {"address": f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", "operations": True}
            server.start()
            servers.callback(server.stop, None)
        order = json.dumps({"tasks": tasks, "directory": str(tmp_path), "duration_s": 0.1})
        command = [sys.executable, str(Path(worker_entry.__file__).parent), "profile"]
        done = subprocess.run(command, input=order, capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout)
    assert (answer["silent"], answer["failed"]) == (["worker-1"], {})
    assert sorted(asked) == sorted([*tasks] * ATTEMPTS)


def test_tensorboard_shows_the_step_times_of_each_task_and_goodput(warm_python: WarmPython, tmp_path: Path) -> None:
    tasks = {"distlaunch/worker-0", "distlaunch/worker-1"}
    shown = {*tasks, "distlaunch", "worker-0/train"}
    with running(tmp_path, "-n", "2", "--tensorboard", *PACED, "2000", command=warm_python.command) as run:
        address = address_of(run)
        wait_until(lambda: shown <= set(ask(f"{address}data/runs")), "it shows both")

        def curves() -> list[list[list[float]]]:
            tag = "distlaunch%2Fstep_seconds"
            return [ask(f"{address}data/plugin/scalars/scalars?tag={tag}&run={name}") for name in sorted(tasks)]

        wait_until(lambda: all(len(curve) > 1 for curve in curves()), "the curves grow")
        for curve in curves():
            assert [step for _, step, _ in curve] == sorted({step for _, step, _ in curve})
            assert all(0 < seconds < 60 for *_, seconds in curve)
        goodput = ask(f"{address}data/plugin/scalars/scalars?tag=goodput%2Ftraining_seconds&run=distlaunch")
        assert 0 < goodput[-1][2] < 600
        run.process.send_signal(signal.SIGINT)
        run.end()
    folder = run.directory / "tensorboard" / "distlaunch"
    assert {path.parent.name for path in folder.rglob("*tfevents*")} >= {"worker-0", "worker-1"}

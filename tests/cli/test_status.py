"""`status` shows each task as it is now, with what its processes use."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.commands.requests import ask_status, ask_to_end
from launcher.commands.status import render_status
from launcher.gang.decide import new_attempt
from launcher.gang.events import TaskExited, TaskReported
from launcher.gang.facts import apply
from launcher.gang.state import AttemptState, Phase
from launcher.report.goodput import KINDS
from launcher.report.journal_line import Message
from launcher.report.status_report import GpuState, NodeState, TaskState, estimate_eta_s
from launcher.report.status_text import COLUMNS, make_node_rows, make_rows, render_header
from launcher.rundir.directory import RunDir
from launcher.wording import render_age
from tests.harness.builders.gang import W0, W1, make_policy
from tests.harness.builders.statuses import make_status
from tests.harness.polling import eventually
from tests.harness.processes.commands import Distlaunch, both, distlaunch_command
from tests.harness.terminals import terminal
from tests.harness.witness import await_none_left, make_mark, wait_until
from worker_entry.protocol.units import render_size
from worker_entry.protocol.values import Progress, TaskExit
from worker_entry.system import kernel

COVERS = (
    "launcher/commands",
    "launcher/rundir/summary.py",
    "launcher/controller/usage.py",
    "worker_entry/agent/tasks/sampling.py",
)

BUSY = """
import os, subprocess, sys, threading, time
kept = bytearray(os.urandom(1) * (150 << 20))
if sys.argv[1:] != ["below"]:
    subprocess.Popen([sys.executable, __file__, "below"])
    print("up", flush=True)
    time.sleep(600)
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    """A run of one task that sleeps, with a child that computes."""
    folder = tmp_path_factory.mktemp("busy")
    (folder / "busy.py").write_text(BUSY)
    command = distlaunch_command("local", "-d", "-n", "1", "--run-dir", "run", "--", sys.executable, "busy.py")
    subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, check=True, capture_output=True, timeout=90)
    yield RunDir(folder / "run")
    ask_to_end(RunDir(folder / "run"), now=True)


@pytest.mark.slow
def test_status_sums_cpu_and_memory_over_all_processes_of_a_task(busy: RunDir) -> None:
    def check() -> None:
        [task] = ask_status(busy).tasks
        assert (task.memory or 0) > 300 << 20
        assert (task.cpu or 0) > 0.1
        assert (task.threads, task.swapped is not None) == (3, True)

    eventually(check)


def test_status_shows_cpu_memory_and_network_use_of_the_node(busy: RunDir) -> None:
    def check() -> None:
        nodes = ask_status(busy).nodes
        assert len(nodes) == 1  # none before the first sample
        [node] = nodes
        assert (node.node, node.cores > 0) == ("local", True)
        assert 300 << 20 < node.memory < node.memory_total
        assert (node.cpu or 0) > 0.1
        assert node.received_s is not None

    eventually(check)


def test_status_prints_a_table_and_the_last_messages(busy: RunDir) -> None:
    done = subprocess.run(
        distlaunch_command("status", str(busy.root)), capture_output=True, text=True, check=True, timeout=60
    )
    (header, *goodput), (columns, row), *rest = (part.splitlines() for part in done.stdout.split("\n\n"))
    assert header.startswith(f"{json.loads(busy.run.read_text())['run_id']}: running, attempt 1, ")
    assert all(re.match(r"Goodput \d+ %: \d+\.\d s of \d+\.\d s trained", line) for line in goodput)
    assert columns.split() == " ".join(column.title for column in COLUMNS).split()
    assert row.split()[:3] == ["worker:0", "local", "running"]
    assert any("ago  Starting 1 task on this machine" in line for line in rest[-1])


@pytest.mark.slow
def test_status_watch_in_a_pipe_prints_changes_until_the_run_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wait = "until [ -e go ]; do sleep 0.1; done"
    started = distlaunch_command("local", "-d", "-n", "1", "--run-dir", str(folder), "--", "sh", "-c", wait)
    subprocess.run(started, cwd=tmp_path, stdin=subprocess.DEVNULL, check=True, capture_output=True, timeout=90)
    command = distlaunch_command("status", "-w", "--json", str(folder))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        (tmp_path / "go").touch()
        later = [json.loads(line) for line in process.stdout]
    assert (first["state"], later[-1]["state"]) == ("running", "succeeded")
    assert process.returncode == 0


def test_status_watch_on_a_terminal_repaints_until_ctrl_c(busy: RunDir) -> None:
    with terminal(distlaunch_command("status", "-w", str(busy.root))) as watching:
        watching.until(lambda: watching.raw.count(b"attempt 1") >= 3)
        watching.shows("running · attempt 1", "worker:0", "running", "ago  Starting 1 task on this machine")
        watching.type(b"\x03")
        assert watching.end() == 0
        watching.shows("running · attempt 1")  # the last picture stays


@pytest.mark.slow
def test_status_of_an_ended_run_shows_exit_statuses_and_goodput(distlaunch: Distlaunch, tmp_path: Path) -> None:
    ran = distlaunch("local", "-n", "2", "--", *both(tmp_path, "true", "exit 3"))
    done = distlaunch("status", str(ran.directory), "--json", run_dir=False)
    status: dict[str, Any] = json.loads(done.stdout)
    assert (status["state"], [task["state"] for task in status["tasks"]]) == ("failed", ["exit status 3"] * 2)
    assert status["goodput"] == ran.report["goodput"]
    assert sum(status["goodput"][kind] for kind in KINDS) == pytest.approx(status["ended"] - status["started"])
    shown = distlaunch("status", str(ran.directory), run_dir=False)
    assert re.search(r"Error: worker:[01] on local exited with status 3", shown.stdout)


LOST = """
import os, time
from worker_entry import progress
for step in range(5):
    progress.report()
if os.environ["DISTLAUNCH_TASK"] == "worker:1":
    time.sleep(600)
"""


def test_status_of_a_lost_run_shows_the_last_state_of_its_tasks(tmp_path: Path, distlaunch: Distlaunch) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    (tmp_path / "program.py").write_text(LOST)
    mark = make_mark()
    command = distlaunch_command("local", "-n", "2", "program.py")
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, **state, **mark}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        runs = tmp_path / "state" / "distlaunch" / "runs"

        def is_known() -> bool:
            events = b"".join(path.read_bytes() for path in runs.glob("*/events.jsonl"))
            return b'"task-exited"' in events and b'"task":"worker:1","phase":"is training"' in events

        wait_until(is_known, "worker:0 has ended, and worker:1 has reported")
        process.kill()
    await_none_left(mark)
    [folder] = runs.iterdir()
    done = distlaunch("status", "--json", env=state, run_dir=False)
    status: dict[str, Any] = json.loads(done.stdout)
    assert (status["state"], status["attempt"]) == ("lost", 1)
    assert [(task["task"], task["node"]) for task in status["tasks"]] == [("worker:0", "local"), ("worker:1", "local")]
    assert [task["state"] for task in status["tasks"]] == ["exit status 0", "training"]
    assert status["tasks"][0]["step"] == 5
    assert all(task["pid"] and task["address"] for task in status["tasks"])
    assert f"The controller of this run is gone; resume the run: `distlaunch resume {folder.name}`; " in done.stderr
    assert f"or stop what is left of it: `distlaunch clean {folder.name}`\n" in done.stderr
    for arguments in ((), ("-a",)):
        listed = distlaunch("ls", *arguments, "--json", env=state, run_dir=False)
        assert [(run["name"], run["state"]) for run in json.loads(listed.stdout)] == [(folder.name, "lost")]


@pytest.mark.parametrize("lost", ["report", "report and run.json"])
def test_all_commands_agree_on_the_outcome_after_a_full_disk(tmp_path: Path, distlaunch: Distlaunch, lost: str) -> None:
    """Only some of the files with the outcome could be written; the journal has it."""
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    ran = distlaunch("local", "-n", "2", "--", *both(tmp_path, "true", "exit 3"), env=state, run_dir=False)
    assert ran.status == 1
    [folder] = (tmp_path / "state" / "distlaunch" / "runs").iterdir()
    facts = json.loads((folder / "run.json").read_text())
    (folder / "report.json").unlink()
    if lost != "report":
        facts |= {"ended": False, "outcome": "", "reference": "", "exit_status": None}
        (folder / "run.json").write_text(json.dumps(facts))
    status = json.loads(distlaunch("status", "--json", env=state, run_dir=False).stdout)
    assert status["state"] == "failed"
    assert [task["state"] for task in status["tasks"]] == ["exit status 3"] * 2
    [listed] = json.loads(distlaunch("ls", "-a", "--json", env=state, run_dir=False).stdout)
    assert (listed["state"], listed["exit_status"]) == ("failed", 1)
    assert distlaunch("wait", env=state, run_dir=False).status == 1
    assert json.loads(distlaunch("ls", "--json", env=state, run_dir=False).stdout) == []


def test_descendants_of_several_processes_are_found_in_one_call() -> None:
    script = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print(flush=True); sys.stdin.read()"
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        found = kernel.below([process.pid for process in processes])
        commands = {pid: Path(f"/proc/{below[0]}/comm").read_text().strip() for pid, below in found.items()}
        assert commands == {process.pid: "sleep" for process in processes}
        assert os.getpid() not in found
    finally:
        for process in processes:
            for pid in kernel.below([process.pid])[process.pid]:
                os.kill(pid, 9)
            process.kill()
            process.communicate()


TASK = TaskState(
    task="worker:0",
    node="gpu-a",
    state="training",
    address="10.0.0.1:2222",
    epoch=3,
    step=12_345,
    step_s=0.25,
    own_s=0.0125,
    metrics={"loss": 0.123456},
    cpu=1.5,
    memory=3 << 30,
    gpus=["0", "1"],
)


def test_a_status_row_shows_known_values_and_dashes_for_unknown_ones() -> None:
    status = make_status(TASK, run_id="r", attempt=2, restarts=1)
    assert make_rows(status) == [
        [
            "worker:0",
            "gpu-a",
            "training",
            "10.0.0.1:2222",
            "3",
            "12,345",
            "4",
            "0.1235",
            "150%",
            "3 GiB",
            "0,1",
            "12.5 ms",
        ]
    ]
    assert render_header(status) == "r: running, attempt 2 (1 restart), 3 min 20 s"
    sure = status.model_copy(update={"eta_s": 725.0})
    assert render_header(sure) == "r: running, attempt 2 (1 restart), 3 min 20 s, about 12 min 5 s left"
    empty = TASK.model_copy(update=dict.fromkeys(("address", "epoch", "step", "step_s", "own_s", "cpu", "memory")))
    [row] = make_rows(status.model_copy(update={"tasks": [empty]}))
    assert row[3:7] == ["-"] * 4


def training(*progresses: Progress) -> AttemptState:
    """A running attempt whose tasks have made this progress."""
    state = replace(new_attempt(make_policy({"a": [W0], "b": [W1]}), 0.0), phase=Phase.RUNNING)
    reported = [TaskReported(task, "is training", 0.0, each) for task, each in zip((W0, W1), progresses, strict=False)]
    return replace(state, status={event.task: event for event in reported})


class TestEta:
    FAST = Progress(40, 1, 40, 100.0, 200.0, step_s=0.5, total_steps=100)
    SLOW = replace(FAST, step=21)

    def test_eta_is_that_of_the_slowest_task_since_its_last_step(self) -> None:
        assert estimate_eta_s(training(self.FAST, self.SLOW), 205.0) == 79 * 100.0 / 20 - 5.0
        assert estimate_eta_s(training(self.FAST), 1e6) == 0.0

    def test_eta_uses_the_mean_of_all_steps_not_the_last_step(self) -> None:
        """After a pause of 30 s for a validation, a measurement over one second does not predict the rest."""
        for recent_s in (0.001, 0.5, 30.0):
            assert estimate_eta_s(training(replace(self.FAST, step_s=recent_s)), 200.0) == pytest.approx(
                60 * 100.0 / 39
            )

    def test_eta_after_the_first_step_uses_the_time_of_that_step(self) -> None:
        first = replace(self.FAST, step=1, time=100.0, step_s=2.0)
        assert estimate_eta_s(training(first), 100.0) == 99 * 2.0

    @pytest.mark.parametrize(
        "change", [{"total_steps": None}, {"step_s": None}, {"training": False}, {"first_step": None}], ids=str
    )
    def test_eta_is_unknown_without_steps_their_time_or_their_total(self, change: dict[str, Any]) -> None:
        assert estimate_eta_s(training(replace(self.FAST, **change)), 205.0) is None

    def test_eta_is_unknown_once_training_has_ended_or_is_stopping(self) -> None:
        state = training(self.FAST)
        assert estimate_eta_s(apply(state, TaskExited(W0, TaskExit(0), 201.0)), 205.0) is None
        assert estimate_eta_s(replace(state, phase=Phase.STOPPING), 205.0) is None


GPUS = [
    GpuState(gpu="0", use=0.5, memory=12 << 30, memory_total=80 << 30, power_w=250.6, celsius=64.0),
    GpuState(gpu="1", use=1.0, memory=13 << 30, memory_total=80 << 30),
    GpuState(gpu="GPU-7f", memory=0, memory_total=0),
]
NODE = NodeState(
    node="gpu-a", cores=8, cpu=5.05, memory=10 << 30, memory_total=40 << 30, received_s=1 << 20, sent_s=512, gpus=GPUS
)
STATUS = make_status(
    TASK,
    TASK.model_copy(update={"task": "worker:1"}),
    TASK.model_copy(update={"node": "gpu-b"}),
    run_id="r",
    nodes=[NODE],
)


def test_a_status_row_shows_use_and_memory_of_gpus_if_known() -> None:
    status = STATUS.model_copy(
        update={"tasks": [TASK, *(TASK.model_copy(update={"gpus": names}) for names in (["1"], ["GPU-7f"], ["5"], []))]}
    )
    assert [row[[column.title for column in COLUMNS].index("GPU")] for row in make_rows(status)] == [
        "0,1 75% 25 GiB",
        "1 100% 13 GiB",
        "GPU-7f",
        "5",
        "-",
    ]
    gpu = [column.title for column in COLUMNS].index("GPU")
    assert make_rows(STATUS)[2][gpu] == "0,1"  # the GPUs of another node have the same names


def test_a_node_row_shows_the_memory_share_of_the_run_and_gpus() -> None:
    assert make_node_rows(STATUS) == [
        [
            "gpu-a",
            "5.0 of 8",
            "10 GiB of 40 GiB, run 15%",
            "1 MiB/s in, 512 B/s out",
            "0: 50% 12 GiB of 80 GiB 251 W 64 °C",
        ],
        ["", "", "", "", "1: 100% 13 GiB of 80 GiB"],
        ["", "", "", "", "GPU-7f:"],
    ]
    first = NODE.model_copy(update={"cpu": None, "received_s": None, "sent_s": None, "gpus": [], "memory_total": 0})
    assert make_node_rows(STATUS.model_copy(update={"nodes": [first]})) == [
        ["gpu-a", "-", "10 GiB of 0 B", "-", "-"],
    ]


def test_status_has_a_node_table_only_if_nodes_were_measured() -> None:
    text = "\n".join(render_status(STATUS, [], None))
    assert [line.split()[0] for line in text.split("\n\n")[2].splitlines()][:2] == ["NODE", "gpu-a"]
    assert "NODE  CPU" not in "\n".join(render_status(STATUS.model_copy(update={"nodes": []}), [], None))
    assert max(map(len, text.splitlines())) < 140


ENDED = STATUS.model_copy(update={"state": "failed", "attempt": 1, "restarts": 0, "started": 1000.0, "ended": 1042.0})


@pytest.mark.parametrize(
    ("later_s", "text"),
    [(3.0, "3 s ago"), (2340.0, "39 min ago"), (7500.0, "2 h 5 min ago"), (90_000.0, None)],
)
def test_status_of_an_ended_run_shows_its_duration_and_time_of_end(later_s: float, text: str | None) -> None:
    """Ages count from now, not from the end of the run."""
    now = 1042.0 + later_s
    when = text or time.strftime("%Y-%m-%d %H:%M", time.localtime(1042.0))
    header = f"{ENDED.run_id}: failed, attempt 1, 42 s, ended {when}"
    messages = [(1042.0, Message("note", "Failed"))]
    lines = render_status(ENDED.model_copy(update={"now": now}), messages, None)
    assert lines[0] == header
    assert lines[-1] == f"{when:>16}  Failed"
    lost = ENDED.model_copy(update={"now": now, "state": "lost"})
    assert render_status(lost, [], None)[0].endswith(f": lost, attempt 1, 42 s, last seen {when}")


@pytest.mark.parametrize("room", [60, 79, 80, 100, 120, 200])
def test_status_tables_fit_the_width_by_omitting_whole_columns(room: int) -> None:
    whole, fitting = (render_status(STATUS, [], width) for width in (None, room))
    assert max(map(len, fitting[2:])) <= room
    cells = {cell for line in whole for cell in line.split()}
    for line in fitting[2:]:
        cut = [cell for cell in line.split() if cell not in cells]
        assert all(cell.endswith("…") for cell in cut)  # only the columns that may shrink
    if room == 200:
        assert fitting == whole


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (59.9, "59 s"), (60, "1 min"), (3_599, "59 min 59 s"), (3_600, "1 h"), (90_061, "1 d 1 h")],
)
def test_an_age_is_rendered_with_at_most_two_units(seconds: float, text: str) -> None:
    assert render_age(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (5 << 40, "5 TiB")]
)
def test_a_size_is_rendered_with_a_binary_unit(size: int, text: str) -> None:
    assert render_size(size) == text

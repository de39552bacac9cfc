"""Stacks of all tasks can be shown at any time, even while tasks are blocked in C++, and no task stops for it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from launcher.gang.watch.stacks import StackCollector, parse_stack, render_stacks
from launcher.tasks import TaskId
from tests.harness.processes.commands import distlaunch_command
from tests.harness.processes.stacks import ask, running
from tests.harness.witness import wait_until
from worker_entry.protocol.values import Activity

COVERS = (
    "launcher/gang/watch/stacks.py",
    "launcher/commands",
    "worker_entry/agent/tasks/stacks.py",
    "launcher/controller/requests.py",
)

W0, W1, W2 = (TaskId("worker", index) for index in range(3))
LIBRARY = "/venv/lib/python3.11/site-packages/tensorflow/python/eager/execute.py"
TEXT = f"""Thread 0x00007f11 (most recent call first):
  File "/venv/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f22 (most recent call first):
  File "{LIBRARY}", line 53 in quick_execute
  File "/home/me/train.py", line 41 in step
  File "/home/me/train.py", line 60 in <module>
  File "/x/worker_entry/task/runner.py", line 120 in run
  File "<frozen runpy>", line 88 in _run_code
"""


class TestRendering:
    def test_rendered_stacks_escape_names_and_ignore_oversized_line_numbers(self) -> None:
        odd = TEXT.replace("line 41 in step", f"line {'4' * 5000} in step").replace("train.py", "tr\x1b[2Jain.py")
        shown = render_stacks({W0: odd})
        assert "\x1b" not in shown
        assert "/home/me/tr␛[2Jain.py:60 <module>" in shown

    def test_parsing_very_long_stack_lines_takes_linear_time(self) -> None:
        for line in ("Thread 0x" + "0" * 500_000, "Thread 0x0 (most" * 30_000, '  File "' + '", line 1' * 60_000):
            assert parse_stack(f"{line}\n{line}\n").main == ()

    def test_a_parsed_stack_has_the_main_thread_without_frames_of_distlaunch(self) -> None:
        assert parse_stack(TEXT).main == (
            (LIBRARY, 53, "quick_execute"),
            ("/home/me/train.py", 41, "step"),
            ("/home/me/train.py", 60, "<module>"),
        )

    def test_equal_stacks_are_shown_together_with_the_largest_group_first(self) -> None:
        odd = 'Current thread 0x0 (most recent call first):\n  File "/home/me/train.py", line 9 in load_batch\n'
        assert render_stacks({W0: TEXT, W1: odd, W2: TEXT}).splitlines() == [
            "worker:0, worker:2 are at /home/me/train.py:41 step, in quick_execute of execute.py",
            f"    {LIBRARY}:53 quick_execute",
            "    /home/me/train.py:41 step",
            "    /home/me/train.py:60 <module>",
            "worker:1 is at /home/me/train.py:9 load_batch",
            "    /home/me/train.py:9 load_batch",
        ]

    @pytest.mark.parametrize("text", ["", "nonsense", "Fatal Python error"])
    def test_a_task_without_a_python_stack_is_named(self, text: str) -> None:
        assert render_stacks({W0: text}) == "worker:0 has no Python stack to show"

    def test_stacks_are_collected_from_all_tasks_until_a_time_out(self) -> None:
        collector = StackCollector([W0, W1], 100.0)
        assert collector.texts(101.0) is None
        collector.note(W0, TEXT, Activity())
        assert collector.texts(101.0) is None
        assert collector.texts(110.0) == {W0: TEXT, W1: ""}
        collector.note(W1, TEXT, Activity())
        assert collector.texts(101.0) == {W0: TEXT, W1: TEXT}


def wait_for_logs(folder: Path, text: bytes, count: int) -> None:
    logs = [folder / "run" / "attempt-1" / f"worker-{number}.log" for number in range(count)]
    wait_until(lambda: all(log.exists() and text in log.read_bytes() for log in logs), f"all logs have {text!r}")


WAIT = """
import os, time
def load_batch():
    time.sleep(600)
def step():
    time.sleep(600)
print("ready", flush=True)
load_batch() if os.environ["DISTLAUNCH_TASK"] == "worker:1" else step()
"""


def test_stacks_of_a_running_run_are_shown_without_stopping_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAIT)
    with running(tmp_path, "-n", "3", "train.py"):
        wait_for_logs(tmp_path, b"ready", 3)
        for _ in range(2):
            said = ask(tmp_path)
            assert f"worker:0, worker:2 are at {tmp_path}/train.py:6 step\n" in said
            assert f"worker:1 is at {tmp_path}/train.py:4 load_batch\n" in said
        said_there = (tmp_path / "stderr").read_text()
        assert said_there.count(f"The stacks of all tasks are in {tmp_path}/run/stacks.txt\n") == 2
        assert "worker:1 is at" not in said_there
    assert os.stat(tmp_path / "run" / "stacks.txt").st_mode & 0o777 == 0o600


FORK = """
import os, time
def dream():
    time.sleep(600)
def wait_for_child():
    os.wait()
if os.fork() == 0:
    dream()
print("ready", flush=True)
wait_for_child()
"""


@pytest.mark.slow
def test_stacks_of_child_processes_are_shown_with_their_task(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FORK)
    with running(tmp_path, "-n", "1", "train.py"):
        wait_for_logs(tmp_path, b"ready", 1)
        said = ask(tmp_path)
        where = f"worker:0 is at {tmp_path}/train.py:6 wait_for_child; another thread at {tmp_path}/train.py:4 dream\n"
        assert where in said
        assert "    and in another thread\n" in said


@pytest.mark.slow
def test_stacks_are_printed_even_if_their_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    with running(tmp_path, "-n", "1", "program.py"):
        wait_for_logs(tmp_path, b"here", 1)
        (tmp_path / "run" / "stacks.txt").mkdir()  # a full disk has no room for the file either
        for _ in range(2):
            assert ask(tmp_path).startswith(f"worker:0 is at {tmp_path}/program.py:3 <module>\n")
    assert "cannot write" in (tmp_path / "stderr").read_text()


@pytest.mark.slow
def test_stacks_are_never_written_to_a_file_of_the_program(tmp_path: Path) -> None:
    """A daemon closes the descriptors that it has not opened; later, its own files have their numbers."""
    (tmp_path / "program.py").write_text(
        "import os, time\n"
        "os.closerange(3, 4096)\n"
        "files = [open(f'own-{number}', 'wb') for number in range(300)]\n"
        "if os.fork():\n"
        "    print('here', flush=True)\n"
        "time.sleep(600)\n"
    )
    with running(tmp_path, "-n", "1", "program.py"):
        wait_for_logs(tmp_path, b"here", 1)
        assert ask(tmp_path) == "worker:0 has no Python stack to show\n"
    own = [*tmp_path.glob("own-*")]
    assert len(own) == 300
    assert {path.read_bytes() for path in own} == {b""}


@pytest.mark.slow
def test_sigusr1_to_distlaunch_reports_programs_without_a_python_stack(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "2", "--", "sh", "-c", "echo ready; sleep 600") as process:
        wait_for_logs(tmp_path, b"ready", 2)

        def says_so() -> bool:
            process.send_signal(signal.SIGUSR1)  # repeatedly: tasks may print before their start is reported
            return "worker:0, worker:1 have no Python stack to show" in (tmp_path / "stderr").read_text()

        wait_until(says_so, "it says so")


@pytest.mark.slow
def test_stacks_of_an_ended_or_missing_run_are_refused(tmp_path: Path) -> None:
    subprocess.run(distlaunch_command("local", "--run-dir", "run", "--", "true"), cwd=tmp_path, check=True)
    for name, why in (("./run", "has ended"), ("nothing", "there is no run nothing")):
        asked = subprocess.run(
            distlaunch_command("stacks", name), cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert asked.returncode == 2
        assert why in asked.stderr

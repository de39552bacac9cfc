"""The output for failed runs, through the installed command and with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.witness import assert_none_left, await_none_left, make_mark, marked, wait_until

COVERS = (
    "launcher/errors.py",
    "launcher/failures.py",
    "launcher/tasks.py",
    "launcher/wording.py",
    "launcher/printable.py",
    "launcher/console",
    "launcher/gang",
    "launcher/report",
    "launcher/verdict",
    "launcher/rundir",
    "launcher/sources",
    "launcher/exporters",
    "launcher/controller",
)

pytestmark = pytest.mark.slow

RAISE = str(PROGRAMS / "raise_in.py")
TREE = str(PROGRAMS / "spawn_tree.py")


def write_spec(folder: Path, text: str) -> str:
    path = folder / "spec.yaml"
    path.write_text(text)
    return str(path)


# --- a task fails ---


@pytest.mark.smoke
def test_the_error_names_the_failed_task_its_exception_and_line(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--workers", "3", RAISE, "worker:1")
    assert ran.status == 1
    assert "Error: worker:1 on local exited with status 1 after" in ran.stderr
    assert f"ValueError: no batch of 32   {RAISE}:9" in ran.stderr
    assert "stopped by distlaunch: worker:0, worker:2" in ran.stderr
    assert "worker:1 │ about to fail" in ran.stderr  # the last lines of its log
    assert str(ran.directory / "attempt-1" / "worker-1.log") in ran.stderr
    assert "worker_entry" not in ran.log("worker-1").decode()  # only the user's frames
    verdict = ran.report["attempts"][0]["verdict"]
    assert (verdict["reference"], verdict["task"]) == ("task-failed", "worker:1")
    crash = ran.report["attempts"][0]["tasks"][1]["crash"]
    assert (crash["exception"], crash["line"]) == ("ValueError", 9)


@pytest.mark.smoke
def test_a_task_failure_stops_the_process_trees_of_all_other_tasks(distlaunch: Distlaunch) -> None:
    mark = make_mark()
    ran = distlaunch("local", "--workers", "3", TREE, "worker:1", "3", env=mark)
    assert ran.status == 1
    assert_none_left(mark)
    attempt = ran.report["attempts"][0]
    assert attempt["tasks"][1]["exit_code"] == 3
    assert [task["exit_signal"] for task in attempt["tasks"]] == [9, None, 9]
    assert attempt["processes_left"] == 0
    assert attempt["killed"] >= 8


def test_tasks_that_exit_on_sigterm_are_not_killed_after_a_failure(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--workers", "3", RAISE, "worker:2")
    attempt = ran.report["attempts"][0]
    assert attempt["killed"] == 0


def test_a_task_failure_stops_the_other_tasks_in_portable_mode(distlaunch: Distlaunch) -> None:
    """The code path on macOS: no subreaper, no pidfd, no /proc."""
    mark = make_mark()
    ran = distlaunch("local", "--workers", "3", RAISE, "worker:1", env={**mark, "DISTLAUNCH_PORTABLE": "1"})
    assert ran.status == 1
    assert "Error: worker:1 on local exited with status 1 after" in ran.stderr
    assert "stopped by distlaunch: worker:0, worker:2" in ran.stderr
    assert_none_left(mark)


def test_a_task_stopped_after_raising_is_reported_with_its_exception(distlaunch: Distlaunch, tmp_path: Path) -> None:
    """The interpreter shuts down slowly; here it lasts until distlaunch stops it."""
    (tmp_path / "train.py").write_text(
        "import atexit, os, time\n"
        "def wait_for(name):\n"
        "    while not os.path.exists(name): time.sleep(0.01)\n"
        "if os.environ['DISTLAUNCH_TASK'] == 'worker:0':\n"
        "    atexit.register(wait_for, 'second')\n"
        "    atexit.register(open, 'first', 'w')\n"
        "    raise ValueError('the cause')\n"
        "wait_for('first')\n"
        "atexit.register(time.sleep, 600)\n"
        "atexit.register(open, 'second', 'w')\n"
        "raise KeyError('what follows')\n"
    )
    ran = distlaunch("local", "train.py")
    assert "  ValueError: the cause   " in ran.stderr
    later = rf"  worker:1 failed \d\.\d s later: KeyError: 'what follows'   {tmp_path}/train\.py:11\n"
    assert re.search(later, ran.stderr), ran.stderr
    assert "  worker:1  raised KeyError; SIGTERM (signal 15), stopped by distlaunch\n" in ran.stderr
    first, second = ran.report["attempts"][0]["tasks"]
    assert (first["stopped_by_us"], second["stopped_by_us"]) == (False, True)
    assert second["crash"]["time"] > first["crash"]["time"]


def test_the_error_names_the_signal_that_killed_a_task(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--workers", "1", "--", "sh", "-c", "kill -SEGV $$")
    assert ran.status == 1
    assert "worker:0 on local was killed by SIGSEGV (signal 11" in ran.stderr
    task = ran.report["attempts"][0]["tasks"][0]
    assert (task["exit_code"], task["exit_signal"]) == (None, 11)


def test_leftover_processes_are_stopped_and_counted_after_a_successful_run(distlaunch: Distlaunch) -> None:
    mark = make_mark()
    ran = distlaunch("local", "--workers", "1", "--", "sh", "-c", "setsid sleep 600 & exit 0", env=mark)
    assert ran.status == 0
    assert_none_left(mark)
    assert ran.report["attempts"][0]["left_behind"] == 1
    assert "0 processes left on this machine (1 process that outlived its task was stopped)" in ran.stderr


def test_the_start_timeout_error_names_tasks_without_an_open_port(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--workers", "2", "--set", "timeouts.start_s=1", "--", "sleep", "600")
    assert ran.status == 3
    first, second = (task["address"].rpartition(":")[2] for task in ran.report["attempts"][0]["tasks"])
    assert "Error: no cluster within 1 s: " in ran.stderr
    waiting = f"waiting for worker:0 on local (port {first} not open), worker:1 on local (port {second} not open)"
    assert waiting in ran.stderr
    assert "[start-timeout]" in ran.stderr


# --- the user stops it ---


class Running:
    """A running `distlaunch up` with two process trees that are hard to kill."""

    def __init__(self, tmp_path: Path) -> None:
        self.mark = make_mark()
        self.directory = tmp_path / "run"
        self.spec = write_spec(
            tmp_path,
            "nodes: [{host: local, tasks: {worker: 2}}]\n"
            f"program: {{script: {TREE}}}\n"
            "timeouts: {stop_grace_s: 1}\n",
        )
        with (tmp_path / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                distlaunch_command("up", "--run-dir", str(self.directory), self.spec),
                env={**os.environ, **self.mark},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._stderr = tmp_path / "stderr"
        assert self.process.stdout is not None
        for _ in range(2):
            assert b"the tree stands" in self.process.stdout.readline()
        tree = psutil.Process(self.process.pid)
        self.guardian = tree.children()[0]
        self.agent = self.guardian.children()[0]
        assert len(marked(self.mark)) == 3 + 2 * 4

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def finish(self) -> int:
        return self.process.wait(timeout=60)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    started = Running(tmp_path)
    try:
        yield started
    finally:
        for process in marked(started.mark):
            process.kill()
        started.process.wait()
        assert started.process.stdout is not None
        started.process.stdout.close()


def test_sigint_stops_all_processes_and_the_report_is_written(running: Running) -> None:
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 130
    assert_none_left(running.mark)
    report = json.loads((running.directory / "report.json").read_text())
    assert (report["outcome"], report["exit_status"]) == ("interrupted", 130)
    assert report["attempts"][0]["processes_left"] == 0
    assert "Interrupting all tasks, 1 s grace" in running.stderr


@pytest.mark.smoke
def test_a_second_ctrl_c_kills_tasks_without_waiting_for_the_grace_period(tmp_path: Path) -> None:
    spec = write_spec(
        tmp_path, f"nodes: [{{host: local}}]\nprogram: {{script: {TREE}}}\ntimeouts: {{stop_grace_s: 600}}\n"
    )
    mark = make_mark()
    process = subprocess.Popen(
        distlaunch_command("up", "--run-dir", str(tmp_path / "run"), spec),
        cwd=tmp_path,
        env={**os.environ, **mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "the tree stands" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        for line in process.stderr:
            if "Ctrl-C again kills them" in line:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert_none_left(mark)


# --- distlaunch itself dies ---


@pytest.mark.smoke
def test_no_process_is_left_after_sigkill_of_the_controller(running: Running) -> None:
    running.process.kill()
    running.finish()
    await_none_left(running.mark)


@pytest.mark.parametrize("victim", ["agent", "guardian"])
def test_no_process_is_left_after_sigkill_of_the_agent_or_guardian(running: Running, victim: str) -> None:
    getattr(running, victim).kill()
    assert running.finish() == 3
    assert_none_left(running.mark)
    assert "[node-lost]" in running.stderr
    assert "0 processes left on this machine" in running.stderr


def test_no_process_is_left_after_sigkill_of_both_agent_and_guardian(running: Running) -> None:
    for process in (running.guardian, running.agent):
        process.suspend()
    for process in (running.guardian, running.agent):
        process.kill()
    assert running.finish() == 3
    assert_none_left(running.mark)


def test_the_controller_handles_ctrl_c_while_its_agent_is_suspended(running: Running) -> None:
    running.agent.suspend()
    running.process.send_signal(signal.SIGINT)
    wait_until(lambda: "Ctrl-C again kills them" in running.stderr, "distlaunch handles the first signal")
    running.process.send_signal(signal.SIGINT)
    wait_until(lambda: "Killing all tasks" in running.stderr, "distlaunch handles the second signal")
    running.agent.resume()
    assert running.finish() == 130
    assert_none_left(running.mark)


# --- the run cannot start ---


@pytest.mark.smoke
def test_a_missing_script_is_reported_with_a_suggestion_and_creates_no_run(
    distlaunch: Distlaunch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    ran = distlaunch("local", "tarin.py")
    assert ran.status == 2
    missing = f"Error: cannot read the script {tmp_path}/tarin.py: No such file or directory [no-program]\n"
    assert ran.stderr == f"{missing}  did you mean train.py?\n"
    assert not ran.directory.exists()


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        (["local", "broken.py"], "syntax-error"),
        (["local", "--", "./plain.py"], "not-executable"),
        (["local", "--", "no-such-program"], "no-program"),
        (["local", "empty"], "no-program"),
        (["local", "-n", "2", "--gpus-per-worker", "40", "plain.py"], "too-few-gpus"),
        (["local", "--set", "working_directory=/nowhere", "plain.py"], "no-working-directory"),
        (["up", "-H", "local", "missing.py"], "no-program"),
        (["up", "--no-check", "spec.yaml"], "no-program"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_unstartable_program_is_rejected_before_a_run_is_created(
    distlaunch: Distlaunch, tmp_path: Path, words: list[str], reference: str
) -> None:
    (tmp_path / "broken.py").write_text("if x\n")
    (tmp_path / "plain.py").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "spec.yaml").write_text(
        "nodes: [{host: gpu-a}, {host: local, address: 10.0.0.1}]\nprogram: {script: missing.py}\n"
    )
    ran = distlaunch(*words)
    assert ran.status == 2
    assert f" [{reference}]\n" in ran.stderr
    assert not ran.directory.exists()


def test_another_interpreter_checks_the_syntax_of_a_script_itself(distlaunch: Distlaunch, tmp_path: Path) -> None:
    """A program may be written for a newer Python than the one that runs distlaunch."""
    (tmp_path / "broken.py").write_text("if x\n")
    (tmp_path / "python").symlink_to(sys.executable)
    ran = distlaunch("local", "--python", "./python", "broken.py")
    assert ran.status == 2
    assert "[syntax-error]" in ran.stderr
    assert [task["started"] for task in ran.report["attempts"][0]["tasks"]] == [None, None]


def test_a_zip_application_runs_as_a_script(distlaunch: Distlaunch, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "program.pyz", "w") as file:
        file.writestr("__main__.py", "print('here')\n")
    ran = distlaunch("local", "-n", "1", "program.pyz")
    assert (ran.status, ran.stdout) == (0, "worker:0 │ here\n")


class TestScriptInTheFolderOfTheSpec:
    def ran(self, distlaunch: Distlaunch, folder: Path, spec: str = "") -> str:
        (folder / "specs").mkdir()
        (folder / "specs" / "train.py").touch()
        (folder / "specs" / "cluster.yaml").write_text(
            f"nodes: [{{host: local}}]\nprogram: {{script: train.py}}\n{spec}"
        )
        ran = distlaunch("up", "--no-check", "specs/cluster.yaml")
        assert ran.status == 2
        assert "[no-program]" in ran.stderr
        return ran.stderr

    def test_the_missing_script_error_finds_a_script_next_to_the_spec(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        folder = tmp_path / "specs"
        hint = f"  train.py is beside the spec: change to {folder}, or set `working_directory: {folder}`\n"
        assert self.ran(distlaunch, tmp_path).endswith(hint)

    def test_the_missing_script_error_has_no_hint_if_working_directory_is_set(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        assert "beside" not in self.ran(distlaunch, tmp_path, "working_directory: /\n")


def test_a_syntax_error_in_a_script_is_reported_with_its_line(distlaunch: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\nif x\n    pass\n")
    ran = distlaunch("local", "broken.py")
    assert ran.status == 2
    assert "broken.py:2: expected ':' [syntax-error]" in ran.stderr


NOT_PYTHON = "if true; then\necho hi; fi\n"


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (
            ["python", "train.py", "--epochs", "3"],
            ["`distlaunch local -- python train.py --epochs 3` ", "or simply `distlaunch local train.py --epochs 3`\n"],
        ),
        (["python3", "-m", "train"], ["`distlaunch local -- python3 -m train` ", "`distlaunch local -m train`\n"]),
        (["python", "-c", "pass"], ["`distlaunch local -- python -c pass` (`command:` in a spec)\n"]),
        (["bash", "run me.sh"], ["bash is a command, not a script: ", "`distlaunch local -- bash 'run me.sh'` "]),
        (["run.sh"], ["run.sh is not a Python script: ", "`distlaunch local -- ./run.sh` (`command:` in a spec)\n"]),
        (["./run.sh", *"abcdef"], ["`distlaunch local -- ./run.sh a b c …` "]),
        (["plain.sh"], ["`distlaunch local -- sh plain.sh` "]),
        (["/bin/ls"], ["/bin/ls is not a Python script: ", "`distlaunch local -- /bin/ls` "]),
        (
            ["--", "run.sh"],
            ["no program 'run.sh' on PATH [no-program]\n  give its path: ./run.sh, or extend PATH\n"],
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_a_command_given_as_a_script_gets_a_hint_to_run_it(
    distlaunch: Distlaunch, tmp_path: Path, words: list[str], hints: list[str]
) -> None:
    (tmp_path / "plain.sh").write_text(NOT_PYTHON)
    (tmp_path / "run.sh").write_text(f"#!/bin/sh\n{NOT_PYTHON}")
    (tmp_path / "run.sh").chmod(0o755)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = distlaunch("local", *words, env={"PATH": path})
    assert ran.status == 2
    for hint in hints:
        assert hint in ran.stderr


def test_a_non_executable_program_is_a_usage_error_with_a_hint(distlaunch: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    ran = distlaunch("local", "--", "./tool")
    assert ran.status == 2
    assert "tool is not executable [not-executable]" in ran.stderr
    assert "chmod +x" in ran.stderr


def test_an_unknown_command_is_a_usage_error(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--", "no-such-program")
    assert ran.status == 2
    assert "no program 'no-such-program' on PATH [no-program]" in ran.stderr


def test_a_missing_interpreter_is_a_usage_error(distlaunch: Distlaunch, tmp_path: Path) -> None:
    ran = distlaunch("local", "--python", str(tmp_path / "python"), RAISE, "none")
    assert ran.status == 2
    assert f"Error: no Python interpreter at {tmp_path / 'python'}" in ran.stderr


def test_an_interpreter_that_is_not_python_makes_its_node_unusable(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--python", "/bin/true", RAISE, "none")
    assert ran.status == 3
    assert "Error: node local cannot be used: " in ran.stderr
    assert "no start marker" in ran.stderr


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python without TensorFlow."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return str(folder / "bin" / "python")


def test_the_demo_without_tensorflow_is_a_usage_error_with_an_install_command(
    distlaunch: Distlaunch, bare_python: str
) -> None:
    ran = distlaunch("local", "--python", bare_python)
    assert ran.status == 2
    assert "Error: TensorFlow is not installed for" in ran.stderr
    assert f"  run: {bare_python} -m pip install tensorflow; or name a Python that has it with --python\n" in ran.stderr


def test_missing_tensorflow_error_has_a_hint(distlaunch: Distlaunch, bare_python: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import tensorflow as tf\n")
    ran = distlaunch("local", "--python", bare_python, "train.py")
    assert ran.status == 1
    assert "ModuleNotFoundError: No module named 'tensorflow'" in ran.stderr
    assert "install TensorFlow for this Python, or name the one that has it with --python" in ran.stderr


def test_the_error_for_an_occupied_port_names_the_process_holding_it(distlaunch: Distlaunch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        spec = write_spec(tmp_path, f"nodes: [{{host: local, port: {port}}}]\nprogram: {{command: [echo, started]}}\n")
        ran = distlaunch("up", spec)
    assert ran.status == 3
    assert f"worker:0: port {port} is held by pid {os.getpid()} (" in ran.stderr
    assert "[port-taken]" in ran.stderr
    assert ran.stdout == ""


def test_an_explicit_port_is_in_the_address_of_its_task(distlaunch: Distlaunch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    spec = write_spec(tmp_path, f"nodes: [{{host: local, port: {port}}}]\nprogram: {{command: ['true']}}\n")
    ran = distlaunch("up", spec)
    assert ran.status == 0
    assert ran.report["attempts"][0]["tasks"][0]["address"] == f"127.0.0.1:{port}"


def test_a_full_disk_is_reported_and_no_process_is_left(distlaunch: Distlaunch, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root can mount a small file system")
    try:
        mark = make_mark()
        program = "import sys\nwhile True: sys.stdout.write('x' * 4096 + '\\n')\n"
        (tmp_path / "fill.py").write_text(program)
        done = subprocess.run(
            distlaunch_command("local", "--workers", "2", "--run-dir", str(disk / "run"), "fill.py"),
            cwd=tmp_path,
            env={**os.environ, **mark},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode in (1, 3)
        assert "No space left on device" in done.stderr
        assert_none_left(mark)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# --- every run ---


def test_concurrent_runs_never_share_a_port(tmp_path: Path) -> None:
    script = 'touch "$0/$DISTLAUNCH_RUN_ID-$DISTLAUNCH_TASK"; while [ $(ls "$0" | wc -l) -lt 12 ]; do sleep 0.05; done'
    wait_for_all = ("sh", "-c", script, str(tmp_path / "tasks"))
    (tmp_path / "tasks").mkdir()
    processes = [
        subprocess.Popen(
            distlaunch_command("local", "--workers", "4", "--run-dir", str(tmp_path / f"run-{i}"), "--", *wait_for_all),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for i in range(3)
    ]
    assert [process.wait(timeout=90) for process in processes] == [0, 0, 0]
    addresses = [
        task["address"]
        for i in range(3)
        for task in json.loads((tmp_path / f"run-{i}" / "report.json").read_text())["attempts"][0]["tasks"]
    ]
    assert len(set(addresses)) == 12


def test_a_single_task_gets_no_tf_config_from_the_shell(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--workers", "1", "--", "sh", "-c", "echo ${TF_CONFIG-unset}", env={"TF_CONFIG": "{}"})
    assert ran.stdout == "worker:0 │ unset\n"


@pytest.mark.smoke
def test_the_files_of_a_run_are_private(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--workers", "2", "--", "true")
    files = [ran.directory, *ran.directory.rglob("*")]
    assert {path.name for path in files} >= {"plan.json", "spec.json", "report.json", "worker-0.log", "worker-1.log"}
    for path in files:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.smoke
def test_the_last_lines_of_a_run_show_exit_statuses_outcome_and_folder(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--workers", "2", "--", "true")
    *_, first, second, left, outcome, place = ran.stderr.splitlines()
    assert (first, second) == ("  worker:0  exit status 0", "  worker:1  exit status 0")
    assert left == "  0 processes left on this machine"
    assert outcome.startswith("Succeeded in ")
    assert place == f"Logs: {ran.directory} · page: distlaunch report"

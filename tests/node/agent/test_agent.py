"""The node agent, addressed as a controller does: frames over the stdin and stdout of a real process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.apart import linux
from tests.harness.hosts import loopback
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.processes.agent_client import ENTRY, PORTS, Client, command
from tests.harness.rules.second_chance import assert_same_bytes
from tests.harness.witness import marked, wait_until
from worker_entry.agent.tasks.log import TaskLog
from worker_entry.protocol.framing import encode
from worker_entry.protocol.messages import (
    Broken,
    Empty,
    Exited,
    Listening,
    Message,
    Noted,
    Prepared,
    Ready,
    Refused,
    Returned,
    Started,
    Status,
)
from worker_entry.protocol.orders import VERSION, Beat, Goodbye, Hello, Inspect, Preload, Prepare, Start, Stop
from worker_entry.protocol.values import CrashRecord, Problem, Program, SourceLine, TaskExit, TaskRequest, TaskStart
from worker_entry.system.files import FilePart
from worker_entry.task.status_file import OUT_OF_THE_WAY

LOOK = str(PROGRAMS / "task_look.py")
SERVE = str(PROGRAMS / "task_serve.py")
RAISE = str(PROGRAMS / "task_raise.py")
RSS_LIMIT = 64 << 20
Make = Callable[..., Client]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Starts agents; asserts at the end that no process of theirs is left, and that none had a bug."""
    clients: list[Client] = []

    def start(*, directory: Path | None = None, **options: Any) -> Client:
        clients.append(Client(directory or tmp_path / "run", **options))
        return clients[-1]

    yield start
    for errors in [client.close() for client in clients]:
        assert "Traceback" not in errors, errors


@pytest.fixture
def client(make: Make) -> Client:
    return make()


@pytest.fixture(params=[False, True], ids=["native", "portable"])
def either(request: pytest.FixtureRequest, make: Make) -> Client:
    """An agent with this system's own means, and one with the portable fallback."""
    return make(env={"DISTLAUNCH_PORTABLE": "1"} if request.param else {})


def script(task: str, path: str, *args: str, **options: Any) -> TaskStart:
    return TaskStart(task, Program("script", path, list(args)), **options)


def look(client: Client, start: TaskStart) -> dict[str, Any]:
    """Starts `task_look.py` in this way; returns its view of itself."""
    client.start(start)
    assert client.expect(Exited).exit == TaskExit(code=0)
    seen: dict[str, Any] = json.loads((client.directory / "attempt-1" / "worker-0.log").read_text())
    return seen


# --- the greeting ---


def test_an_agent_answers_hello_with_the_facts_of_its_node(make: Make) -> None:
    client = make(env={"CUDA_VISIBLE_DEVICES": "3,5"})
    before = time.time()
    ready = client.greet()
    assert ready.version == VERSION
    assert (ready.hostname, ready.executable) == (socket.gethostname(), sys.executable)
    assert ready.python == sys.version.split()[0]
    assert before <= ready.time <= time.time()
    assert ready.cores == len(psutil.Process().cpu_affinity() or [])
    assert ready.gpus == ["3", "5"]
    assert ready.tensorflow == installed_tensorflow()
    assert psutil.Process(ready.pid).ppid() == client.process.pid  # the guardian


def installed_tensorflow() -> str | None:
    from importlib import metadata

    for name in ("tensorflow", "tensorflow-cpu", "tf-nightly"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def test_the_run_folder_is_created_with_its_parents_and_is_private(make: Make, tmp_path: Path) -> None:
    client = make(directory=tmp_path / "new" / "newer" / "run")
    client.cwd = tmp_path
    client.greet()
    for path in (tmp_path / "new", tmp_path / "new" / "newer", client.directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_an_agent_that_cannot_create_the_run_folder_reports_why_and_exits(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    client = make(directory=tmp_path / "file" / "run")
    client.send(client.hello(), Beat(1.0, 0))
    problem = client.expect(Broken).problem
    assert problem.reference == "run-directory"
    assert problem.message == f"{tmp_path}/file: Not a directory"
    client.read_to_the_end()
    assert client.received(Broken) == []  # sent once, although a second message arrived
    assert client.wait() == 1


@linux
def test_an_agent_that_cannot_write_to_the_run_folder_reports_why_and_exits(make: Make, tmp_path: Path) -> None:
    client = make(directory=Path("/sys"))  # not even root can create a file here
    client.cwd = tmp_path
    client.greet()
    client.send(Prepare(1, [TaskRequest("worker:0", Program("command", "true"))], *PORTS))
    client.expect(Prepared)
    client.send(Start(1, [command("worker:0", "true")]))
    problem = client.expect(Broken).problem
    assert (problem.reference, problem.task) == ("start-failed", "worker:0")
    assert "/sys/attempt-1" in problem.message
    assert client.wait() == 1


# --- a controller that is broken, or of another version ---


def long_task() -> TaskStart:
    return command("worker:0", "sleep", "600")


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"ls -la\n", "not a header: b'ls -la'"),
        (b"\xff" * 50_000 + b"\n", "not a header"),
        (b"\xff" * 100_000, "a header of more than 65536 bytes"),
        (b'{"type":"Shout"}\n', "unknown frame type 'Shout'"),
        (b'{"type":"Stop","grace_s":NaN}\n', "Stop.grace_s: nan is out of range"),
        (b'{"type":"Prepare","attempt":2,"tasks":5,"first_port":1,"last_port":2}\n', "Prepare.tasks: expected"),
        (encode(Empty(1, 0, 0)), "Empty, which only agents send"),
        (encode(Hello(VERSION, "other", "/tmp/other", "/", 60.0, stream_logs=False)), "a second Hello"),
        (encode(Prepare(2, [], 1, 2)), "Prepare while attempt 1 is running"),
        (
            encode(Start(1, [long_task(), command("worker:1", "true")])),
            "Start of tasks that were not prepared: worker:0",
        ),
    ],
)
def test_an_invalid_frame_is_reported_and_stops_the_tasks_and_the_agent(client: Client, sent: bytes, said: str) -> None:
    client.greet()
    client.start(long_task())
    client.send_raw(sent)
    problem = client.expect(Broken).problem
    assert problem.reference == "protocol-error"
    assert said in problem.message
    assert client.expect(Exited).exit == TaskExit(signal=signal.SIGTERM)
    client.expect(Empty)
    client.read_to_the_end()
    assert client.wait() == 1
    client.expect_nothing_left()


def test_a_repeated_start_order_does_not_start_the_task_again(client: Client) -> None:
    """A controller that takes over cannot know whether its predecessor's order has arrived."""
    client.greet()
    [pid] = client.start(long_task()).values()
    client.send(Start(1, [long_task()]), Stop(0.0))
    client.expect(Empty)
    assert client.received(Started) == []
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("first", [Prepare(1, [], 1, 2), Start(1, []), Stop(1.0), Goodbye()])
def test_an_agent_refuses_orders_before_hello(client: Client, first: Message) -> None:
    client.send(first)
    assert client.expect(Broken).problem.message.endswith(f"{type(first).__name__} before Hello")
    client.read_to_the_end()
    assert client.wait() == 1


def test_another_protocol_version_is_refused_with_both_versions_named(client: Client) -> None:
    client.send(client.hello(version=VERSION + 1))
    message = client.expect(Broken).problem.message
    assert f"version {VERSION + 1} of the protocol; this agent speaks {VERSION}" in message
    client.read_to_the_end()
    assert client.wait() == 1


@pytest.mark.parametrize("ports", [(0, 10), (10, 65536), (-5, 10)])
def test_a_prepare_order_with_an_impossible_port_range_is_refused(client: Client, ports: tuple[int, int]) -> None:
    client.greet()
    client.send(Prepare(1, [], *ports))
    assert client.expect(Broken).problem.reference == "protocol-error"


@pytest.mark.parametrize(
    "start",
    [
        Start(1, [command("worker:1", "true")]),
        Start(2, [command("worker:0", "true")]),
        Start(1, [command("worker:0", "true"), command("worker:0", "true")]),
    ],
    ids=["another task", "another attempt", "twice"],
)
def test_only_prepared_tasks_are_started(client: Client, start: Start) -> None:
    client.greet()
    client.send(Prepare(1, [TaskRequest("worker:0", Program("command", "true"))], *PORTS))
    client.expect(Prepared)
    client.send(start)
    assert client.expect(Broken).problem.message.startswith("the agent was sent Start of tasks that were not prepared")
    client.read_to_the_end()
    assert client.received(Started) == []


@pytest.mark.parametrize("env", [{}, {"A": "null\0byte"}], ids=["valid", "null byte"])
def test_an_unused_preload_ends_with_the_agent(client: Client, env: dict[str, str]) -> None:
    (client.cwd / "train.py").write_text("import tensorflow\n")
    client.greet()
    client.send(Preload(Program("script", "train.py"), env, [], ["json"], keep=True))
    client.send(Goodbye())
    client.read_to_the_end()
    assert client.wait() == 0
    assert client.close() == ""


@pytest.mark.parametrize("kind", ["script", "module", "command"])
@pytest.mark.parametrize("name", ["null\0byte", "\ud83d"])
def test_a_program_with_an_invalid_name_does_not_break_the_agent(client: Client, kind: str, name: str) -> None:
    client.greet()
    client.send(Preload(Program(kind, name), {}, [], [], keep=False))
    client.send(Prepare(1, [TaskRequest("worker:0", Program(kind, name))], *PORTS))
    if kind == "module":
        client.expect(Prepared)
    else:
        assert client.expect(Refused).problems[0].reference == "no-program"


@pytest.mark.parametrize("name", ["null\0byte", "\ud83d"])
def test_an_inspect_order_with_an_invalid_path_is_refused(client: Client, name: str) -> None:
    client.greet()
    client.send(Inspect(Program("script", "train.py"), str(client.directory), f"mark-{name}"))
    assert "is not a path" in client.expect(Broken).problem.message
    client.read_to_the_end()
    assert client.wait() == 1


def test_an_agent_answers_endless_garbage_with_one_error(client: Client) -> None:
    """If it answered each piece, the agent of a broken controller would grow without bound."""
    agent = psutil.Process(client.greet().pid)
    with contextlib.suppress(BrokenPipeError):
        for _ in range(200):
            client.send_raw(b"\n" * 65536)
            with contextlib.suppress(psutil.Error):
                assert agent.memory_info().rss < RSS_LIMIT
    assert client.expect(Broken).problem.reference == "protocol-error"
    client.read_to_the_end()
    assert client.received(Broken) == []
    assert client.wait() == 1


# --- before the start ---


@linux
def test_a_refused_attempt_reports_all_problems_at_once(client: Client, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "null.py").write_bytes(b"x = 1\0")
    client.greet()
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        programs = [
            ("script", "missing.py"),
            ("script", "wrong.py"),
            ("command", "./plain"),
            ("command", "distlaunch-no-such-command"),
            ("command", "./absent"),
            ("script", "folder"),
            ("script", "null.py"),
            ("script", "nul\0in its name.py"),
            ("module", "worker_entry.demo.train"),
        ]
        tasks = [
            TaskRequest(f"worker:{index}", Program(*program), port if index == 0 else 0)
            for index, program in enumerate(programs)
        ]
        client.send(Prepare(1, tasks, PORTS[0], PORTS[0]))
        problems = client.expect(Refused).problems
    told = {(problem.task, problem.reference, problem.message) for problem in problems}
    name = Path("/proc/self/comm").read_text().strip()
    assert told >= {
        ("worker:0", "no-program", f"cannot read the script {tmp_path}/missing.py: No such file or directory"),
        ("worker:1", "syntax-error", f"{tmp_path}/wrong.py:2: invalid syntax"),
        ("worker:2", "not-executable", f"{tmp_path}/./plain is not executable"),
        ("worker:3", "no-program", "no program 'distlaunch-no-such-command' on PATH"),
        ("worker:4", "no-program", f"there is no program {tmp_path}/./absent"),
        ("worker:5", "no-program", f"{tmp_path}/folder is a folder without a __main__.py"),
        ("worker:0", "port-taken", f"port {port} is held by pid {os.getpid()} ({name})"),
        ("worker:2", "no-free-port", f"no free port is left in {PORTS[0]}-{PORTS[0]}"),
    }
    assert {"worker:6", "worker:7"} <= {problem.task for problem in problems}
    client.send(Goodbye())
    client.read_to_the_end()
    assert client.received(Started) == []
    assert client.wait() == 0


def test_a_missing_working_directory_is_reported(client: Client, tmp_path: Path) -> None:
    client.cwd = tmp_path / "gone"
    client.greet()
    client.send(Prepare(1, [TaskRequest("worker:0", Program("command", "true"))], *PORTS))
    [problem] = client.expect(Refused).problems
    assert problem == Problem(
        "no-working-directory", f"the working directory {tmp_path}/gone does not exist", "", "worker:0"
    )


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def test_a_refused_attempt_holds_no_port_and_a_valid_one_can_follow(client: Client) -> None:
    port = next(filter(is_free, loopback.ports()))  # connections of earlier tests keep some ports for a minute
    client.greet()
    wrong = TaskRequest("worker:0", Program("command", "distlaunch-no-such-command"))
    client.send(Prepare(1, [wrong], port, port))
    client.expect(Refused)
    assert is_free(port)
    client.send(Prepare(1, [TaskRequest("worker:0", Program("command", "true"))], port, port))
    assert client.expect(Prepared) == Prepared(1, {"worker:0": port})
    client.send(Start(1, [command("worker:0", "true")]))
    assert client.expect(Exited).exit == TaskExit(code=0)


def test_unusual_but_valid_programs_are_accepted_without_a_warning(client: Client, tmp_path: Path) -> None:
    (tmp_path / "warns.py").write_text("x = '\\d'  # a SyntaxWarning\n")
    (tmp_path / "deep.py").write_text("x = " + "-" * 100_000 + "1\n")  # perhaps too deep, but Python decides
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    subprocess.run(
        [sys.executable, "-m", "zipapp", "package", "-o", "app.pyz", "-p", "/usr/bin/env python3"],
        cwd=tmp_path,
        check=True,
    )
    client.greet()
    scripts = ["warns.py", "deep.py", "latin.py", "package", "app.pyz"]
    tasks = [TaskRequest(f"worker:{index}", Program("script", target)) for index, target in enumerate(scripts)]
    client.send(Prepare(1, tasks, *PORTS))
    assert set(client.expect(Prepared).ports) == {f"worker:{index}" for index in range(5)}
    assert client.close() == ""  # no warning of the user's program in the agent's own errors


# --- a task's life ---


def test_the_start_the_open_port_and_the_exit_of_a_task_are_reported(client: Client) -> None:
    client.greet()
    client.send(Prepare(1, [TaskRequest("worker:0", Program("script", SERVE))], *PORTS))
    port = client.expect(Prepared).ports["worker:0"]
    before = time.time()
    client.send(Start(1, [script("worker:0", SERVE, str(port))]))
    started = client.expect(Started)
    listening = client.expect(Listening)
    assert before <= started.time <= listening.time <= time.time()
    assert psutil.Process(started.pid).ppid() != client.process.pid
    client.send(Stop(10.0))
    ended = client.expect(Exited)
    assert (ended.task, ended.exit, ended.crash) == ("worker:0", TaskExit(signal=signal.SIGTERM), None)
    assert ended.time >= listening.time
    assert client.expect(Empty) == Empty(1, 0, 0)


def test_a_port_is_not_reported_open_before_the_task_listens(client: Client) -> None:
    client.greet()
    tasks = [command("worker:0", "sleep", "600"), command("worker:1", sys.executable, SERVE)]
    client.send(Prepare(1, [TaskRequest(task.task, task.program) for task in tasks], *PORTS))
    port = client.expect(Prepared).ports["worker:1"]
    client.send(Start(1, [tasks[0], command("worker:1", sys.executable, SERVE, str(port))]))
    assert client.expect(Listening).task == "worker:1"  # the agent has checked the other task as often
    assert client.received(Listening) == []


def test_the_exit_of_a_task_is_reported_with_its_time_while_others_run(client: Client) -> None:
    client.greet()
    before = time.time()
    client.start(command("worker:0", "sh", "-c", "exit 7"), command("worker:1", "sleep", "600"))
    ended = client.expect(Exited)
    assert (ended.task, ended.exit) == ("worker:0", TaskExit(code=7))
    assert before - 1 < ended.time < time.time() + 1  # the node's clock need not be read at the same moment as ours


def test_a_crash_is_reported_with_the_line_of_the_user_program(client: Client) -> None:
    client.greet()
    before = time.time()
    client.start(script("worker:0", RAISE))
    ended = client.expect(Exited)
    assert ended.exit == TaskExit(code=1)
    assert ended.crash is not None
    assert before <= ended.crash.time <= ended.time
    place = SourceLine(RAISE, 5)
    assert ended.crash == CrashRecord(ended.crash.time, "ValueError", "no batch of 32", RAISE, 5, None, place)


@linux
def test_progress_of_all_tasks_is_reported_before_the_exit_of_one(client: Client, tmp_path: Path) -> None:
    """The end may be a failure, after which a controller stops the attempt and ignores the progress of its tasks."""
    go, reported, program = tmp_path / "go", tmp_path / "reported", tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "from worker_entry import progress\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        f"progress.report(); open({str(reported)!r}, 'w'); time.sleep(600)\n"
    )
    ready = client.greet()
    fails = command("worker:1", "sh", "-c", f"until [ -e {reported} ]; do sleep 0.01; done; exit 7")
    pids = client.start(script("worker:0", str(program)), fails)
    os.kill(ready.pid, signal.SIGSTOP)  # both happen while the agent is stopped
    go.touch()
    wait_until(lambda: psutil.Process(pids["worker:1"]).status() == psutil.STATUS_ZOMBIE, "worker:1 has failed")
    os.kill(ready.pid, signal.SIGCONT)
    while not client.received(Exited):
        client.receive(20.0)
    kinds = [
        type(message)
        for message in client.in_order()
        if isinstance(message, Exited) or (isinstance(message, Status) and message.status.progress is not None)
    ]
    assert kinds[:2] == [Status, Exited]


def test_an_invalid_crash_record_is_ignored_and_left_unchanged(client: Client, tmp_path: Path) -> None:
    texts = ["", "nonsense", "[1]", "{}", '{"time": true}', "[" * 100_000, '{"time": 1e400}', '{"a": "\\ud800"}']
    client.greet()
    folder = client.directory / "attempt-1"
    for index, text in enumerate(texts):
        (tmp_path / f"record-{index}").write_text(text)
    client.start(
        *(
            command(f"worker:{index}", "cp", f"record-{index}", str(folder / f"worker-{index}.crash.json"))
            for index in range(len(texts))
        )
    )
    for _ in texts:
        ended = client.expect(Exited)
        assert (ended.exit, ended.crash) == (TaskExit(code=0), None)
    assert [(folder / f"worker-{index}.crash.json").read_text() for index in range(len(texts))] == texts


def test_each_attempt_has_its_own_log_files(client: Client) -> None:
    client.greet()
    for attempt in (1, 2, 3):
        client.start(command("worker:0", "sh", "-c", f"echo {attempt}; exit {attempt}"), attempt=attempt)
        assert client.expect(Exited).exit == TaskExit(code=attempt)
        client.send(Stop(1.0))
        assert client.expect(Empty).attempt == attempt
    for attempt in (1, 2, 3):
        assert (client.directory / f"attempt-{attempt}" / "worker-0.log").read_text() == f"{attempt}\n"


def test_all_task_exits_are_reported_before_the_attempt_is_empty(client: Client) -> None:
    client.greet()
    for attempt in range(1, 6):
        client.start(*(command(f"worker:{index}", "sleep", "600") for index in range(8)), attempt=attempt)
        client.send(Stop(10.0))
        client.expect(Empty)
        assert len([client.expect(Exited, 0.0) for _ in range(8)]) == 8


def test_the_end_of_a_task_says_whether_the_task_or_its_program_had_ended_before_the_stop(client: Client) -> None:
    client.greet()
    client.start(command("worker:0", "true"), command("worker:1", "sleep", "600"), attempt=1)
    assert client.expect(Exited).before_stop
    client.send(Stop(10.0))
    assert not client.expect(Exited).before_stop
    client.expect(Empty)
    stays, env = str(PROGRAMS / "ends_but_stays.py"), {"DISTLAUNCH_TASK": "worker:0"}
    client.start(script("worker:0", stays, "returns", "worker:0", env=env), attempt=2)
    client.expect(Returned)
    client.send(Stop(10.0))
    ended = client.expect(Exited)
    assert (ended.exit.signal, ended.before_stop) == (signal.SIGTERM, True)


def test_an_exception_is_reported_although_an_exit_handler_ends_the_process_with_status_0(
    client: Client, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import atexit, os\natexit.register(os._exit, 0)\nraise ValueError('no batch')")
    client.greet()
    client.start(script("worker:0", str(program)))
    returned = client.expect(Returned)
    assert returned.crash is not None
    assert returned.crash.message == "no batch"
    assert client.expect(Exited).exit == TaskExit(code=0)


def test_goodbye_stops_the_tasks_and_the_agent(client: Client) -> None:
    client.greet()
    client.start(command("worker:0", "sleep", "600"))
    client.send(Goodbye(), Start(1, [command("worker:1", "sleep", "600")]))
    client.expect(Exited)
    client.expect(Empty)
    client.read_to_the_end()
    assert client.received(Started) == []
    assert client.wait() == 0


# --- what a task is given ---


@linux
def test_a_task_inherits_no_file_descriptor_of_the_agent(client: Client) -> None:
    client.greet(stream_logs=True)
    client.start(command("worker:1", "sleep", "600"), script("worker:0", LOOK))
    client.expect(Exited)
    log = client.directory / "attempt-1" / "worker-0.log"
    descriptors = json.loads(log.read_text())["descriptors"]
    assert {number: name for number, name in descriptors.items() if int(number) < OUT_OF_THE_WAY} == {
        "0": "/dev/null",
        "1": str(log),
        "2": str(log),
    }
    ours = {name for number, name in descriptors.items() if int(number) >= OUT_OF_THE_WAY}
    assert ours == {str(log.with_suffix(".stacks")), str(log.with_suffix(".status.json"))}


def test_a_task_leads_its_own_session_and_process_group(client: Client) -> None:
    client.greet()
    seen = look(client, script("worker:0", LOOK))
    assert seen["session"] == seen["group"] == seen["pid"]


def test_a_task_runs_in_the_working_directory_of_the_run(client: Client, tmp_path: Path) -> None:
    client.cwd = tmp_path / "here"
    client.cwd.mkdir()
    client.greet()
    shutil.copy(LOOK, client.cwd / "look.py")
    assert look(client, script("worker:0", "look.py", "a b", "é"))["cwd"] == str(client.cwd)


@pytest.mark.parametrize("kind", ["script", "module"])
def test_the_command_line_of_a_python_task_shows_no_user_data(client: Client, tmp_path: Path, kind: str) -> None:
    shutil.copy(PROGRAMS / "tree_family.py", tmp_path / "private_name.py")
    client.greet()
    target = "private_name.py" if kind == "script" else "private_name"
    env = {"TOKEN": "confidential-value"}
    program = Program(kind, target, ["child"])
    pids = client.start(TaskStart("worker:0", program, env))
    log = client.directory / "attempt-1" / "worker-0.log"

    def stands() -> None:
        assert log.read_text().endswith("stands\n")

    eventually(stands)
    task = psutil.Process(pids["worker:0"])
    assert task.environ()["TOKEN"] == "confidential-value"
    order = str(client.directory / "attempt-1" / "worker-0.order.json")
    assert task.cmdline() == [sys.executable, ENTRY, "task", order]
    for process in marked(client.mark):
        assert "private_name" not in " ".join(process.cmdline())
        assert "confidential-value" not in " ".join(process.cmdline())
    assert "confidential-value" not in Path(order).read_text()


def test_a_task_has_the_environment_of_the_agent_with_its_own_changes(make: Make) -> None:
    client = make(env={"TF_CONFIG": "stale", "KEPT": "of the agent", "CHANGED": "of the agent"})
    client.greet()
    env = {"CHANGED": "of the task", "EMPTY": "", "ÜMLAUT": "é\udcff"}
    seen = look(client, script("worker:0", LOOK, env=env, unset=["TF_CONFIG", "NOT_THERE"]))["env"]
    assert "TF_CONFIG" not in seen
    assert seen["KEPT"] == "of the agent"
    assert {name: seen[name] for name in env} == env


CLUSTER = json.dumps({"cluster": {"worker": ["10.0.0.1:2222", "gpu-b:2222", "[fe80::1]:2222"], "ps": ["gpu-c:1"]}})


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"http_proxy": "http://proxy:3128"}, "10.0.0.1,fe80::1,gpu-b,gpu-c"),
        ({"https_proxy": "http://proxy:3128"}, "10.0.0.1,fe80::1,gpu-b,gpu-c"),
        ({"grpc_proxy": "http://proxy:3128"}, "10.0.0.1,fe80::1,gpu-b,gpu-c"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "a,b"}, "a,b,10.0.0.1,fe80::1,gpu-b,gpu-c"),
        (
            {"http_proxy": "http://proxy:3128", "no_proxy": "a", "no_grpc_proxy": "c"},
            "c,10.0.0.1,fe80::1,gpu-b,gpu-c",
        ),
        ({"http_proxy": ""}, None),
        ({}, None),
    ],
)
def test_workers_connect_to_each_other_without_a_proxy(make: Make, env: dict[str, str], expected: str | None) -> None:
    none = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy"), "")
    client = make(env={**none, **env})
    client.greet()
    seen = look(client, script("worker:0", LOOK, env={"TF_CONFIG": CLUSTER}))["env"]
    assert (seen.get("no_grpc_proxy") or None) == expected


def test_a_process_of_jax_reaches_the_coordinator_without_a_proxy(make: Make) -> None:
    client = make(env={"http_proxy": "http://proxy:3128", "no_proxy": "a", "no_grpc_proxy": ""})
    client.greet()
    seen = look(client, script("worker:0", LOOK, env={"JAX_COORDINATOR_ADDRESS": "[fd00::1]:20000"}))
    assert seen["env"]["no_grpc_proxy"] == "a,fd00::1"


def test_a_task_without_peers_keeps_its_proxies(make: Make) -> None:
    client = make(env={"http_proxy": "http://proxy:3128", "no_grpc_proxy": ""})
    client.greet()
    assert look(client, script("worker:0", LOOK))["env"]["no_grpc_proxy"] == ""


def test_all_files_of_an_attempt_are_private_with_any_umask(client: Client) -> None:
    client.greet()
    client.start(script("worker:0", RAISE), command("worker:1", "true"))
    client.expect(Exited)
    client.expect(Exited)
    paths = sorted(client.directory.rglob("*"))
    assert [path.name for path in paths] == [
        "attempt-1",
        "worker-0.crash.json",
        "worker-0.log",
        "worker-0.log.index",
        "worker-0.order.json",
        "worker-0.stacks",
        "worker-0.status.json",
        "worker-1.log",
        "worker-1.log.index",
    ]
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (command("worker:1", "true", env={"BIG": "x" * (4 << 20)}), "too long for this system"),
        (command("worker:1", "true", "x" * (4 << 20)), "too long for this system"),
        (command("worker:1", "./no_interpreter"), "is neither a binary nor a script with a #! line"),
        (command("worker:1", "./dangling"), "No such file or directory"),
        (command("worker:1", "true", env={"A": "nul \0"}), "are not valid: embedded null byte"),
        (command("worker:1", "true", env={"A=B": "x"}), "are not valid: illegal environment variable name"),
        (command("worker:1", "true", "\ud800"), "are not valid"),
    ],
    ids=["environment", "arguments", "no #! line", "missing interpreter", "null", "equals sign", "surrogate"],
)
def test_a_task_that_cannot_be_started_is_reported_and_the_others_are_stopped(
    client: Client, start: TaskStart, said: str, tmp_path: Path
) -> None:
    for name, text in (("no_interpreter", "hello"), ("dangling", "#!/no/such/interpreter\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    client.greet()
    tasks = [command("worker:0", "sleep", "600"), start]
    client.send(Prepare(1, [TaskRequest(task.task, task.program) for task in tasks], *PORTS))
    client.expect(Prepared)
    client.send(Start(1, tasks))
    problem = client.expect(Broken).problem
    assert (problem.reference, problem.task) == ("start-failed", "worker:1")
    assert said in problem.message
    assert client.expect(Exited).task == "worker:0"
    client.expect(Empty)
    client.read_to_the_end()
    assert client.wait() == 1


# --- logs ---


OUTPUTS = {
    "no line break in 10 MB": ("import sys; sys.stdout.write('x' * 10_000_000)", b"x" * 10_000_000),
    "any bytes": (
        "import sys; sys.stdout.buffer.write(bytes(range(256)) * 5_000)",
        bytes(range(256)) * 5_000,
    ),
    "1,000,000 short lines": (
        "import sys; sys.stdout.writelines(f'{n}\\n' for n in range(1_000_000))",
        b"".join(map(b"%d\n".__mod__, range(1_000_000))),
    ),
    "both streams in order": (
        "import os; [os.write(1 + n % 2, b'%d\\n' % n) for n in range(10_000)]",
        b"".join(b"%d\n" % n for n in range(10_000)),
    ),
    "nothing": ("", b""),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_log_bytes_arrive_unchanged_and_agent_memory_stays_small(client: Client, output: str) -> None:
    code, expected = OUTPUTS[output]
    agent = psutil.Process(client.greet(stream_logs=True).pid)
    client.start(command("worker:0", sys.executable, "-c", code))
    log = client.directory / "attempt-1" / "worker-0.log"

    def is_written() -> None:
        assert log.stat().st_size == len(expected)

    eventually(is_written)  # the controller has not read yet
    assert agent.memory_info().rss < RSS_LIMIT
    client.send(Stop(1.0))
    client.expect(Empty)
    assert agent.memory_info().rss < RSS_LIMIT
    received = bytes(client.logs.get("worker:0", b""))
    assert_same_bytes(received, expected)
    assert_same_bytes(log.read_bytes(), expected)


def test_a_task_keeps_running_while_the_controller_does_not_read(client: Client, tmp_path: Path) -> None:
    client.greet(stream_logs=True)
    code = "import sys; sys.stdout.write('x' * 5_000_000); sys.stdout.flush(); open('done', 'w')"
    client.start(command("worker:0", sys.executable, "-c", code))

    def is_done() -> None:
        assert (tmp_path / "done").exists()

    eventually(is_done)


def test_agent_and_tasks_end_although_the_controller_never_reads(client: Client) -> None:
    """No message of the agent is read."""
    client.greet(stream_logs=True, lease_s=1.0)
    client.start(command("worker:0", sys.executable, "-c", "print('x' * 5_000_000)"))
    log = client.directory / "attempt-1" / "worker-0.log"

    def is_written() -> None:
        assert log.stat().st_size == 5_000_001

    eventually(is_written)
    client.send(Goodbye())
    client.expect_nothing_left()
    assert client.wait() == 0


def test_a_chatty_task_does_not_delay_the_logs_of_other_tasks(client: Client) -> None:
    client.greet(stream_logs=True)
    chatty, quiet = (client.directory / "attempt-1" / f"worker-{index}.log" for index in range(2))
    wait_and_speak = "import os, sys\nwhile os.path.getsize(sys.argv[1]) < 20_000_000: pass\nprint('hello')"
    client.start(
        command("worker:0", sys.executable, "-c", "print('x' * 20_000_000)"),
        command("worker:1", sys.executable, "-c", wait_and_speak, str(chatty)),
    )

    def has_spoken() -> None:
        assert quiet.stat().st_size == 6

    eventually(has_spoken)
    while "worker:1" not in client.logs:
        assert client.receive(20.0)
    assert len(client.logs["worker:0"]) < 2_000_000


def test_a_log_truncated_by_its_program_does_not_block_the_agent(client: Client) -> None:
    """`echo … > /dev/stderr` in a shell script truncates the log, as it would any file."""
    client.logs_may_restart = True
    client.greet(stream_logs=True)
    client.start(command("worker:0", "sh", "-c", "echo a long line before; echo x > /dev/stderr"))
    client.expect(Exited)
    client.send(Stop(1.0))
    client.expect(Empty)
    assert client.logs["worker:0"].endswith(b"x\n")


@linux
def test_a_hole_in_a_log_is_skipped_and_reported(client: Client) -> None:
    """Otherwise, a program that extends its log by truncating it makes the agent send terabytes of zeros."""
    code = "print('before', flush=True); os.ftruncate(1, 1 << 40); print('after', flush=True); os.ftruncate(1, 1 << 41)"
    client.greet(stream_logs=True)
    client.start(command("worker:0", sys.executable, "-c", f"import os; {code}"))
    client.expect(Exited)
    client.send(Stop(1.0))
    client.expect(Empty)
    log = bytes(client.logs["worker:0"])
    assert log.replace(b"\0", b"") == b"before\nafter\n"
    assert len(log) < 1 << 20
    texts = [noted.text for noted in client.received(Noted)]
    assert texts == ["the log of worker:0 has a hole of 1 TiB, which is skipped"] * len(texts)
    assert 1 <= len(texts) <= 2  # the second may have been made together with the first


@linux
def test_a_log_with_holes_can_be_resent_from_any_offset(tmp_path: Path) -> None:
    """As after a broken connection: the agent skips the same holes again, and the offsets stay the same."""
    path = tmp_path / "log"
    with path.open("wb") as file:
        for number in range(4):
            file.seek(number << 30)
            file.write(b"%d" % number * 100_000)
        file.truncate(1 << 33)
    log = TaskLog(str(path), f"{path}.index", time.time)

    def read() -> bytes:
        text = b""
        while True:
            offset, data, _, _ = log.read()
            if not data:
                assert log.unsent() == 0
                return text
            assert offset == first + len(text)
            text += bytes(data)
            if isinstance(data, FilePart):
                data.close()

    first = 0
    whole = read()
    written = b"".join(b"%d" % number * 100_000 for number in range(4))
    assert whole.replace(b"\0", b"") == written
    assert len(whole) < 4 << 20
    for first in (*range(0, len(whole), 99_991), len(whole)):
        log.rewind(first)
        whole = whole[:first] + read()
        assert whole.replace(b"\0", b"") == written
    with path.open("ab") as file:
        file.write(b"more")
    assert log.read().data == b"more"
    log.close()


def test_no_log_bytes_are_sent_to_a_controller_that_reads_the_files(client: Client) -> None:
    client.greet(stream_logs=False)
    client.start(command("worker:0", "echo", "hello"))
    client.expect(Exited)
    client.send(Stop(1.0))
    client.expect(Empty)
    assert client.logs == {}
    assert (client.directory / "attempt-1" / "worker-0.log").read_text() == "hello\n"


# --- stopping ---


def test_a_process_tree_that_obeys_sigterm_ends_within_its_grace_period(either: Client) -> None:
    either.greet()
    either.start_family("child", "grandchild", "stopped")
    either.send(Stop(60.0))
    assert either.expect(Exited).exit == TaskExit(signal=signal.SIGTERM)
    assert either.expect(Empty) == Empty(1, 0, 0)


def test_a_process_tree_that_ignores_sigterm_is_killed_only_after_its_grace_period(either: Client) -> None:
    either.greet()
    either.start_family("--ignore-term", "child", "grandchild", "stopped")
    before = time.time()
    either.send(Stop(0.5))
    ended = either.expect(Exited)
    assert ended.exit == TaskExit(signal=signal.SIGKILL)
    assert ended.time - before >= 0.5
    assert either.expect(Empty).killed == 5


def test_a_second_stop_order_shortens_the_grace_period(either: Client) -> None:
    either.greet()
    either.start_family("--ignore-term")
    either.send(Stop(600.0), Stop(0.0))
    assert either.expect(Exited).exit == TaskExit(signal=signal.SIGKILL)
    either.expect(Empty)


def test_an_interrupt_stops_the_task_and_then_its_descendants(either: Client) -> None:
    either.greet()
    either.start_family("child", "grandchild", "stopped")
    either.send(Stop(60.0, interrupts=True))
    assert either.expect(Exited).exit == TaskExit(signal=signal.SIGINT)
    either.expect(Empty)


SAVES_AT_TERM = """
import signal, sys, time

def save(*_):
    print("saving", flush=True)
    time.sleep(1)
    sys.exit(7)

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


@linux
@pytest.mark.parametrize(("grace_s", "how"), [(0.1, TaskExit(code=7)), (0.0, TaskExit(signal=signal.SIGKILL))])
def test_a_stop_after_an_interrupt_gives_sigterm_handlers_time_unless_grace_is_0(
    client: Client, tmp_path: Path, grace_s: float, how: TaskExit
) -> None:
    (tmp_path / "program.py").write_text(SAVES_AT_TERM)
    client.greet()
    client.start(script("worker:0", str(tmp_path / "program.py")))
    log = client.directory / "attempt-1" / "worker-0.log"
    wait_until(lambda: log.exists() and "ready" in log.read_text(), "the program is ready")
    client.send(Stop(60.0, interrupts=True), Stop(grace_s))
    assert client.expect(Exited).exit == how
    client.expect(Empty)


def start_waiting(client: Client, *ways: str) -> None:
    program = str(PROGRAMS / "notices_term.py")
    client.start(*(script(f"worker:{number}", program, way) for number, way in enumerate(ways)))

    def wait() -> None:
        logs = [client.directory / "attempt-1" / f"worker-{number}.log" for number in range(len(ways))]
        assert all("ready" in log.read_text() for log in logs)

    eventually(wait)


@linux
@pytest.mark.parametrize("way", ["handler", "loop", "sigwait", "exec", "child", "fork"])
def test_a_grace_period_for_handlers_applies_to_tasks_that_may_handle_sigterm(client: Client, way: str) -> None:
    client.greet()
    start_waiting(client, way)
    client.send(Stop(60.0, for_handlers=True))
    client.expect(Empty)
    assert "noticed" in (client.directory / "attempt-1" / "worker-0.log").read_text()


@linux
@pytest.mark.parametrize("way", ["nothing", "default", "ignore", "library", "library, and a child"])
def test_a_grace_period_for_handlers_does_not_apply_to_tasks_without_handlers(client: Client, way: str) -> None:
    client.greet()
    start_waiting(client, way)
    client.send(Stop(600.0, for_handlers=True))
    assert client.expect(Exited).exit.signal in (signal.SIGTERM, signal.SIGKILL)
    client.expect(Empty)


@linux
def test_a_task_that_handles_sigterm_gives_other_tasks_no_grace_period(client: Client) -> None:
    client.greet()
    start_waiting(client, "handler", "library")
    client.send(Stop(600.0, for_handlers=True))
    ends = {end.task: end.exit for end in (client.expect(Exited), client.expect(Exited))}
    assert ends == {"worker:0": TaskExit(code=0), "worker:1": TaskExit(signal=signal.SIGKILL)}
    client.expect(Empty)


@linux
def test_processes_that_outlive_their_task_are_stopped_and_counted(client: Client, tmp_path: Path) -> None:
    client.greet()
    pids = client.start_family("--ignore-term", "--leave", str(tmp_path / "go"), "child", "daemon")
    (tmp_path / "go").touch()
    assert client.expect(Exited).exit == TaskExit(code=0)
    assert {process.pid for process in marked(client.mark)} >= {pids["child"], pids["daemon"]}
    client.send(Stop(0.0))
    assert client.expect(Empty) == Empty(1, left_behind=2, killed=2)
    assert not {process.pid for process in marked(client.mark)} & set(pids.values())


@linux
def test_a_stop_order_without_tasks_is_answered(client: Client) -> None:
    client.greet()
    client.send(Stop(5.0))
    assert client.expect(Empty) == Empty(0, 0, 0)


# --- no process is left ---


def close_stdin(client: Client, _: Ready) -> None:
    assert client.process.stdin is not None
    client.process.stdin.close()


def terminate_guardian(client: Client, _: Ready) -> None:
    client.process.terminate()


def hang_up_guardian(client: Client, _: Ready) -> None:
    client.process.send_signal(signal.SIGHUP)


def terminate_agent(_: Client, ready: Ready) -> None:
    os.kill(ready.pid, signal.SIGTERM)


def kill_agent(_: Client, ready: Ready) -> None:
    os.kill(ready.pid, signal.SIGKILL)


def kill_guardian(client: Client, _: Ready) -> None:
    client.process.kill()


def kill_both(client: Client, ready: Ready) -> None:
    client.process.kill()
    os.kill(ready.pid, signal.SIGKILL)


End = Callable[[Client, Ready], None]
ENDS_EVERYWHERE = [close_stdin, terminate_guardian, hang_up_guardian, terminate_agent]


@pytest.mark.parametrize("end", ENDS_EVERYWHERE)
def test_no_process_is_left_when_agent_guardian_or_connection_ends(either: Client, end: End) -> None:
    ready = either.greet()
    either.start_family("child", "grandchild", "stopped")
    end(either, ready)
    either.expect_nothing_left()
    assert either.wait() == 0


@linux
@pytest.mark.parametrize("end", [close_stdin, kill_agent, kill_guardian])
def test_a_process_tree_that_ignores_sigterm_does_not_outlive_agent_or_guardian(client: Client, end: End) -> None:
    ready = client.greet()
    client.start_family("--ignore-term", "child", "grandchild", "stopped", "daemon")
    end(client, ready)
    client.expect_nothing_left()
    assert client.wait() == {kill_agent: 137, kill_guardian: -signal.SIGKILL}.get(end, 0)


def test_no_process_is_left_if_the_controller_disconnects_before_hello(either: Client) -> None:
    either.expect_marker()
    assert either.process.stdin is not None
    either.process.stdin.close()
    assert either.wait() == 0
    either.expect_nothing_left()


@linux
def test_a_task_dies_when_agent_and_guardian_are_killed_together(client: Client) -> None:
    """The controller adopts and ends the task's children."""
    ready = client.greet()
    client.start(command("worker:0", "sleep", "600"))
    kill_both(client, ready)
    client.expect_nothing_left()


def test_tasks_and_agent_end_after_a_lease_without_beats(either: Client) -> None:
    either.greet(lease_s=2.0)  # no beats are sent while the family starts
    either.start_family("child", "grandchild")
    either.expect_nothing_left()
    assert either.wait() == 0


def test_beats_renew_the_lease(client: Client) -> None:
    client.greet(lease_s=1.0)
    client.start(command("worker:0", "sleep", "600"))
    ends = time.monotonic() + 1.8
    while time.monotonic() < ends:
        client.beat()
        with contextlib.suppress(AssertionError):
            client.receive(0.2)
    assert client.received(Exited) == []
    assert client.process.poll() is None


def test_beats_that_acknowledge_no_answer_do_not_renew_the_lease(client: Client) -> None:
    """A controller that receives nothing may start the tasks elsewhere."""
    client.greet(lease_s=1.0)
    client.start(command("worker:0", "sleep", "600"))

    def has_ended() -> None:
        with contextlib.suppress(OSError):
            client.send(Beat(time.time(), 0))
        assert client.process.poll() is not None

    eventually(has_ended)
    client.expect_nothing_left()


def test_a_start_order_without_tasks_starts_nothing(client: Client) -> None:
    client.greet()
    client.send(Prepare(1, [], *PORTS))
    client.expect(Prepared)
    client.send(Start(1, []), Stop(0.0))
    assert client.expect(Empty).attempt == 1


def test_a_stop_order_between_two_attempts_is_answered(client: Client) -> None:
    client.greet()
    client.start(command("worker:0", "true"))
    client.send(Stop(0.0))
    client.expect(Empty)
    client.send(Stop(0.0))
    assert client.expect(Empty).attempt == 1


def test_the_stream_to_the_controller_ends_as_soon_as_the_agent_dies(client: Client) -> None:
    """The guardian does not keep the stream open while it cleans up."""
    ready = client.greet()
    os.kill(client.process.pid, signal.SIGSTOP)
    try:
        os.kill(ready.pid, signal.SIGKILL)
        client.read_to_the_end()
    finally:
        os.kill(client.process.pid, signal.SIGCONT)
    assert client.wait() == 137


# --- Python 3.9, the oldest supported on nodes ---


@pytest.fixture
def old_client(make: Make, python39: str) -> Client:
    return make(python=python39)


def test_agent_and_tasks_run_on_python_39(old_client: Client) -> None:
    ready = old_client.greet(stream_logs=True)
    assert ready.python.startswith("3.9.")
    old_client.start(script("worker:0", RAISE), script("worker:1", LOOK, "3"), command("worker:2", "sleep", "600"))
    ended = {exited.task: exited for exited in (old_client.expect(Exited), old_client.expect(Exited))}
    assert ended["worker:1"].exit == TaskExit(code=3)
    crash = ended["worker:0"].crash
    assert crash is not None
    assert (crash.exception, crash.message, crash.file, crash.line) == ("ValueError", "no batch of 32", RAISE, 5)
    old_client.send(Stop(10.0))
    assert old_client.expect(Exited).exit == TaskExit(signal=signal.SIGTERM)
    old_client.expect(Empty)
    traceback = old_client.logs["worker:0"].decode()
    assert traceback.endswith("ValueError: no batch of 32\n")
    assert "worker_entry" not in traceback


def test_an_agent_on_python_39_refuses_invalid_frames(old_client: Client) -> None:
    old_client.greet()
    old_client.send_raw(b'{"type":"Start","attempt":1,"tasks":5}\n')
    assert "Start.tasks: expected" in old_client.expect(Broken).problem.message

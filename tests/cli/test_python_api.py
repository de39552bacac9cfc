"""The Python interface: runs from a program, a test or a notebook, which leave nothing behind and print nothing."""

from __future__ import annotations

import contextlib
import doctest
import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest
from distlaunch import Cluster, ClusterSpec, DistlaunchError, RunReport, load_spec, local_spec, run, run_local

from launcher.errors import ProcessLimitError, RunDirectoryError, SpecError, UsageError
from launcher.gang.events import TaskStarted
from launcher.python.process import ControllerLostError
from launcher.report.run_events import Ended, RunStarted
from launcher.tasks import TaskId
from tests.harness.documents import LAUNCHER_PAGE, blocks
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import MARK, assert_none_left, await_none_left, make_mark, marked, wait_until

COVERS = ("launcher/__init__.py", "launcher/public", "launcher/described.py", "launcher/result.py", "launcher/python")

pytestmark = pytest.mark.slow

PLAIN = ["preload=false"]
"""For scripts that do not use TensorFlow."""
FOREVER = ["sh", "-c", "while :; do sleep 1; done"]
IGNORES_TERM = ["sh", "-c", "trap '' TERM; echo begins; while :; do sleep 1; done"]
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A mark in the environment of everything that a test starts; runs go into the test's own folder."""
    mark = make_mark()
    monkeypatch.setenv(MARK, mark[MARK])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return mark


def script(text: str, name: str = "train.py") -> str:
    Path(name).write_text(textwrap.dedent(text))
    return name


def waits_for(file: Path) -> list[str]:
    """A command that prints where it is, and ends once the file exists."""
    return ["sh", "-c", f"echo begins; until test -e {file}; do sleep 0.05; done; echo ends"]


def start(text: str) -> subprocess.Popen[str]:
    """Starts a Python program of the user's."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- one call ---


def test_run_local_returns_the_report_of_a_successful_run(tmp_path: Path) -> None:
    report = run_local(command=["sh", "-c", "echo $DISTLAUNCH_TASK"], workers=2, run_dir=tmp_path / "run")
    assert (report.outcome, report.exit_status) == ("succeeded", 0)
    assert [task.task for task in report.attempts[0].tasks] == ["worker:0", "worker:1"]
    assert (tmp_path / "run" / "attempt-1" / "worker-1.log").read_text() == "worker:1\n"
    assert RunReport.model_validate_json((tmp_path / "run" / "report.json").read_bytes()) == report


@pytest.mark.smoke
def test_run_local_returns_the_verdict_on_a_failing_script() -> None:
    name = script("""
        import os
        if os.environ["DISTLAUNCH_TASK"] == "worker:1":
            raise ValueError("no label")
        while True:
            pass
    """)
    report = run_local(name, workers=2, settings=PLAIN)
    assert (report.outcome, report.exit_status) == ("failed", 1)
    assert (report.verdict.reference, report.verdict.task) == ("task-failed", "worker:1")
    assert "ValueError: no label" in report.verdict.evidence[0]


@pytest.mark.smoke
def test_run_passes_arguments_and_variables_of_a_spec_file_to_the_script() -> None:
    name = script("import os, sys; assert (sys.argv[1:], os.environ['COLOUR']) == (['--epochs', '3'], 'red')")
    spec = local_spec(name, "--epochs", "3", workers=1, env={"COLOUR": "red"}, settings=PLAIN)
    Path("cluster.yaml").write_text(spec.model_dump_json(exclude_unset=True))
    assert load_spec("cluster.yaml") == spec
    assert run("cluster.yaml").outcome == "succeeded"


def test_a_cluster_prints_nothing_and_keeps_signal_handlers_and_environment(capfd: pytest.CaptureFixture[str]) -> None:
    handlers, environ = [signal.getsignal(signum) for signum in HANDLED], dict(os.environ)
    with Cluster(local_spec(command=["sh", "-c", "echo out; echo err >&2"])) as cluster:
        cluster.wait()
    assert capfd.readouterr() == ("", "")
    assert [signal.getsignal(signum) for signum in HANDLED] == handlers
    assert dict(os.environ) == environ
    assert [*cluster.logs("worker:0")] == ["out", "err"]


def test_run_local_works_in_a_thread() -> None:
    reports: list[RunReport] = []
    thread = threading.Thread(target=lambda: reports.append(run_local(command=["true"])))
    thread.start()
    thread.join(60)
    assert [report.outcome for report in reports] == ["succeeded"]


def test_a_cluster_works_inside_a_running_event_loop() -> None:
    program = start("""
        import asyncio
        from distlaunch import Cluster, local_spec

        async def cell():
            with Cluster(local_spec(command=["echo", "hello"])) as cluster:
                return list(cluster.logs("worker:0")), cluster.wait().outcome

        print(asyncio.run(cell()))
    """)
    assert program.communicate(timeout=60) == ("(['hello'], 'succeeded')\n", "")


# --- what cannot be started ---


@pytest.mark.smoke
def test_spec_error_lists_all_mistakes_of_the_spec() -> None:
    Path("bad.yaml").write_text("nodes: [{host: local}]\nprots: 1\nnmae: x\n")
    with pytest.raises(SpecError) as caught:
        run("bad.yaml")
    assert [line.split(" ")[0] for line in caught.value.evidence] == ["bad.yaml:2:1", "bad.yaml:3:1"]
    assert all(line in str(caught.value) for line in caught.value.evidence)


def test_a_non_empty_run_directory_raises_run_directory_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    with pytest.raises(RunDirectoryError, match="is not empty") as caught:
        run_local(command=["true"], run_dir=tmp_path / "run")
    assert (caught.value.hint, caught.value.exit_status) == ("choose a new folder; each run needs its own", 3)


def test_an_error_of_the_controller_is_raised_with_its_reference() -> None:
    spec = ClusterSpec.model_validate({"nodes": {"from": {"command": ["sh", "-c", "echo no nodes >&2; exit 1"]}}})
    with pytest.raises(DistlaunchError) as caught, Cluster(spec):
        pytest.fail("the block was entered")
    assert (caught.value.reference, caught.value.exit_status) == ("node-list", 3)
    assert caught.value.evidence == ("no nodes",)


def test_a_missing_script_raises_usage_error_and_creates_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the script .*/missing\.py: No such file") as caught:
        run_local("missing.py", run_dir=tmp_path / "run")
    assert (caught.value.reference, caught.value.exit_status) == ("no-program", 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"script": "a.py", "module": "b"}, "each name the program"),
        ({"workers": 0}, "at least one"),
        ({"command": ["a"], "strategy": "mirrored", "workers": 2}, "mirrored runs one process"),
        ({"settings": ["prots=1"]}, "prots"),
        ({"env": {"A=B": "x", "1": "y"}}, "'1'"),
    ],
)
def test_local_spec_rejects_invalid_and_contradictory_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        local_spec(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_report", [True, False])
def test_a_late_controller_error_is_raised_only_without_a_report(tmp_path: Path, has_report: bool) -> None:
    spoilt = ["plan.json"] if has_report else ["plan.json", "report.json"]
    code = f"cd {tmp_path}/run; for name in {' '.join(spoilt)}; do rm -f $name; mkdir $name; done; kill -9 $$"
    spec = local_spec(command=["sh", "-c", code], workers=1, settings=["restart.max_restarts=1"])
    expected = (
        contextlib.nullcontext() if has_report else pytest.raises(DistlaunchError, match=r"cannot write .*plan\.json")
    )
    with expected, Cluster(spec, run_dir=tmp_path / "run") as cluster:  # which may fail before it has been entered
        assert (cluster.wait().outcome, cluster.wait().verdict.reference) == ("failed", "run-directory")


@pytest.mark.smoke
def test_controller_lost_error_shows_an_import_error_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = local_spec(command=["true"])
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ControllerLostError, match="has ended with status 1, without a result") as caught:
        run(spec)
    assert "ModuleNotFoundError" in caught.value.evidence[-1]


@pytest.mark.smoke
def test_an_unstartable_thread_raises_process_limit_error_and_leaves_no_process(
    mark: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    spec = local_spec(command=["true"])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ProcessLimitError):
        run(spec)
    assert_none_left(mark)


@pytest.mark.smoke
def test_an_unstartable_process_raises_process_limit_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ProcessLimitError):
        run_local(command=["true"])


def test_ctrl_c_while_a_cluster_starts_leaves_no_process(mark: dict[str, str]) -> None:
    program = start("""
        from distlaunch import Cluster, ClusterSpec
        spec = ClusterSpec.model_validate({"nodes": {"from": {"command": ["sleep", "600"]}}})
        with Cluster(spec):
            print("entered")
    """)
    wait_until(lambda: any(process.name() == "sleep" for process in marked(mark)), "the nodes are asked for")
    program.send_signal(signal.SIGINT)
    assert program.communicate(timeout=60)[0] == ""
    assert program.returncode == -signal.SIGINT
    assert_none_left(mark)


def test_using_a_cluster_outside_its_with_block_raises_runtime_error() -> None:
    cluster = Cluster(local_spec(command=["true"]))
    with pytest.raises(RuntimeError, match="use `with Cluster"):
        cluster.wait()
    with cluster:
        cluster.wait()
    with pytest.raises(RuntimeError, match="create another one"), cluster:
        pass


# --- a cluster ---


@pytest.mark.smoke
def test_cluster_events_follow_the_run_until_it_ends(tmp_path: Path) -> None:
    with Cluster(local_spec(command=waits_for(tmp_path / "go"))) as cluster:
        seen = []
        for record in cluster.events():
            seen.append(record)
            if isinstance(record.event, TaskStarted):
                (tmp_path / "go").touch()
        assert isinstance(seen[0].event, RunStarted)
        assert isinstance(seen[-1].event, Ended)
        assert seen[-1].event.outcome == cluster.wait().outcome == "succeeded"
    with (cluster.directory / "events.jsonl").open("a") as file:  # what later versions and others may have written
        file.write('{"time": 1, "attempt": 1, "event": "later"}\n{"time": 1, "event": "said"}\n{"time')
    assert [*cluster.events()] == seen


def test_cluster_logs_yield_lines_while_the_task_prints_them(tmp_path: Path) -> None:
    with Cluster(local_spec(command=waits_for(tmp_path / "go"))) as cluster:
        lines = cluster.logs("worker:1")
        assert next(lines) == "begins"
        assert cluster.status().state == "forming"
        (tmp_path / "go").touch()
        assert [*lines] == ["ends"]


def test_cluster_logs_cover_all_attempts_or_one(tmp_path: Path) -> None:
    code = r"""
        printf '%s\r\033[1m\n\n\377' $DISTLAUNCH_ATTEMPT
        if test $DISTLAUNCH_ATTEMPT = 1; then kill -9 $$; fi
        until test -e go; do sleep 0.05; done
    """
    spec = local_spec(command=["sh", "-c", textwrap.dedent(code)], workers=1, settings=["restart.max_restarts=1"])
    with Cluster(spec) as cluster:
        lines = cluster.logs(TaskId("worker", 0))
        assert [next(lines), next(lines), next(lines), next(lines)] == ["1\r\x1b[1m", "", "\ufffd", "2\r\x1b[1m"]
        first = [*cluster.logs("worker:0", attempt=1)]  # the first attempt has ended
        (tmp_path / "go").touch()
        assert [*lines] == ["", "\ufffd"]
        assert [attempt.verdict.reference for attempt in cluster.wait().attempts] == ["task-killed", "succeeded"]
    assert first == ["1\r\x1b[1m", "", "\ufffd"]
    assert [*cluster.logs("worker:0", attempt=2)] == ["2\r\x1b[1m", "", "\ufffd"]


def test_cluster_logs_reject_a_task_that_does_not_exist() -> None:
    with Cluster(local_spec(command=["true"], workers=1)) as cluster:
        for name, message in (("worker:1", "it has worker:0"), ("worker", "named like worker:0")):
            with pytest.raises(UsageError, match=message):
                cluster.logs(name)


def test_cluster_stacks_show_the_current_function_of_each_task() -> None:
    name = script("""
        import time
        def load_batch():
            print("here", flush=True)
            time.sleep(600)
        load_batch()
    """)
    with Cluster(local_spec(name, workers=2, settings=[*PLAIN, "timeouts.stop_grace_s=1"])) as cluster:
        assert [next(cluster.logs(task)) for task in cluster.tasks] == ["here", "here"]
        stacks = cluster.stacks()
    assert "worker:0, worker:1" in stacks
    assert "load_batch" in stacks
    with pytest.raises(DistlaunchError, match="has ended"):
        cluster.stacks()


def test_cluster_status_is_available_during_and_after_the_run() -> None:
    with Cluster(local_spec(command=FOREVER)) as cluster:
        assert [task.task for task in cluster.status().tasks] == [str(task) for task in cluster.tasks]
    assert cluster.status().state == "interrupted"


def test_the_down_command_stops_a_run_started_from_python() -> None:
    with Cluster(local_spec(command=FOREVER)) as cluster:
        subprocess.run(distlaunch_command("down", cluster.directory.name), capture_output=True, timeout=60, check=True)
        assert cluster.wait(10).outcome == "interrupted"


# --- nothing is left ---


@pytest.mark.smoke
def test_an_exception_in_the_cluster_block_stops_the_run(mark: dict[str, str]) -> None:
    with contextlib.suppress(ZeroDivisionError), Cluster(local_spec(command=FOREVER, workers=2)) as cluster:
        assert len(marked(mark)) > 3  # the controller, its agent, two tasks
        print(1 / 0)
        pytest.fail("the exception was lost")
    assert_none_left(mark)
    report = cluster.wait()
    assert (report.outcome, report.exit_status) == ("interrupted", 143)
    assert report.attempts[0].processes_left == 0


def test_run_local_stops_a_run_that_exceeds_its_timeout(mark: dict[str, str]) -> None:
    with pytest.raises(TimeoutError, match="is not over after"):
        run_local(command=FOREVER, timeout_s=0.1)
    assert_none_left(mark)


def test_cluster_stop_now_skips_the_grace_period(mark: dict[str, str]) -> None:
    with Cluster(local_spec(command=IGNORES_TERM, settings=["timeouts.stop_grace_s=600"])) as cluster:
        assert [next(cluster.logs(task)) for task in cluster.tasks] == ["begins", "begins"]
        cluster.stop(now=True)
        assert_none_left(mark)
    assert cluster.wait().outcome == "interrupted"


def test_ctrl_c_in_the_cluster_block_stops_the_run(mark: dict[str, str]) -> None:
    program = start(f"""
        from distlaunch import Cluster, local_spec
        with Cluster(local_spec(command={FOREVER})) as cluster:
            print(cluster.directory, flush=True)
            cluster.wait()
    """)
    assert program.stdout is not None
    directory = Path(program.stdout.readline().strip())
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGINT
    assert errors.endswith("KeyboardInterrupt\n")
    assert_none_left(mark)
    assert json.loads((directory / "report.json").read_text())["outcome"] == "interrupted"


def test_a_second_ctrl_c_in_the_cluster_block_skips_the_grace_period(mark: dict[str, str]) -> None:
    program = start(f"""
        from distlaunch import Cluster, local_spec
        with Cluster(local_spec(command={IGNORES_TERM}, settings=["timeouts.stop_grace_s=600"])) as cluster:
            assert [next(cluster.logs(task)) for task in cluster.tasks] == ["begins", "begins"]
            print(cluster.directory, flush=True)
            cluster.wait()
    """)
    assert program.stdout is not None
    events = Path(program.stdout.readline().strip()) / "events.jsonl"
    program.send_signal(signal.SIGINT)
    wait_until(lambda: '"stopping"' in events.read_text(), "the first Ctrl-C is understood")
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=60)
    assert program.returncode == -signal.SIGINT
    assert_none_left(mark)


def test_sigkill_of_a_python_program_stops_its_run_despite_a_forked_child(mark: dict[str, str]) -> None:
    program = start(f"""
        import os, time
        from distlaunch import Cluster, local_spec
        with Cluster(local_spec(command={FOREVER})) as cluster:
            child = os.fork()
            if child == 0:
                os.close(1), os.close(2)
                time.sleep(600)
            print(child, flush=True)
            cluster.wait()
    """)
    assert program.stdout is not None
    child = int(program.stdout.readline())
    program.kill()
    program.communicate(timeout=60)
    wait_until(lambda: [process.pid for process in marked(mark)] == [child], "only the child is left")
    psutil.Process(child).kill()


def test_a_killed_controller_raises_controller_lost_error_and_leaves_no_process(mark: dict[str, str]) -> None:
    with Cluster(local_spec(command=FOREVER)) as cluster:
        controller = json.loads((cluster.directory / "run.json").read_text())["controller"]["pid"]
        psutil.Process(controller).kill()
        with pytest.raises(ControllerLostError, match="ended with SIGKILL"):
            cluster.wait()
    await_none_left(mark)
    assert len([*cluster.events()]) > 3  # the events end nevertheless


def test_processes_that_the_user_starts_are_not_stopped_with_the_cluster() -> None:
    with Cluster(local_spec(command=FOREVER)):
        mine = subprocess.Popen(["sleep", "600"])
    assert mine.poll() is None
    mine.kill()
    mine.wait()


def test_secrets_from_python_are_on_no_command_line_and_in_no_file(mark: dict[str, str]) -> None:
    with Cluster(local_spec(command=FOREVER, env={"API_TOKEN": "hunter-2"})) as cluster:
        lines = [line for process in marked(mark) for line in _command_line(process)]
        assert "hunter-2" not in " ".join(lines)
        assert len(lines) > 4
        assert b"hunter-2" not in b"".join(path.read_bytes() for path in cluster.directory.glob("*.json*"))


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


# --- several ---


def test_concurrent_clusters_do_not_disturb_each_other(tmp_path: Path) -> None:
    with Cluster(local_spec(command=waits_for(tmp_path / "go"))) as first:
        with Cluster(local_spec(command=FOREVER)) as second:
            assert first.directory != second.directory
        assert second.wait().outcome == "interrupted"
        assert next(first.logs("worker:0")) == "begins"
        (tmp_path / "go").touch()
        assert first.wait().outcome == "succeeded"
    assert run_local(command=["true"]).outcome == "succeeded"  # and one after them


def test_repr_of_cluster_and_report_shows_name_and_outcome() -> None:
    cluster = Cluster(local_spec(command=["sh", "-c", "exit 3"], workers=1))
    assert repr(cluster) == "<Cluster of local-1, not started>"
    with cluster:
        report = cluster.wait()
    name = report.run_id
    assert repr(cluster).startswith(f"<Cluster {name}: failed, attempt 1, ")
    assert str(report) == repr(report)
    assert repr(report).startswith(f"<RunReport {name}: failed after ")
    assert repr(report).endswith(" s, exit status 1: " + f"{report.verdict.message} [task-failed]>")


@pytest.mark.parametrize("words", [["--version"], ["local", "-h"]])
def test_python_m_distlaunch_prints_the_same_as_the_command(words: list[str]) -> None:
    ran = [
        subprocess.run([*command, *words], capture_output=True, text=True, check=True).stdout
        for command in ([sys.executable, "-m", "distlaunch"], distlaunch_command())
    ]
    assert ran[0] == ran[1]


# --- what the documents say ---


@pytest.fixture
def example_files() -> None:
    """The files that the examples use."""
    script("import sys; assert sys.argv[1] == '--epochs'")
    Path("cluster.yaml").write_text(
        "nodes: [{host: local, tasks: {worker: 2}}]\n"
        "program: {command: [sh, -c, 'test $DISTLAUNCH_TASK = worker:0 && sleep 60; exit 3']}\n"
    )


@pytest.mark.usefixtures("example_files")
@pytest.mark.parametrize(
    "name", ["distlaunch", "launcher.python.calls", "launcher.python.cluster", "launcher.python.specs"]
)
def test_docstring_examples_of_the_python_api_work(name: str) -> None:
    module = importlib.import_module(name)
    names = {each: getattr(importlib.import_module("distlaunch"), each) for each in ("local_spec", "Cluster")}
    failed, tried = doctest.testmod(module, extraglobs=names)
    assert failed == 0
    assert tried > 1


@pytest.mark.usefixtures("example_files")
def test_python_examples_of_the_documentation_work(capsys: pytest.CaptureFixture[str]) -> None:
    examples = blocks(LAUNCHER_PAGE, "python")
    assert len(examples) == 2
    for example in examples:
        names: dict[str, object] = {}
        exec(example, names)
        for name, test in names.items():
            if name.startswith("test_") and callable(test):
                test()
    assert "worker:1" in capsys.readouterr().out

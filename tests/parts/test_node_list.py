"""A command that names the nodes of a spec: what it may print, how it may fail, and when it runs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import InterruptionError
from launcher.gang.state import Phase
from launcher.sources.node_list import NodeCommandError, find_nodes, find_nodes_first
from launcher.spec.models import ClusterSpec
from launcher.spec.node_list import NodeListError, parse_node_list
from launcher.spec.nodes import NodeSpec
from tests.harness.builders.specs import restarting
from tests.harness.cases import first_quick
from tests.harness.polling import eventually
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.sim.nodes import KILL, At, Exit, FakeRun, lose

COVERS = (
    "launcher/sources/node_list.py",
    "launcher/controller/nodes.py",
)

TWO: list[dict[str, Any]] = [{"host": "gpu-a"}, {"host": "gpu-b", "tasks": {"worker": 2}}]

ANSIBLE = {
    "_meta": {
        "hostvars": {
            "gpu-a": {"ansible_host": "10.0.0.7", "ansible_port": 2222, "ansible_user": "alice", "slots": 2},
            "gpu-b": {"ansible_python_interpreter": "/opt/python", "ansible_ssh_private_key_file": "~/.ssh/b"},
            "here": {"ansible_connection": "local", "ansible_python_interpreter": "auto"},
        }
    },
    "all": {"children": ["ungrouped", "gpus"]},
    "gpus": {"hosts": ["gpu-b", "gpu-a"]},
    "more": {"hosts": ["gpu-a", "here"], "vars": {"x": 1}},
}


# --- what is printed ---


@pytest.mark.parametrize(
    ("printed", "nodes"),
    [
        ("gpu-a\ngpu-b:2\n", TWO),
        ("# two\ngpu-a\ngpu-b slots=2", TWO),
        ("[fd00::5]:2\n", [{"host": "[fd00::5]", "tasks": {"worker": 2}}]),
        ('["gpu-a", "gpu-b:2"]', TWO),
        (json.dumps([*TWO, "gpu-c"]), [*TWO, {"host": "gpu-c"}]),
        (
            json.dumps(ANSIBLE),
            [
                {"host": "gpu-b", "python": "/opt/python", "ssh": {"identity_file": "~/.ssh/b"}},
                {
                    "host": "gpu-a",
                    "tasks": {"worker": 2},
                    "ssh": {"hostname": "10.0.0.7", "port": 2222, "user": "alice"},
                },
                {"host": "local"},
            ],
        ),
        ('{"gpus": ["gpu-a", "gpu-b"]}', [{"host": "gpu-a"}, {"host": "gpu-b"}]),
    ],
    ids=["lines", "host-file", "ipv6", "names", "objects", "ansible", "groups-as-lists"],
)
def test_a_node_list_is_parsed_in_every_format(printed: str, nodes: list[dict[str, Any]]) -> None:
    assert parse_node_list(printed.encode()) == nodes


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        (b"", "nothing was printed; print one host a line, or JSON"),
        (b" \n", "nothing was printed; print one host a line, or JSON"),
        (b"# none\n", "no node is named; print one host a line, or JSON"),
        (b"[]", "no node is named; print one host a line, or JSON"),
        (b'{"_meta": {"hostvars": {}}, "all": {"children": []}}', "no node is named; print one host a line, or JSON"),
        (b"\xff", "byte 0xff is not UTF-8"),
        (b"gpu a\n", "line 1: expected a host, `HOST:SLOTS` or `HOST slots=N`, got 'gpu a'"),
        (b'["gpu-a", 3]', "[1]: expected a host or the fields of a node, got '3'"),
        (b'["gpu-a:x"]', "[0]: expected a host, or `HOST:SLOTS` like `gpu-a:2`, got 'gpu-a:x'"),
        (b'{"hosts": "gpu-a"}', "hosts: expected a group of hosts, as `ansible-inventory --list` prints it"),
        (b'["gpu-a"', "not JSON: Expecting ',' delimiter: line 1 column 9 (char 8)"),
        (b"[" * 100_000, "not JSON: nested too deeply"),
    ],
)
def test_an_invalid_node_list_is_rejected(printed: bytes, message: str) -> None:
    with pytest.raises(NodeListError) as caught:
        parse_node_list(printed)
    assert str(caught.value) == message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


@given(st.one_of(st.binary(), JSON.map(lambda value: json.dumps(value).encode())))
def test_the_node_list_parser_returns_nodes_or_raises_node_list_error(printed: bytes) -> None:
    with contextlib.suppress(NodeListError):
        assert parse_node_list(printed)


# --- the command ---


def spec_of(*command: str, **fields: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"nodes": {"from": {"command": list(command)}}, **fields})


def shell(script: str) -> ClusterSpec:
    return spec_of("sh", "-c", script)


def refused(spec: ClusterSpec, limit_s: float = 60.0) -> NodeCommandError:
    with pytest.raises(NodeCommandError) as caught:
        find_nodes(spec, limit_s=limit_s)
    return caught.value


def test_the_node_command_sets_only_the_nodes_of_a_spec() -> None:
    spec = spec_of("echo", "gpu-a:2", env={"A": "b"})
    assert (spec.nodes, [*spec.placements()]) == ([], [])
    asked = find_nodes(spec)
    assert asked.nodes == [NodeSpec(host="gpu-a", tasks={"worker": 2})]
    assert (asked.env, asked.source) == ({"A": "b"}, spec.source)
    assert find_nodes(asked) == asked


def test_a_spec_with_explicit_nodes_is_not_changed() -> None:
    spec = ClusterSpec.model_validate({"nodes": TWO})
    assert find_nodes(spec) is spec


def test_listed_nodes_round_trip_through_the_spec_file_of_a_run() -> None:
    asked = find_nodes(spec_of("echo", "gpu-a"))
    text = asked.model_dump_json(exclude_defaults=True)
    assert json.loads(text) == {"nodes": {"from": {"command": ["echo", "gpu-a"]}, "known": [{"host": "gpu-a"}]}}
    again = ClusterSpec.model_validate_json(text)
    assert (again, again.source) == (asked, asked.source)


def test_a_node_command_error_shows_the_end_of_stderr() -> None:
    error = refused(shell("seq 9 >&2; echo no credentials >&2; exit 4"))
    assert error.message.endswith(", which names the nodes, ended with status 4")
    assert error.evidence == ("6", "7", "8", "9", "no credentials")
    assert (error.reference, error.exit_status) == ("node-list", 3)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -9 $$", "ended with SIGKILL"),
        ("echo why >&2", "printed nothing; it must print one host a line, or JSON"),
        ("yes", "printed more than 16 MiB"),
        ("yes | head -c 20000000", "printed more than 16 MiB"),
    ],
)
def test_a_node_command_without_a_usable_answer_is_an_error(script: str, message: str) -> None:
    error = refused(shell(script))
    assert error.message == f"`sh -c {shlex.quote(script)}`, which names the nodes, {message}"
    assert error.evidence == (("why",) if "why" in script else ())


def test_the_error_for_an_unstartable_node_command_has_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "list"
    assert "No such file or directory" in refused(spec_of(str(path))).message
    path.write_text("")
    assert "Permission denied" in refused(spec_of(str(path))).message


@pytest.mark.parametrize(
    ("printed", "evidence"),
    [
        ("gpu a", "line 1: expected a host, `HOST:SLOTS` or `HOST slots=N`, got 'gpu a'"),
        ('[{"host": "gpu-a", "prot": 22}]', "nodes[0].prot: unknown field; did you mean `port`?"),
        (
            '[{"host": "gpu-a"}, {"host": "gpu-a"}]',
            "nodes[1].host: gpu-a is already nodes[0]; give that node all of the tasks",
        ),
        ('[{"host": "gpu-a", "spare": true}]', "nodes: no task trains; give at least one node `tasks: {worker: 1}`"),
    ],
)
def test_invalid_nodes_are_reported_as_mistakes_of_the_node_command(printed: str, evidence: str) -> None:
    error = refused(spec_of("echo", printed))
    assert error.message.endswith("names cannot be used")
    assert error.evidence == (evidence,)


def test_a_slow_node_command_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    error = refused(shell(f"sleep 600 & echo $$ $! > {pids}; echo slow >&2; wait"), 0.5)
    assert error.message.endswith("did not end within 0.5 s")
    assert error.evidence == ("slow",)
    for pid in pids.read_text().split():
        eventually(partial(check_ended, pid))


def check_ended(pid: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_node_command_is_abandoned_if_its_answer_is_not_needed() -> None:
    spec = shell("sleep 600")
    assert find_nodes(spec, lambda: False) is spec


def test_a_signal_while_the_node_command_starts_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes before any other code knows the process."""
    started = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self.pid)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(InterruptionError):
        find_nodes_first(spec_of("sleep", "600"))
    check_ended(str(started[0]))


def test_a_node_command_error_hides_secrets() -> None:
    error = refused(spec_of("sh", "-c", "echo http://me:hidden@there >&2; exit 1", "--token", "hidden"))
    assert "hidden" not in " ".join([error.message, *error.evidence])


# --- restarts ---


def hosts(run: FakeRun) -> list[list[str]]:
    return [[task.node for task in attempt.tasks] for attempt in run.run().attempts]


def test_a_restart_uses_the_newly_listed_nodes(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [Exit("worker:1", KILL)], restarting(), listed=[[*TWO[:1], {"host": "gpu-c"}]])
    assert hosts(run) == [["gpu-a", "gpu-b"], ["gpu-a", "gpu-c"]]
    assert run.nodes.connections == {"gpu-a": 1, "gpu-b": 1, "gpu-c": 1}
    assert "The nodes are now gpu-a, gpu-c" in run.said


def test_a_cluster_grows_and_shrinks_with_the_listed_nodes(tmp_path: Path) -> None:
    script = [Exit("worker:1", KILL), Exit("worker:1", KILL, attempt=2)]
    run = FakeRun(tmp_path / "run", script, restarting(2), listed=[TWO, TWO[1:]])
    assert hosts(run) == [["gpu-a", "gpu-b"], ["gpu-a", "gpu-b", "gpu-b"], ["gpu-b", "gpu-b"]]


def test_unchanged_nodes_are_not_reconnected_at_a_restart(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [Exit("worker:1", KILL)], restarting())
    assert hosts(run) == [["gpu-a", "gpu-b"]] * 2
    assert run.nodes.connections == {"gpu-a": 1, "gpu-b": 1}
    assert "The nodes are now" not in run.said


def test_a_new_node_replaces_a_lost_node_that_is_no_longer_listed(tmp_path: Path) -> None:
    listed = [[{"host": "gpu-a"}, {"host": "gpu-c"}]]
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, lose("cable pulled", left=0))], restarting(), listed=listed)
    assert hosts(run) == [["gpu-a", "gpu-b"], ["gpu-a", "gpu-c"]]
    assert run.asked == []


def test_a_restart_waits_for_a_lost_node_that_is_still_listed(tmp_path: Path) -> None:
    named = [{"host": "gpu-a"}, {"host": "gpu-b"}, {"host": "gpu-c"}]
    script = [At(Phase.RUNNING, lose("cable pulled", left=0))]
    run = FakeRun(tmp_path / "run", script, restarting(), listed=[named], recover=1)
    assert hosts(run) == [["gpu-a", "gpu-b"], ["gpu-a", "gpu-b", "gpu-c"]]
    assert [node for node, _ in run.asked] == ["gpu-b"]


# --- the commands ---

LIST = """
import pathlib, sys
count = pathlib.Path("asked")
count.write_text(count.read_text() + "x" if count.exists() else "x")
print("local:%d" % (3 - len(count.read_text())))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "list.py").write_text(LIST)
    (tmp_path / "spec.yaml").write_text(
        f"nodes: {{from: {{command: [{sys.executable}, list.py]}}}}\n"
        "program: {command: [sh, -c, 'test $DISTLAUNCH_ATTEMPT = 2']}\nrestart: {max_restarts: 1}\n"
    )
    return tmp_path


def forbid_restarts(folder: Path) -> None:
    spec = (folder / "spec.yaml").read_text()
    (folder / "spec.yaml").write_text(spec.replace("restart: {max_restarts: 1}\n", ""))


def test_the_node_command_runs_at_the_start_and_before_each_restart(distlaunch: Distlaunch, folder: Path) -> None:
    ran = distlaunch("up", "spec.yaml", "--no-check")
    assert ran.status == 0, ran.stderr
    assert [[task["task"] for task in attempt["tasks"]] for attempt in ran.report["attempts"]] == [
        ["worker:0", "worker:1"],
        ["worker:0"],
    ]
    assert (folder / "asked").read_text() == "xx"
    assert json.loads((ran.directory / "spec.json").read_text())["nodes"]["known"] == [{"host": "local"}]


def test_plan_dry_run_and_check_run_the_node_command(in_process: Distlaunch, folder: Path) -> None:
    planned = json.loads(in_process("plan", "--json", "spec.yaml", run_dir=False).stdout)
    assert [task["task"] for task in planned["tasks"]] == ["worker:0", "worker:1"]
    assert in_process("up", "--dry-run", "spec.yaml").stdout.count("by hand") == 1
    (folder / "asked").unlink()
    checked = json.loads(in_process("check", "--json", "spec.yaml", run_dir=False).stdout)
    assert len(checked["nodes"]) == 1
    assert (folder / "asked").read_text() == "x"


def test_check_spec_only_does_not_run_the_node_command(in_process: Distlaunch, folder: Path) -> None:
    ran = in_process("check", "--spec-only", "spec.yaml", run_dir=False)
    assert (ran.status, ran.stdout) == (0, "spec.yaml: ok; the command that names its nodes was not run\n")
    assert not (folder / "asked").exists()


@pytest.mark.parametrize("words", [["up"], ["up", "--dry-run"], ["plan"], ["check"]], ids="-".join)
def test_a_failing_node_command_ends_every_command_before_anything_starts(
    in_process: Distlaunch, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "spec.yaml").write_text("nodes: {from: {command: [sh, -c, 'echo no quota >&2; exit 1']}}\n")
    ran = in_process(*words, "spec.yaml", run_dir=False, env={"XDG_STATE_HOME": str(tmp_path / "state")})
    assert (ran.status, ran.stdout) == (3, "")
    assert ran.stderr == (
        "Error: `sh -c 'echo no quota >&2; exit 1'`, which names the nodes, ended with status 1 [node-list]\n"
        "  no quota\n  run the command by hand; it runs on this machine, in the current folder\n"
    )
    assert not (tmp_path / "state").exists()


def test_a_node_command_that_fails_at_a_restart_ends_the_run(distlaunch: Distlaunch, folder: Path) -> None:
    with (folder / "list.py").open("a") as file:
        file.write('sys.exit("no quota" if len(count.read_text()) > 1 else 0)\n')
    ran = distlaunch("up", "spec.yaml", "--no-check")
    assert ran.status == 3
    assert (ran.report["verdict"]["reference"], ran.report["verdict"]["evidence"]) == ("node-list", ["no quota"])
    assert len(ran.report["attempts"]) == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)
@pytest.mark.parametrize("when", first_quick(["start", "restart", "resume"]))
def test_a_signal_ends_the_node_command_and_the_run(folder: Path, when: str, signum: signal.Signals) -> None:
    asked = "x" if when == "start" else "xx"
    with (folder / "list.py").open("a") as file:
        file.write(f"import os, time\nif count.read_text() == {asked!r}:\n")
        file.write("    pathlib.Path('pid').write_text(str(os.getpid()))\n    time.sleep(600)\n")
    words = ["up", "--no-check", "--run-dir", "run", "spec.yaml"]
    if when == "resume":
        forbid_restarts(folder)
        assert subprocess.run(distlaunch_command(*words), cwd=folder, capture_output=True).returncode == 1
        words = ["resume", "./run"]
    process = subprocess.Popen(distlaunch_command(*words), cwd=folder, stderr=subprocess.PIPE, text=True)
    pid = eventually(partial(read_pid, folder / "pid"))
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, stderr
    assert "interrupted" in stderr.lower()
    check_ended(pid)
    assert (folder / "run").exists() == (when != "start")
    if when != "start":
        assert json.loads((folder / "run" / "report.json").read_text())["outcome"] == "interrupted"


def read_pid(path: Path) -> str:
    assert path.exists()
    text = path.read_text()
    assert text
    return text


def test_a_resumed_run_runs_the_node_command_again(distlaunch: Distlaunch, folder: Path) -> None:
    forbid_restarts(folder)
    failed = distlaunch("up", "spec.yaml", "--no-check")
    assert [len(attempt["tasks"]) for attempt in failed.report["attempts"]] == [2]
    resumed = distlaunch("resume", str(failed.directory), run_dir=False)
    assert resumed.status == 0, resumed.stderr
    assert [len(attempt["tasks"]) for attempt in resumed.report["attempts"]] == [2, 1]
    assert (folder / "asked").read_text() == "xx"

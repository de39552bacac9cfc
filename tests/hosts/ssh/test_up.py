"""`distlaunch up` on other machines: real sshd, real ssh configuration, real keys."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.hosts import loopback
from tests.harness.hosts.sshd import Hosts, make_hosts, running_hosts, running_sshd, skip_without_openssh
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.rules.second_chance import assert_same_bytes
from tests.harness.witness import assert_none_left, await_none_left, make_mark, marked
from worker_entry.protocol.log_index import parse_index

COVERS = (
    "launcher/transports",
    "launcher/controller/links.py",
    "launcher/controller/launch.py",
    "launcher/rundir/directory.py",
    "worker_entry/bootstrap/install.py",
    "worker_entry/agent/files/versions.py",
    "worker_entry/agent/agent.py",
    "worker_entry/__init__.py",
    "worker_entry/__main__.py",
)

TREE = str(PROGRAMS / "spawn_tree.py")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts whose keys are known."""
    skip_without_openssh()
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    with running_hosts(folder) as started:
        started.trust()
        yield started


@pytest.mark.smoke
def test_logs_of_both_nodes_arrive_byte_for_byte(distlaunch: Distlaunch, hosts: Hosts) -> None:
    noise = "head -c 3000000 /dev/urandom; echo; echo done on $DISTLAUNCH_TASK"
    ran = distlaunch("up", hosts.write_spec(f"program: {{command: [sh, -c, '{noise}']}}\n"), env=hosts.env)
    assert ran.status == 0, ran.stderr
    assert "0 processes left on 2 nodes" in ran.stderr
    for task in ("worker-0", "worker-1"):
        log = ran.log(task)
        written = hosts.node_files(ran.report["run_id"]) / "attempt-1" / f"{task}.log"
        assert_same_bytes(log, written.read_bytes())
        assert log.endswith(f"\ndone on {task.replace('-', ':')}\n".encode())
        offsets, moments = parse_index((ran.directory / "attempt-1" / f"{task}.log.index").read_bytes())
        assert offsets[-1] == len(log)
        assert ran.report["started"] < moments[0] / 1e6 <= moments[-1] / 1e6 < ran.report["ended"]


def test_a_host_with_a_host_certificate_is_reached_by_openssh_with_a_note(
    distlaunch: Distlaunch, tmp_path: Path
) -> None:
    skip_without_openssh()
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    hosts = make_hosts(folder)
    key, authority = folder / "host_key", folder / "other_key"
    names = ",".join(hosts.addresses.values())
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "a host", "-h", "-n", names, str(key)]
    subprocess.run(sign, check=True)
    hosts.known_hosts.write_text(f"@cert-authority * {authority.with_suffix('.pub').read_text()}")
    options = {"HostCertificate": folder / "host_key-cert.pub"}
    with running_sshd(hosts, *hosts.addresses.values(), options=options):
        ran = distlaunch("up", hosts.write_spec("program: {command: [echo, begun]}\n"), env=hosts.env)
        assert ran.status == 0, ran.stderr
        assert ran.log("worker-1") == b"begun\n"
        for host in hosts.addresses:
            assert f"node {host}: uses your own ssh, because a certificate authority vouches for" in ran.stderr
        chosen = hosts.write_spec("connection: paramiko\nprogram: {command: [echo, begun]}\n")
        assert distlaunch("up", chosen, env=hosts.env, run_dir=False).status == 3


@pytest.mark.smoke
def test_hosts_need_no_spec_and_variables_appear_on_no_command_line(distlaunch: Distlaunch, hosts: Hosts) -> None:
    named = f"gpu-a:2,ssh://gpu-b:{hosts.port}"
    show = "echo $DISTLAUNCH_TASK has $A and $B; tr '\\0' ' ' < /proc/$PPID/cmdline"
    env = {**hosts.env, "B": "aubergine"}
    ran = distlaunch("up", "-H", named, "-e", "A=courgette", "-e", "B", "--", "sh", "-c", show, env=env)
    assert ran.status == 0, ran.stderr
    for task in ("worker-0", "worker-1", "worker-2"):
        first, parent = ran.log(task).decode().split("\n", 1)
        assert first == f"{task.replace('-', ':')} has courgette and aubergine"
        assert parent
        assert "courgette" not in parent
    assert [task["node"] for task in ran.report["attempts"][0]["tasks"]] == ["gpu-a", "gpu-a", "gpu-b"]
    assert "aubergine" not in (hosts.folder / "ssh.log").read_text()


@pytest.mark.smoke
def test_a_restart_uses_the_node_that_the_node_command_prints_then(distlaunch: Distlaunch, hosts: Hosts) -> None:
    asked = hosts.folder / "asked"
    names = f"test -e {asked} && echo gpu-b || echo gpu-a; touch {asked}"
    spec = hosts.folder / "spec.yaml"
    spec.write_text(
        f"nodes: {{from: {{command: [sh, -c, '{names}']}}}}\nrestart: {{max_restarts: 1}}\n"
        "program: {command: [sh, -c, 'test $DISTLAUNCH_ATTEMPT = 2']}\n"
    )
    mark = make_mark()
    ran = distlaunch("up", "-e", next(iter(mark)), str(spec), env={**hosts.env, **mark})
    assert ran.status == 0, ran.stderr
    assert "The nodes are now gpu-b" in ran.stderr
    attempts = ran.report["attempts"]
    assert [[task["node"] for task in attempt["tasks"]] for attempt in attempts] == [["gpu-a"], ["gpu-b"]]
    assert "0 processes left" in ran.stderr
    assert_none_left(mark)


def test_workers_connect_to_the_address_at_which_their_node_is_reached(distlaunch: Distlaunch, hosts: Hosts) -> None:
    ran = distlaunch("up", hosts.write_spec("program: {command: [printenv, TF_CONFIG]}\n"), env=hosts.env)
    a, b = map(re.escape, hosts.addresses.values())
    addresses = re.findall(rf'"worker":\["{a}:(\d+)","{b}:(\d+)"\]', ran.stdout)
    assert len(addresses) == 2
    assert addresses[0] == addresses[1]


def test_this_machine_and_a_remote_node_form_one_cluster(distlaunch: Distlaunch, hosts: Hosts, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "nodes:\n"
        "  - {host: local, address: 127.0.0.1}\n"
        f"  - {{host: gpu-b, python: {sys.executable}}}\n"
        "program: {command: [printenv, TF_CONFIG]}\n"
    )
    ran = distlaunch("up", str(spec), env=hosts.env)
    assert ran.status == 0, ran.stderr
    configs = [json.loads(ran.log(task)) for task in ("worker-0", "worker-1")]
    assert [config["task"]["index"] for config in configs] == [0, 1]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    addresses = [address.rpartition(":")[0] for address in configs[0]["cluster"]["worker"]]
    assert addresses == ["127.0.0.1", hosts.addresses["gpu-b"]]


def test_a_node_behind_a_jump_host_is_reached(distlaunch: Distlaunch, hosts: Hosts) -> None:
    config = hosts.folder / "config"
    config.write_text(config.read_text().replace("Host gpu-b\n", "Host gpu-b\n  ProxyJump gpu-a\n"))
    mark = make_mark()
    spec = hosts.write_spec(f"program: {{command: [echo, here]}}\nenv_from: [{next(iter(mark))}]\n")
    ran = distlaunch("up", spec, env={**hosts.env, **mark})
    assert ran.status == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["worker:0 │ here", "worker:1 │ here"]
    assert f"-W {hosts.known_name('gpu-b')} -- gpu-a" in (hosts.folder / "ssh.log").read_text()
    assert_none_left(mark)  # including the proxy, a child of distlaunch


def test_arguments_and_environment_arrive_unchanged_on_remote_nodes(
    distlaunch: Distlaunch, hosts: Hosts, tmp_path: Path
) -> None:
    (tmp_path / "show.py").write_text("import os, sys; print(repr((sys.argv[1:], os.environ['ODD'])))\n")
    odd = "'\"$(touch /nowhere) `x` \\ é\u2028 *"
    quoted = json.dumps(odd)
    spec = hosts.write_spec(f"program: {{script: show.py, args: [{quoted}]}}\nenv: {{ODD: {quoted}}}\n")
    ran = distlaunch("up", spec, env=hosts.env)
    assert ran.status == 0, ran.stderr
    assert ran.log().decode() == f"{([odd], odd)!r}\n"


def test_no_command_line_on_a_node_shows_user_data(hosts: Hosts, tmp_path: Path) -> None:
    secret = "hunter2hunter2"
    (tmp_path / "wait.py").write_text("import time; print('waiting', flush=True); time.sleep(600)\n")
    mark = make_mark()
    spec = hosts.write_spec(
        f"program: {{script: wait.py, args: [{secret}]}}\nenv: {{TOKEN: {secret}}}\nenv_from: [{next(iter(mark))}]\n"
    )
    process = start(hosts, spec, tmp_path, mark)
    with process:
        assert process.stdout is not None
        for _ in range(2):
            assert b"waiting" in process.stdout.readline()
        lines = subprocess.run(["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True).stdout
        assert lines.count("worker_entry task") >= 2
        assert secret not in lines
        assert "wait.py" not in lines
        process.terminate()
        assert process.wait(timeout=30) == 143
    assert_none_left(mark)


@pytest.mark.smoke
def test_unknown_host_keys_are_refused_with_the_command_that_adds_them(distlaunch: Distlaunch, hosts: Hosts) -> None:
    hosts.known_hosts.unlink()
    ran = distlaunch("up", hosts.write_spec("program: {command: ['true']}\n"), env=hosts.env)
    assert ran.status == 3
    assert ran.stderr.count("is unknown (ssh-ed25519 SHA256:") == 2  # once for each node
    assert f"ssh-keyscan -p {hosts.port} {hosts.addresses['gpu-a']} >> {hosts.known_hosts}" in ran.stderr
    assert "processes left" not in ran.stderr  # no node was reached


def test_a_changed_host_key_is_refused(distlaunch: Distlaunch, hosts: Hosts) -> None:
    hosts.trust("other_key")
    ran = distlaunch("up", hosts.write_spec("program: {command: ['true']}\n"), env=hosts.env)
    assert ran.status == 3
    name = hosts.known_name("gpu-a")
    assert f"the host key of {name} has changed, or the connection is intercepted" in ran.stderr
    assert f"ssh-keygen -R '{name}'" in ran.stderr


def test_a_revoked_host_key_is_refused(distlaunch: Distlaunch, hosts: Hosts) -> None:
    key = (hosts.folder / "host_key.pub").read_text()
    hosts.known_hosts.write_text(f"{hosts.known_hosts.read_text()}@revoked * {key}")
    ran = distlaunch("up", hosts.write_spec("program: {command: ['true']}\n"), env=hosts.env)
    assert ran.status == 3
    assert "is revoked" in ran.stderr


def test_a_hashed_known_hosts_file_is_accepted(distlaunch: Distlaunch, hosts: Hosts) -> None:
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(hosts.known_hosts)], check=True, capture_output=True)
    assert hosts.addresses["gpu-a"] not in hosts.known_hosts.read_text()
    ran = distlaunch("up", hosts.write_spec("program: {command: ['true']}\n"), env=hosts.env)
    assert ran.status == 0, ran.stderr


def test_openssh_accepts_an_unknown_host_only_with_accept_new(distlaunch: Distlaunch, hosts: Hosts) -> None:
    hosts.known_hosts.write_text("")
    program = "program: {command: ['true']}\nconnection: openssh\n"
    ran = distlaunch("up", hosts.write_spec(program), env=hosts.env)
    assert ran.status == 3
    assert "Host key verification failed" in ran.stderr
    assert hosts.known_hosts.read_text() == ""
    shutil.rmtree(ran.directory)
    ran = distlaunch("up", hosts.write_spec(f"{program}host_keys: accept-new\n"), env=hosts.env)
    assert ran.status == 0, ran.stderr
    known = {line.split()[0] for line in hosts.known_hosts.read_text().splitlines()}
    assert known == {hosts.known_name(name) for name in hosts.addresses}


def test_accept_new_adds_an_unknown_host_key_but_refuses_a_changed_one(distlaunch: Distlaunch, hosts: Hosts) -> None:
    hosts.known_hosts.write_text("# mine, without a line break")
    spec = hosts.write_spec("program: {command: ['true']}\nhost_keys: accept-new\n")
    ran = distlaunch("up", spec, env=hosts.env)
    assert ran.status == 0, ran.stderr
    assert f") was unknown; added to {hosts.known_hosts}" in ran.stderr
    key = " ".join((hosts.folder / "host_key.pub").read_text().split()[:2])
    lines = hosts.known_hosts.read_text().splitlines()
    assert lines[0] == "# mine, without a line break"
    assert sorted(lines[1:]) == [f"{hosts.known_name(name)} {key}" for name in ("gpu-a", "gpu-b")]
    shutil.rmtree(ran.directory)
    assert "was unknown" not in distlaunch("up", spec, env=hosts.env).stderr
    hosts.trust("other_key")
    shutil.rmtree(ran.directory)
    ran = distlaunch("up", spec, env=hosts.env)
    assert ran.status == 3
    assert f"the host key of {hosts.known_name('gpu-a')} has changed" in ran.stderr


def test_a_user_certificate_is_accepted_for_login(distlaunch: Distlaunch, tmp_path: Path) -> None:
    skip_without_openssh()
    hosts = make_hosts(tmp_path)
    hosts.trust()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "ca"], check=True)
    user_key = tmp_path / "user_key.pub"
    subprocess.run(["ssh-keygen", "-q", "-s", tmp_path / "ca", "-I", "me", "-n", "root", user_key], check=True)
    options = {"TrustedUserCAKeys": tmp_path / "ca.pub", "AuthorizedKeysFile": "none"}
    with running_sshd(hosts, *hosts.addresses.values(), options=options):
        ran = distlaunch("up", hosts.write_spec("program: {command: ['true']}\n"), env=hosts.env)
    assert ran.status == 0, ran.stderr


def test_ssh_settings_of_the_spec_override_the_ssh_configuration(distlaunch: Distlaunch, hosts: Hosts) -> None:
    config = hosts.folder / "config"
    config.write_text(
        config.read_text().replace(f"Port {hosts.port}", "Port 9\n  User nobody").replace("user_key", "other_key")
    )
    right = f"ssh: {{user: root, port: {hosts.port}, identity_file: {hosts.folder}/user_key}}\n"
    ran = distlaunch("up", hosts.write_spec(f"program: {{command: ['true']}}\n{right}"), env=hosts.env)
    assert ran.status == 0, ran.stderr


def test_a_spec_can_replace_the_ssh_configuration(distlaunch: Distlaunch, hosts: Hosts, tmp_path: Path) -> None:
    hosts.known_hosts.rename(hosts.folder / "other known hosts")
    (hosts.folder / "config").write_text("Host *\n  IdentityFile none\n")
    nodes = "".join(
        f"  - {{host: node-{index}, python: {sys.executable}, ssh: {{hostname: {address}}}}}\n"
        for index, address in enumerate(hosts.addresses.values())
    )
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"nodes:\n{nodes}program: {{command: [sh, -c, 'echo $TF_CONFIG']}}\nssh: {{user: root, port: {hosts.port}, "
        f"identity_file: {hosts.folder}/user_key, known_hosts_file: {hosts.folder}/other known hosts}}\n"
    )
    ran = distlaunch("up", str(spec), env=hosts.env)
    assert ran.status == 0, ran.stderr
    assert [task["node"] for task in ran.report["attempts"][0]["tasks"]] == ["node-0", "node-1"]
    assert f"{hosts.addresses['gpu-b']}:" in ran.log().decode()


def test_a_rejected_user_key_is_named(distlaunch: Distlaunch, hosts: Hosts) -> None:
    config = (hosts.folder / "config").read_text()
    (hosts.folder / "config").write_text(config.replace("/user_key", "/other_key"))
    ran = distlaunch("up", hosts.write_spec("program: {command: ['true']}\n"), env=hosts.env)
    assert ran.status == 3
    assert f"rejects the login; refused: {hosts.folder / 'other_key'}" in ran.stderr


def test_a_key_with_a_passphrase_is_reported_with_a_hint_to_ssh_add(distlaunch: Distlaunch, hosts: Hosts) -> None:
    key = hosts.folder / "user_key"
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(key)], check=True, capture_output=True
    )
    ran = distlaunch("up", hosts.write_spec("program: {command: ['true']}\n"), env={**hosts.env, "SSH_AUTH_SOCK": ""})
    assert ran.status == 3
    assert f"{key} has a passphrase; unlock it with ssh-add" in ran.stderr


def test_all_unusable_nodes_are_reported_at_once(distlaunch: Distlaunch, hosts: Hosts, tmp_path: Path) -> None:
    spec, nobody = tmp_path / "spec.yaml", loopback.address(0, 9)
    spec.write_text(
        "nodes:\n"
        f"  - {{host: gpu-a, python: {sys.executable}}}\n"
        "  - {host: gpu-b, python: /opt/none/bin/python}\n"
        f"  - {{host: {nobody}}}\n"
        "  - {host: no-such-host.invalid}\n"
        "program: {command: ['true']}\n"
    )
    mark = make_mark()
    ran = distlaunch("up", str(spec), env={**hosts.env, **mark})
    assert ran.status == 3
    assert f"node {nobody} cannot be used: connection refused: {nobody}:{hosts.port}" in ran.stderr
    assert "node no-such-host.invalid cannot be used: the name no-such-host.invalid is not known" in ran.stderr
    assert "node gpu-b cannot be used: no Python at /opt/none/bin/python; set `python:` for this node" in ran.stderr
    assert "node gpu-a " not in ran.stderr
    assert [task["started"] for task in ran.report["attempts"][0]["tasks"]] == [None] * 4


def test_a_node_with_an_old_python_is_reported(distlaunch: Distlaunch, hosts: Hosts, tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text(
        f'#!/bin/sh\nshift; exec {sys.executable} -c "import sys; sys.version_info = (3, 8, 1)\n$1" "$2" "$3" "$4"\n'
    )
    old.chmod(0o755)
    ran = distlaunch("up", hosts.write_spec("program: {command: ['true']}\n", python=str(old)), env=hosts.env)
    assert ran.status == 3
    assert "is Python 3.8; a node needs 3.9 or newer" in ran.stderr


@pytest.mark.smoke
def test_a_failure_on_one_node_stops_the_process_trees_on_both(
    distlaunch: Distlaunch, hosts: Hosts, tmp_path: Path
) -> None:
    mark = make_mark()
    name = next(iter(mark))
    spec = hosts.write_spec(f"program: {{script: {TREE}, args: ['worker:1', 2]}}\nenv_from: [{name}]\n")
    ran = distlaunch("up", spec, env={**hosts.env, **mark})
    assert ran.status == 1
    assert "Error: worker:1 on gpu-b exited with status 3" in ran.stderr
    assert "0 processes left on 2 nodes" in ran.stderr
    assert_none_left(mark)


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.smoke)])
def test_no_process_is_left_on_any_node_after_the_controller_ends(hosts: Hosts, tmp_path: Path, signum: int) -> None:
    mark = make_mark()
    spec = hosts.write_spec(
        f"program: {{script: {TREE}, args: [none, 2]}}\nenv_from: [{next(iter(mark))}]\n"
        "timeouts: {stop_grace_s: 1, lease_s: 5}\n"
    )
    process = start(hosts, spec, tmp_path, mark)
    with process:
        assert process.stdout is not None
        for _ in range(2):
            assert b"the tree stands" in process.stdout.readline()
        assert len(marked(mark)) >= 2 * 4
        process.send_signal(signum)
        assert process.wait(timeout=60) == (130 if signum == signal.SIGINT else -signal.SIGKILL)
    await_none_left(mark)


@pytest.mark.tensorflow
def test_two_remote_nodes_train_the_demo(distlaunch: Distlaunch, hosts: Hosts) -> None:
    ran = distlaunch("up", hosts.write_spec(""), env=hosts.env, timeout=240)
    assert ran.status == 0, ran.stderr
    accuracies = re.findall(r"^worker:\d │ worker:\d of 2: validation accuracy (0\.\d+)", ran.stdout, re.MULTILINE)
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1]
    assert float(accuracies[0]) >= 0.95


@pytest.mark.tensorflow
def test_each_remote_node_imports_tensorflow_once_and_forks_its_tasks(
    distlaunch: Distlaunch, hosts: Hosts, tmp_path: Path
) -> None:
    program = tmp_path / "early.py"
    program.write_text(
        "import os; early = 'forkserver' in open('/proc/self/cmdline').read()\n"
        "print('early', early, os.getppid())\nif early:\n    import tensorflow\n"
    )
    spec = hosts.write_spec(f"program: {{script: {program}}}\n")
    ran = distlaunch("up", spec, env=hosts.env)
    assert ran.status == 0, ran.stderr
    assert "not forked" not in ran.stderr
    assert ran.stdout.count("early True") == 2
    alone = distlaunch("up", "--set", "preload=false", "--run-dir", str(tmp_path / "alone"), spec, env=hosts.env)
    assert alone.status == 0, alone.stderr
    assert alone.stdout.count("early False") == 2


def start(hosts: Hosts, spec: str, folder: Path, mark: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts `distlaunch up` and returns at once."""
    return subprocess.Popen(
        distlaunch_command("up", "--run-dir", str(folder / "run"), spec),
        cwd=folder,
        env={**os.environ, **hosts.env, **mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )

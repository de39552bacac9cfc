"""`distlaunch up` on hosts that are as separate as machines: connections, trust, and the user who logs in."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.hosts.namespaces import CONTROLLER, Network, needs_namespaces, running_network, sshd_command, up
from tests.harness.hosts.sshd import PORT
from tests.harness.polling import HANG_S
from tests.harness.processes.jax import LOOK, PYTHON, read_look, skip_without_jax
from tests.harness.rules.second_chance import assert_same_bytes
from tests.harness.witness import assert_none_left, make_mark, marked, wait_until

COVERS = (
    "launcher/transports",
    "worker_entry/agent/checks",
    "worker_entry/agent/agent.py",
    "worker_entry/program",
)

pytestmark = needs_namespaces

WHO = "program: {command: [sh, -c, 'echo $(hostname) $(id -un) $HOME']}\n"
FROM = "program: {command: [sh, -c, 'echo ${SSH_CONNECTION% *}']}\n"  # client, its port, server; without its port
PROBE = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=0.5)"
KEY_EXCHANGE = {20, 21, 30}  # packets of SSH, by their numbers: KEXINIT, NEWKEYS, KEX_ECDH_INIT
SERVICE_REQUEST, USERAUTH_REQUEST = 5, 50
NETCAT = """\
import os, socket, sys, threading
marker, host, port = sys.argv[1:]
open(marker, "w").close()
connection = socket.create_connection((host, int(port)))
def send():
    while data := os.read(0, 65536):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := connection.recv(65536):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
"""


@pytest.fixture(scope="module")
def root_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts on which root logs in."""
    with running_network(tmp_path_factory.mktemp("root")) as network:
        yield network


@pytest.fixture(scope="module")
def user_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts on which an unprivileged user logs in, who is not the controller's user."""
    with running_network(tmp_path_factory.mktemp("user"), user="trainer") as network:
        yield network


@pytest.mark.jax
def test_processes_of_jax_on_two_hosts_find_each_other_by_the_addresses_of_the_cluster(
    root_network: Network, tmp_path: Path
) -> None:
    """By itself, gloo would look up the name of the host, which is the same on both."""
    skip_without_jax()
    rest = f"framework: jax\nprogram: {{script: {LOOK}}}\n"
    ran = up(root_network, root_network.write_spec(rest, python=PYTHON), tmp_path, timeout=HANG_S)
    assert ran.status == 0, ran.stderr
    assert "0 processes left on 2 nodes" in ran.stderr
    for index, host in enumerate(root_network.hosts.values()):
        found = read_look(ran.log(f"worker-{index}").decode())
        assert (found["index"], found["ranks"], found["all"]) == (index, [0, 1], 2)
        assert socket.inet_aton(host.address)[::-1].hex().upper() in found["listening"]


@pytest.fixture(params=["root_network", "user_network"], ids=["root", "ordinary-user"])
def network(request: pytest.FixtureRequest) -> Network:
    """Two hosts; the test runs once with each kind of user."""
    chosen: Network = request.getfixturevalue(request.param)
    return chosen


def answers(network: Network, address: str) -> bool:
    """Whether the controller can connect to the sshd at the address."""
    return network.run([sys.executable, "-c", PROBE, address, str(PORT)]).returncode == 0


# --- the hosts themselves ---


def test_hosts_of_a_test_network_are_isolated_and_can_be_cut_off(root_network: Network) -> None:
    a, b = root_network.hosts.values()
    assert [host.run(["hostname"]).stdout for host in (a, b)] == ["gpu-a\n", "gpu-b\n"]
    assert a.home != b.home
    for address in (a.address, a.address6, b.address, b.address6):
        assert answers(root_network, address)
    try:
        a.down()
        assert not answers(root_network, a.address)
        assert not answers(root_network, a.address6)
        a.up()
        b.block()
        assert not answers(root_network, b.address)
        assert not answers(root_network, b.address6)
        a.run([sys.executable, "-c", PROBE, b.address, str(PORT)])  # other hosts still reach it
    finally:
        a.up()
        b.unblock()
    for address in (a.address, a.address6, b.address, b.address6):
        wait_until(lambda to=address: answers(root_network, to), f"{address} is back")  # type: ignore[misc]


def test_a_test_network_is_removed_completely_after_a_failure(tmp_path: Path) -> None:
    mark = make_mark()

    def fail(network: Network) -> None:
        for host in network.hosts.values():
            argv = [*host.enter, "setsid", "sh", "-c", "trap '' TERM HUP; sleep 600; sleep 600"]
            processes.append(subprocess.Popen(argv, env={**os.environ, **mark}))
        processes.append(network.popen(["sleep", "600"], env=mark))
        wait_until(lambda: len(marked(mark)) == 5, "all have started")
        network.hosts["gpu-b"].destroy()
        assert not answers(network, network.hosts["gpu-b"].address)
        raise ZeroDivisionError(network.suffix)

    processes: list[subprocess.Popen[bytes]] = []
    with pytest.raises(ZeroDivisionError) as raised:
        with running_network(tmp_path, user="trainer") as network:
            fail(network)
    (suffix,) = raised.value.args
    assert [process.wait() for process in processes] == [-signal.SIGKILL] * 3
    assert_none_left(mark)
    assert [path for path in Path("/run/netns").iterdir() if suffix in path.name] == []
    assert suffix not in Path("/etc/passwd").read_text()


# --- who logs in ---


@pytest.mark.tensorflow
def test_an_unprivileged_user_trains_the_demo_on_two_hosts(user_network: Network, tmp_path: Path) -> None:
    """Only as an unprivileged user, because it takes long; `ssh/test_up.py` trains the demo as root."""
    network = user_network
    ran = up(network, network.write_spec(""), tmp_path, timeout=240)
    assert ran.status == 0, ran.stderr
    assert "0 processes left on 2 nodes" in ran.stderr
    (attempt,) = ran.report["attempts"]
    assert (ran.report["outcome"], ran.report["exit_status"], attempt["processes_left"]) == ("succeeded", 0, 0)
    assert attempt["verdict"]["reference"] == "succeeded"
    assert [task["exit_code"] for task in attempt["tasks"]] == [0, 0]
    assert [task["address"].partition(":")[0] for task in attempt["tasks"]] == ["10.77.0.11", "10.77.0.12"]
    for task in attempt["tasks"]:
        assert attempt["started"] < task["started"] < task["port_opened"] < task["ended"] < attempt["ended"]
    assert ran.report["versions"]["tensorflow"]
    for name, host in zip(("worker-0", "worker-1"), network.hosts.values(), strict=True):
        files = host.node_files(ran.report["run_id"]) / "attempt-1"
        assert_same_bytes(ran.log(name), (files / f"{name}.log").read_bytes())
        assert list(files.glob("*.log")) == [files / f"{name}.log"]  # the other log is on the other host
        assert re.search(rb"of 2: validation accuracy 0\.9[5-9]", ran.log(name))


def test_tasks_run_as_the_user_who_logs_in_over_ssh(network: Network, tmp_path: Path) -> None:
    mark = make_mark()
    ran = up(network, network.write_spec(f"{WHO}env_from: [{next(iter(mark))}]\n"), tmp_path, mark)
    assert ran.status == 0, ran.stderr
    for task, host in zip(("worker-0", "worker-1"), network.hosts.values(), strict=True):
        assert ran.log(task).decode() == f"{host.name} {network.user} {host.home}\n"
        files = host.node_files(ran.report["run_id"])
        assert files.owner() == network.user
        assert files.stat().st_mode & 0o777 == 0o700
    assert_none_left(mark)


# --- connections ---


def test_a_node_behind_a_bastion_is_reached_by_proxyjump(user_network: Network, tmp_path: Path) -> None:
    (tmp_path / "more").write_text(f"Host inner*\n  HostName {user_network.hosts['gpu-b'].address}\n")
    env = user_network.client(tmp_path, f"Include {tmp_path}/more\nMatch host 10.77.0.12\n  ProxyJump gpu-a\n")
    mark = make_mark()
    spec = user_network.write_spec(f"{FROM}env_from: [{next(iter(mark))}]\n", ["gpu-a", "inner-1"])
    user_network.hosts["gpu-b"].block()
    try:
        ran = up(user_network, spec, tmp_path, {**env, **mark})
    finally:
        user_network.hosts["gpu-b"].unblock()
    assert ran.status == 0, ran.stderr
    assert re.fullmatch(rb"10\.77\.0\.1 \d+ 10\.77\.0\.11\n", ran.log("worker-0"))
    assert re.fullmatch(rb"10\.77\.0\.11 \d+ 10\.77\.0\.12\n", ran.log("worker-1"))
    assert_none_left(mark)  # including the proxy process


@pytest.mark.parametrize("way", ["ssh -W", "a program", "a line of shell"])
def test_a_proxycommand_in_the_ssh_configuration_is_used(root_network: Network, tmp_path: Path, way: str) -> None:
    (tmp_path / "netcat.py").write_text(NETCAT)
    program = f"{sys.executable} {tmp_path}/netcat.py {tmp_path}/used %h %p"
    command = {
        "ssh -W": "ssh -W [%h]:%p gpu-a",
        "a program": program,
        "a line of shell": f"{program} 2>/dev/null",  # OpenSSH leaves the command to the user's shell
    }[way]
    mark = make_mark()
    spec = root_network.write_spec(f"{FROM}env_from: [{next(iter(mark))}]\n", ["gpu-b"])
    env = root_network.client(tmp_path, f"Host gpu-b\n  ProxyCommand {command}\n")
    ran = up(root_network, spec, tmp_path, {**env, **mark})
    assert ran.status == 0, ran.stderr
    source = "10.77.0.11" if way == "ssh -W" else CONTROLLER[0]
    assert re.fullmatch(rf"{source} \d+ 10\.77\.0\.12\n", ran.log().decode())
    assert (tmp_path / "used").exists() == (way != "ssh -W")
    assert_none_left(mark)


@pytest.mark.parametrize(
    ("way", "reason"),
    [("ProxyJump closed", "connection refused"), ("ProxyCommand /nowhere/proxy %h %p", "/nowhere/proxy")],
)
def test_a_proxy_that_does_not_reach_the_node_is_reported_with_the_reason(
    root_network: Network, tmp_path: Path, way: str, reason: str
) -> None:
    env = root_network.client(tmp_path, f"Host gpu-b\n  {way}\nHost closed\n  HostName 10.77.0.11\n  Port 9\n")
    ran = up(root_network, root_network.write_spec(WHO, ["gpu-b"]), tmp_path, env)
    assert ran.status == 3
    assert "node gpu-b cannot be used: " in ran.stderr
    assert reason in ran.stderr.lower()


def test_nodes_named_by_ipv6_addresses_are_reached(root_network: Network, tmp_path: Path) -> None:
    addresses = [host.address6 for host in root_network.hosts.values()]
    spec = root_network.write_spec("program: {command: [printenv, TF_CONFIG]}\n", addresses)
    ran = up(root_network, spec, tmp_path)
    assert ran.status == 0, ran.stderr
    configs = [json.loads(ran.log(task)) for task in ("worker-0", "worker-1")]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    dialled = [address.rpartition(":")[0] for address in configs[0]["cluster"]["worker"]]
    assert dialled == [f"[{address}]" for address in addresses]


def test_the_ssh_configuration_is_read_without_the_openssh_client(user_network: Network, tmp_path: Path) -> None:
    folder = tmp_path / ".ssh"
    folder.mkdir(mode=0o700)
    shutil.copy(user_network.folder / "user_key", folder / "id_lab")
    shutil.copy(user_network.folder / "known_hosts", folder)
    (folder / "config").write_text(
        "".join(f"Host lab-{host.name}\n  HostName {host.address}\n" for host in user_network.hosts.values())
        + f"Host lab-*\n  User {user_network.user}\n  Port {PORT}\n  IdentityFile ~/.ssh/id_lab\n"
    )
    (tmp_path / "bin").mkdir()  # a PATH without programs
    spec = user_network.write_spec(WHO, ["lab-gpu-a", "lab-gpu-b"])
    ran = up(user_network, spec, tmp_path, {"HOME": str(tmp_path), "PATH": str(tmp_path / "bin"), "SSH_AUTH_SOCK": ""})
    assert ran.status == 0, ran.stderr
    logged_in = [ran.log(task).decode().split()[:2] for task in ("worker-0", "worker-1")]
    assert logged_in == [["gpu-a", user_network.user], ["gpu-b", user_network.user]]


# --- keys ---


@contextlib.contextmanager
def ssh_agent(tmp_path: Path, key: Path, passphrase: str = "") -> Iterator[str]:
    """An ssh-agent that holds the key; yields its socket."""
    socket = tmp_path / "agent"
    ask = tmp_path / "ask"
    ask.write_text(f"#!/bin/sh\necho '{passphrase}'\n")
    ask.chmod(0o755)
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    env = {**os.environ, "SSH_AUTH_SOCK": str(socket), "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}

    def listens() -> bool:
        """The socket exists a moment earlier. Status 1: the agent holds no key; 2: it does not answer."""
        return subprocess.run(["ssh-add", "-l"], env=env, capture_output=True, check=False).returncode == 1

    try:
        wait_until(listens, "the agent listens")
        subprocess.run(["ssh-add", "-q", str(key)], env=env, check=True, stdin=subprocess.DEVNULL)
        yield str(socket)
    finally:
        agent.terminate()
        agent.wait()


def test_a_key_that_only_the_ssh_agent_holds_is_used(user_network: Network, tmp_path: Path) -> None:
    key = tmp_path / "key"
    shutil.copy(user_network.folder / "user_key", key)
    env = user_network.client(tmp_path, identity="IdentityFile none\n")
    with ssh_agent(tmp_path, key) as socket:
        key.unlink()
        ran = up(user_network, user_network.write_spec(WHO), tmp_path, {**env, "SSH_AUTH_SOCK": socket})
    assert ran.status == 0, ran.stderr


@pytest.mark.parametrize("more", ["", "IdentitiesOnly yes\n"], ids=["any-identity", "identities-only"])
def test_an_encrypted_key_that_the_ssh_agent_holds_is_used(user_network: Network, tmp_path: Path, more: str) -> None:
    key = tmp_path / "key"
    shutil.copy(user_network.folder / "user_key", key)
    shutil.copy(user_network.folder / "user_key.pub", tmp_path / "key.pub")
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "a long secret", "-f", str(key)]
    subprocess.run(change, check=True, stdout=subprocess.DEVNULL)
    env = user_network.client(tmp_path, identity=f"IdentityFile {key}\n{more}")
    with ssh_agent(tmp_path, key, "a long secret") as socket:
        env["SSH_AUTH_SOCK"] = socket
        asked = user_network.run(["ssh", "-o", "BatchMode=yes", "gpu-a", "true"], env=env)
        assert asked.returncode == 0, asked.stderr
        ran = up(user_network, user_network.write_spec(WHO), tmp_path, env)
    assert ran.status == 0, ran.stderr


def test_the_identityagent_of_the_ssh_configuration_is_used(user_network: Network, tmp_path: Path) -> None:
    env = user_network.client(tmp_path, identity=f"IdentityFile none\nIdentityAgent {tmp_path}/agent\n")
    env["SSH_AUTH_SOCK"] = ""
    with ssh_agent(tmp_path, user_network.folder / "user_key"):
        asked = user_network.run(["ssh", "-o", "BatchMode=yes", "gpu-a", "true"], env=env)
        assert asked.returncode == 0, asked.stderr
        ran = up(user_network, user_network.write_spec(WHO), tmp_path, env)
    assert ran.status == 0, ran.stderr


# --- trust ---


@contextlib.contextmanager
def somebody_in_between(network: Network, log: Path) -> Iterator[None]:
    """gpu-b answers at gpu-a's address, with its own host key, and logs every packet."""
    a, b = network.hosts.values()
    sshd = sshd_command(b.folder, [a.address], log_level="DEBUG3")
    a.down()
    b.run(["ip", "address", "add", f"{a.address}/32", "dev", b.device])
    network.run(["ip", "neighbour", "flush", "all"])
    with log.open("wb") as errors:
        daemon = subprocess.Popen([*b.enter, *sshd], stderr=errors)
    try:
        wait_until(lambda: "Server listening on" in log.read_text(), "sshd listens")
        yield
    finally:
        daemon.terminate()
        daemon.wait()
        b.run(["ip", "address", "del", f"{a.address}/32", "dev", b.device])
        a.up()
        network.run(["ip", "neighbour", "flush", "all"])


def test_a_man_in_the_middle_is_refused_before_it_receives_any_secret(root_network: Network, tmp_path: Path) -> None:
    known = f"[10.77.0.11]:{PORT}"
    spec = root_network.write_spec(WHO, ["gpu-a"])
    with somebody_in_between(root_network, tmp_path / "strict.log"):
        ran = up(root_network, spec, tmp_path)
    assert ran.status == 3
    assert f"the host key of {known} has changed, or the connection is intercepted (ssh-ed25519 SHA256:" in ran.stderr
    assert f"ssh-keygen -R '{known}'" in ran.stderr
    assert received(tmp_path / "strict.log") <= KEY_EXCHANGE

    # If trusted, the same daemon would have received everything, and would have logged it.
    (tmp_path / "known_hosts").write_text(
        f"{known} {(root_network.hosts['gpu-b'].folder / 'host_key.pub').read_text()}"
    )
    env = root_network.client(tmp_path, f"UserKnownHostsFile {tmp_path}/known_hosts\n")
    (tmp_path / "again").mkdir()
    with somebody_in_between(root_network, tmp_path / "trusting.log"):
        ran = up(root_network, spec, tmp_path / "again", env)
    assert ran.status == 0, ran.stderr
    assert ran.log().startswith(b"gpu-b ")
    assert received(tmp_path / "trusting.log") >= {*KEY_EXCHANGE, SERVICE_REQUEST, USERAUTH_REQUEST}


def received(log: Path) -> set[int]:
    """The types of the packets that an sshd received."""
    return {int(number) for number in re.findall(r"receive packet: type (\d+)", log.read_text())}

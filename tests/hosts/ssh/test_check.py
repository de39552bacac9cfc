"""The checks before a start, on real nodes with real faults: what `check` shows, and what prevents a start."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from tests.harness.hosts.namespaces import CONTROLLER, IP, Host, Network, opened_network, up
from tests.harness.hosts.sshd import Hosts, make_hosts, running_sshd, skip_without_openssh
from tests.harness.processes.commands import Distlaunch, Ran, distlaunch_command
from tests.harness.witness import wait_until

COVERS = (
    "launcher/gang",
    "launcher/transports",
    "worker_entry/agent/checks",
    "launcher/commands",
    "launcher/controller/assembly.py",
    "launcher/controller/preview.py",
    "launcher/report/check_report.py",
    "launcher/verdict/judge.py",
)

SHOW = "program: {command: [printenv, TF_CONFIG]}\n"
PORTS = ("-p", "tcp", "--dport", "20000:20999")
SECONDS = 0.5
"""The largest error of distlaunch's clock estimates."""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts, isolated like separate machines; each test undoes its changes to them."""
    with opened_network(tmp_path_factory) as opened:
        yield opened


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """The output of `distlaunch schema check`."""
    printed = subprocess.run(distlaunch_command("schema", "check"), capture_output=True, text=True, check=True)
    loaded: dict[str, Any] = json.loads(printed.stdout)
    jsonschema.Draft202012Validator.check_schema(loaded)
    return loaded


Check = Callable[..., dict[str, Any]]


@pytest.fixture
def check(network: Network, schema: dict[str, Any]) -> Check:
    """Runs `distlaunch check --json SPEC` on the controller; verifies the report's schema and the exit status."""

    def run(spec: str, **options: Any) -> dict[str, Any]:
        done = network.run(distlaunch_command("check", "--json", spec), **options)
        report: dict[str, Any] = json.loads(done.stdout)
        jsonschema.validate(report, schema, jsonschema.Draft202012Validator)
        assert done.returncode == (0 if report["ok"] else 3)
        return report

    return run


def spec_of(network: Network, a: str = "", b: str = "", rest: str = SHOW) -> str:
    """Writes a spec of both hosts with these extra fields; returns its path."""
    path = network.folder / "fields.yaml"
    nodes = [f"  - {{host: gpu-{name}, python: {sys.executable}, {more}}}\n" for name, more in (("a", a), ("b", b))]
    path.write_text(f"nodes:\n{''.join(nodes)}{rest}")
    return str(path)


def errors(report: Mapping[str, Any]) -> list[str]:
    return [finding["message"] for finding in report["findings"] if finding["level"] == "error"]


def failures(report: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """The reason of each failed dial, by dialling node and task."""
    return {(dial["node"], dial["task"]): dial["failure"] for dial in report["dials"] if dial["failure"]}


@contextlib.contextmanager
def rule(host: Host, *words: str) -> Iterator[None]:
    """A rule for traffic to the host."""
    host.run(["iptables", "-w", "-A", "INPUT", *words])
    try:
        yield
    finally:
        host.run(["iptables", "-w", "-D", "INPUT", *words])


OTHER_CACHE = Path("/var/tmp")
"""Where a node without a usable home keeps worker_entry; hosts share it with the machine that runs the tests."""


@contextlib.contextmanager
def mounted(host: Host, place: Path, *arguments: str) -> Iterator[None]:
    """A mount that only this host has."""
    host.run(["mount", *arguments, str(place)])
    try:
        yield
    finally:
        host.run(["umount", str(place)])


@contextlib.contextmanager
def listening(start: Callable[..., subprocess.Popen[bytes]], port: int) -> Iterator[int]:
    """A foreign server, started by `start`; yields its pid."""
    program = (
        "import socket, sys\n"
        "listener = socket.create_server(('', int(sys.argv[1])))\n"
        "print('listens', flush=True)\n"
        "while True:\n"
        "    caller, _ = listener.accept()\n"
        "    caller.sendall(b'HTTP/1.0 400 Bad Request\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n')\n"
        "    caller.close()\n"
    )
    with start([sys.executable, "-c", program, str(port)]) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listens\n"
            yield process.pid
        finally:
            process.kill()


def on(host: Host) -> Callable[[Sequence[str]], subprocess.Popen[bytes]]:
    return lambda argv: subprocess.Popen([*host.enter, *argv], stdout=subprocess.PIPE)


# --- usable nodes ---


def test_check_shows_a_row_for_every_node_and_the_count_of_answered_dials(network: Network) -> None:
    done = network.run(distlaunch_command("check", network.write_spec(SHOW)))
    assert (done.returncode, done.stderr) == (0, "")
    columns, *rows, dials, one, other, verdict = done.stdout.splitlines()
    for line, host in zip((one, other), network.hosts.values(), strict=True):
        assert line.startswith(f"{host.name} listens on {host.address}, {host.address6}, ")
        assert line.endswith(": only the cluster can reach its ports there")
    assert re.split(r"\s{2,}", columns) == [
        *("node", "address", "Python", "TensorFlow", "Keras", "cores", "GPUs", "disk free", "clock")
    ]
    assert len(rows) == 2
    versions = [platform.python_version(), metadata.version("tensorflow"), metadata.version("keras")]
    for row, host in zip(rows, network.hosts.values(), strict=True):
        *facts, gpus, disk, clock = re.split(r"\s{2,}", row)
        assert facts == [host.name, host.address, *versions, str(len(os.sched_getaffinity(0)))]
        assert gpus.isdigit()
        assert re.fullmatch(r"[\d.,]+ [GT]iB", disk)
        assert re.fullmatch(r"[+-]\d+\.\d{3} s", clock)
        assert abs(float(clock[:-2])) < SECONDS
    assert dials == "4 of 4 dials from every node to every task's address were answered"
    assert verdict == "cluster: ok"


def test_check_as_json_shows_all_nodes_and_every_dial(network: Network, check: Check) -> None:
    report = check(network.write_spec(SHOW))
    assert (report["name"], report["ok"], report["findings"]) == ("cluster", True, [])
    assert [(node["node"], node["hostname"], node["usable"]) for node in report["nodes"]] == [
        ("gpu-a", "gpu-a", True),
        ("gpu-b", "gpu-b", True),
    ]
    for node in report["nodes"]:
        assert node["executable"] == sys.executable
        assert node["directory"] == str(network.folder)
    assert [(dial["node"], dial["task"], dial["address"], dial["resolved"]) for dial in report["dials"]] == [
        (node, task, f"{address}:20000", [address])
        for node in ("gpu-a", "gpu-b")
        for task, address in (("worker:0", "10.77.0.11"), ("worker:1", "10.77.0.12"))
    ]


def test_check_leaves_no_processes_or_files_on_nodes_and_controller(
    network: Network, check: Check, tmp_path: Path
) -> None:
    places = {"TMPDIR": tmp_path / "tmp", "XDG_STATE_HOME": tmp_path / "state"}
    for place in places.values():
        place.mkdir()
    shared = network.folder / "checkpoints-of-check"
    shared.mkdir()
    memory = Path("/dev/shm")  # where a living agent can be found
    with contextlib.ExitStack() as stack:
        for host in network.hosts.values():
            stack.enter_context(mounted(host, memory, "-t", "tmpfs", "none"))
            stack.enter_context(mounted(host, OTHER_CACHE, "-t", "tmpfs", "none"))
            stack.enter_context(mounted(host, host.home, "-t", "tmpfs", "none"))
        spec = network.write_spec(f"{SHOW}checkpoint_directory: {shared}\n")
        assert check(spec, env={name: str(place) for name, place in places.items()})["ok"]
        for host in network.hosts.values():
            wait_until(lambda h=host: processes(h) == {h.daemon.pid}, f"{host.name} is as it was")  # type: ignore[misc]
            assert listing(host, memory) == {"distlaunch-0"}
            assert listing(host, OTHER_CACHE) == set()
            kept = {path for path in listing(host, host.home) if not path.startswith(".cache/distlaunch")}
            state = ".local/state/distlaunch"
            assert kept == {".cache", ".local", ".local/state", state, f"{state}/nodes"}
    assert [*places["TMPDIR"].iterdir(), *places["XDG_STATE_HOME"].iterdir(), *shared.iterdir()] == []


def processes(host: Host) -> set[int]:
    listed = subprocess.run([IP, "netns", "pids", host.namespace], capture_output=True, text=True, check=True)
    return {int(pid) for pid in listed.stdout.split()}


def listing(host: Host, folder: Path) -> set[str]:
    """All paths below the folder, as the host sees them."""
    return set(host.run(["find", str(folder), "-mindepth", "1", "-printf", "%P\\n"]).stdout.splitlines())


# --- nodes that cannot be used ---


def test_unusable_nodes_do_not_prevent_the_check_of_other_nodes(network: Network, check: Check, tmp_path: Path) -> None:
    env = network.client(tmp_path, "Host closed\n  HostName 10.77.0.12\n  Port 9\n")
    spec = network.folder / "unusable.yaml"
    spec.write_text(
        "nodes:\n"
        f"  - {{host: gpu-a, python: {sys.executable}}}\n"
        "  - {host: closed}\n"
        "  - {host: gpu-b, python: /opt/none/bin/python}\n"
        f"  - {{host: no-such-host.invalid}}\n{SHOW}"
    )
    report = check(str(spec), env=env)
    assert [node["usable"] for node in report["nodes"]] == [True, False, False, False]
    assert report["nodes"][0]["python"] == platform.python_version()
    assert [(dial["node"], dial["task"], dial["failure"]) for dial in report["dials"]] == [("gpu-a", "worker:0", "")]
    told = {finding["node"]: finding for finding in report["findings"]}
    assert {finding["reference"] for finding in told.values()} == {"node-unreachable"}
    assert told["closed"]["message"].startswith("node closed cannot be used: connection refused: 10.77.0.12:9; ")
    assert "no Python at /opt/none/bin/python" in told["gpu-b"]["message"]
    assert "no-such-host.invalid" in told["no-such-host.invalid"]["message"]


def test_a_node_without_a_writable_folder_is_reported_once(network: Network, check: Check) -> None:
    b = network.hosts["gpu-b"]
    with mounted(b, OTHER_CACHE, "-t", "tmpfs", "none"), mounted(b, b.home, "-t", "tmpfs", "-o", "ro", "none"):
        report = check(network.write_spec(SHOW))
        wait_until(lambda: processes(b) == {b.daemon.pid}, "nothing uses the folders any more")
    assert errors(report) == [f"gpu-b: {b.home}/.local: Read-only file system"]
    assert [node["usable"] for node in report["nodes"]] == [True, False]


def test_check_reports_an_occupied_port_with_its_holder(network: Network, check: Check) -> None:
    with listening(on(network.hosts["gpu-b"]), 20700) as pid:
        report = check(spec_of(network, b="port: 20700"))
    [finding] = report["findings"]
    assert (finding["node"], finding["reference"]) == ("gpu-b", "port-taken")
    assert finding["message"].startswith(f"worker:1 on gpu-b: port 20700 is held by pid {pid} (")
    assert report["nodes"][1]["usable"] is False
    assert report["nodes"][1]["python"] == platform.python_version()  # the rest of the node is checked anyway


# --- which node reaches which ---


def test_a_rejecting_firewall_is_reported_and_prevents_a_start(network: Network, check: Check, tmp_path: Path) -> None:
    a, b = network.hosts.values()
    with rule(b, "-s", a.address, *PORTS, "-j", "REJECT", "--reject-with", "tcp-reset"):
        report = check(network.write_spec(SHOW))
        ran = up(network, network.write_spec(SHOW), tmp_path)
    message = "gpu-a cannot reach worker:1 on gpu-b at 10.77.0.12:20000: connection refused"
    assert errors(report) == [message]
    assert failures(report) == {("gpu-a", "worker:1"): "refused"}
    assert ran.status == 3
    assert f"Error: {message} [cannot-reach]\n" in ran.stderr
    assert "0 processes left on 2 nodes" in ran.stderr
    assert [task["started"] for task in ran.report["attempts"][0]["tasks"]] == [None, None]
    assert ran.report["attempts"][0]["verdict"]["reference"] == "cannot-reach"


def test_a_dropping_firewall_is_reported_with_the_ports_to_open(network: Network, check: Check) -> None:
    a, b = network.hosts.values()
    with rule(b, "-s", a.address, *PORTS, "-j", "DROP"):
        report = check(network.write_spec(SHOW))
    assert errors(report) == ["gpu-a cannot reach worker:1 on gpu-b at 10.77.0.12:20000: no answer"]
    assert "open ports 20000-20999 between the nodes" in report["findings"][0]["hint"]
    assert failures(report) == {("gpu-a", "worker:1"): "timed-out"}  # the other direction works


def test_check_reports_a_name_that_resolves_to_the_dialling_node_itself(network: Network, check: Check) -> None:
    with gpu_b_named(network, "gpu-a", "127.0.1.1"):
        report = check(spec_of(network, b="address: gpu-b"))
    assert errors(report) == [
        "gpu-a cannot reach worker:1 on gpu-b at gpu-b:20000: there the name resolves to 127.0.1.1, gpu-a itself"
    ]
    assert failures(report) == {("gpu-a", "worker:1"): "other"}
    assert [dial["resolved"] for dial in report["dials"] if dial["failure"]] == [["127.0.1.1"]]


@contextlib.contextmanager
def gpu_b_named(network: Network, on: str, address: str) -> Iterator[None]:
    """One host's /etc/hosts has this address for gpu-b."""
    own = network.folder / f"hosts-of-{on}"
    own.write_text(f"127.0.0.1 localhost\n{address} gpu-b\n")
    with mounted(network.hosts[on], Path("/etc/hosts"), "--bind", str(own)):
        yield


def test_check_reports_unreachable_addresses_for_every_node(network: Network, check: Check) -> None:
    report = check(spec_of(network, a="address: no-such-host.invalid", b="address: 192.0.2.9"))
    assert errors(report) == [
        "gpu-a cannot reach itself at no-such-host.invalid:20000: the name does not resolve there",
        "gpu-a cannot reach worker:1 on gpu-b at 192.0.2.9:20000: no route",
        "gpu-b cannot reach worker:0 on gpu-a at no-such-host.invalid:20000: the name does not resolve there",
        "gpu-b cannot reach itself at 192.0.2.9:20000: no route",
    ]
    assert [dial["failure"] for dial in report["dials"]] == ["unknown-name", "no-route"] * 2


def test_check_reports_an_address_where_another_server_answers(network: Network, check: Check) -> None:
    with listening(network.popen, 20710):
        report = check(spec_of(network, b=f"address: {CONTROLLER[0]}, port: 20710"))
    assert errors(report) == [
        f"gpu-a cannot reach worker:1 on gpu-b at {CONTROLLER[0]}:20710: something else answers there",
        f"gpu-b cannot reach itself at {CONTROLLER[0]}:20710: something else answers there",
    ]


def test_check_reports_an_address_that_belongs_to_another_node(network: Network, check: Check) -> None:
    report = check(spec_of(network, a="address: gpu-a", b="address: 10.77.0.11"))
    assert failures(report) == {("gpu-a", "worker:1"): "other", ("gpu-b", "worker:1"): "other"}


def test_the_first_address_that_all_nodes_reach_is_used_and_reported(network: Network, tmp_path: Path) -> None:
    spec = spec_of(network, b="addresses: [192.0.2.9, gpu-b, 10.77.0.12]")
    with gpu_b_named(network, "gpu-a", "127.0.1.1"):
        ran = up(network, spec, tmp_path)
    assert ran.status == 0, ran.stderr
    assert "gpu-b is reached at 10.77.0.12\n" in ran.stderr
    for task in ("worker-0", "worker-1"):
        assert json.loads(ran.log(task))["cluster"]["worker"] == ["10.77.0.11:20000", "10.77.0.12:20000"]
    assert [task["address"] for task in ran.report["attempts"][0]["tasks"]] == ["10.77.0.11:20000", "10.77.0.12:20000"]


SERVE_AND_DIAL = """\
import json, os, socket, sys, threading, time
config = json.loads(os.environ["TF_CONFIG"])
addresses = [address.rpartition(":") for address in config["cluster"]["worker"]]
places = [(host, int(port)) for host, _, port in addresses]
me = config["task"]["index"]

def serve(server):
    while True:
        caller, _ = server.accept()
        try:
            caller.sendall(b"the program of %d" % me)
        except OSError:
            pass  # the agent has only looked whether the port is open
        caller.close()

# For both families, as TensorFlow's server is: one for IPv4 alone would go before anybody else's.
family = socket.AF_INET6
server = socket.create_server(("", places[me][1]), family=family, backlog=64, reuse_port=True, dualstack_ipv6=True)
threading.Thread(target=serve, args=(server,), daemon=True).start()
heard, deadline = [], time.monotonic() + 20
while len(heard) < 50 and time.monotonic() < deadline:
    try:
        with socket.create_connection(places[1 - me], timeout=5) as call:
            heard.append(call.recv(100).decode())
    except (ConnectionRefusedError, ConnectionResetError):  # nobody listens, or only the guard
        time.sleep(0.01)
print(len(heard), *sorted(set(heard)))
# Until the other has heard all, as the last worker of a cluster would be waited for.
done = os.path.join(sys.argv[1], "done-%d")
open(done % me, "w").close()
while not os.path.exists(done % (1 - me)) and time.monotonic() < deadline:
    time.sleep(0.01)
"""


def test_ports_used_by_the_checks_belong_to_the_program_alone_afterwards(
    network: Network, check: Check, tmp_path: Path
) -> None:
    script = network.folder / "serve_and_dial.py"
    script.write_text(SERVE_AND_DIAL)
    spec = spec_of(network, "port: 20730", "port: 20730", f"program: {{script: {script}, args: [{network.folder}]}}\n")
    assert check(spec)["ok"]
    ran = up(network, spec, tmp_path)  # on the same ports at once: no connection of the checks is left on them
    assert ran.status == 0, ran.stderr
    assert [ran.log(task) for task in ("worker-0", "worker-1")] == [b"50 the program of 1\n", b"50 the program of 0\n"]


# --- the program ---


@pytest.fixture
def program(network: Network, tmp_path: Path) -> Iterator[Path]:
    """A script at the same path on both hosts; gpu-b has another folder there. Returns gpu-b's copy."""
    ours, other = network.folder / tmp_path.name, network.folder / f"{tmp_path.name}-of-gpu-b"
    for folder in (ours, other):
        folder.mkdir()
        (folder / "train.py").write_text("print('the same')\n")
    with mounted(network.hosts["gpu-b"], ours, "--bind", str(other)):
        yield other / "train.py"


def up_in(network: Network, spec: str, directory: Path, *options: str) -> Ran:
    done = network.run(distlaunch_command("up", "--run-dir", str(directory), *options, spec))
    return Ran(done.returncode, done.stdout, done.stderr, directory)


def test_check_reports_a_program_that_is_missing_on_a_node(
    network: Network, check: Check, program: Path, tmp_path: Path
) -> None:
    folder = network.folder / tmp_path.name
    spec = network.write_spec(f"working_directory: {folder}\nprogram: {{script: train.py}}\n")
    program.unlink()
    report = check(spec)
    message = f"worker:1 on gpu-b: cannot read the script {folder}/train.py: No such file or directory"
    assert errors(report) == [message]
    assert [node["usable"] for node in report["nodes"]] == [True, False]
    ran = up(network, spec, tmp_path)
    assert ran.status == 2
    assert f"Error: {message} [no-program]\n" in ran.stderr


def test_a_program_that_differs_between_nodes_starts_only_without_the_checks(
    network: Network, check: Check, program: Path, tmp_path: Path
) -> None:
    program.write_text("print('another')\n")
    folder = network.folder / tmp_path.name
    spec = network.write_spec(f"working_directory: {folder}\nprogram: {{script: train.py}}\n")
    report = check(spec)
    [finding] = report["findings"]
    assert (finding["level"], finding["reference"]) == ("error", "program-differs")
    hashes = [node["program_hash"] for node in report["nodes"]]
    assert finding["message"] == (
        f"the program is not the same on all nodes: {hashes[0][:12]} on gpu-a; {hashes[1][:12]} on gpu-b"
    )
    ran = up_in(network, spec, tmp_path / "checked")
    assert ran.status == 3
    assert f"Error: {finding['message']} [program-differs]\n" in ran.stderr
    assert "--no-check" in ran.stderr
    assert [task["started"] for task in ran.report["attempts"][0]["tasks"]] == [None, None]
    ran = up_in(network, spec, tmp_path / "unchecked", "--no-check")
    assert ran.status == 0, ran.stderr
    assert [ran.log(task) for task in ("worker-0", "worker-1")] == [b"the same\n", b"another\n"]


def test_check_compares_all_files_of_a_program_module(
    network: Network, check: Check, program: Path, tmp_path: Path
) -> None:
    folder = network.folder / tmp_path.name
    for package in (folder / "trainer", program.parent / "trainer"):
        package.mkdir()
        (package / "__main__.py").write_text("from trainer import model\n")
        (package / "model.py").write_text(f"FOLDER = {str(package)!r}\n")
    spec = network.write_spec(f"working_directory: {folder}\nprogram: {{module: trainer}}\n")
    assert [finding["reference"] for finding in check(spec)["findings"]] == ["program-differs"]


def test_check_compares_commands_named_by_path_but_not_by_name(network: Network, check: Check) -> None:
    tools = Path("/usr/local/sbin")
    with contextlib.ExitStack() as stack:
        for host in network.hosts.values():
            stack.enter_context(mounted(host, tools, "-t", "tmpfs", "none"))
            install(host, tools / "trainer", f"#!/bin/sh\n# as on {host.name}\n")
        by_name = check(network.write_spec("program: {command: [trainer]}\n"))
        by_path = check(network.write_spec(f"program: {{command: [{tools}/trainer]}}\n"))
    assert by_name["ok"]
    assert [finding["reference"] for finding in by_path["findings"]] == ["program-differs"]


def install(host: Host, path: Path, text: str) -> None:
    """Writes a program that only this host has."""
    host.run(["sh", "-c", f"printf %s {shlex.quote(text)} > {path} && chmod 755 {path}"])


# --- the checkpoint directory ---


@pytest.fixture
def checkpoints(network: Network, tmp_path: Path) -> Path:
    """A folder that both hosts share, inside another shared folder."""
    folder = network.folder / f"{tmp_path.name}-shared" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def marks(network: Network, folder: Path) -> list[str]:
    """The folder's contents on each host."""
    return [host.run(["ls", "-A", str(folder)], check=False).stdout for host in network.hosts.values()]


def test_a_shared_checkpoint_directory_is_empty_when_the_tasks_start(
    network: Network, tmp_path: Path, checkpoints: Path
) -> None:
    show = "program: {command: [sh, -c, 'echo $DISTLAUNCH_CHECKPOINT_DIR; ls -A $DISTLAUNCH_CHECKPOINT_DIR']}\n"
    tools = Path("/usr/local/sbin")
    with mounted(network.hosts["gpu-b"], tools, "-t", "tmpfs", "none"):
        # A node whose own checks take a second writes its mark a second later than the others.
        install(network.hosts["gpu-b"], tools / "nvidia-smi", SMI.replace("ANSWER", "sleep 1"))
        ran = up(network, network.write_spec(f"{show}checkpoint_directory: {checkpoints}\n"), tmp_path)
    assert ran.status == 0, ran.stderr
    assert [ran.log(task).decode() for task in ("worker-0", "worker-1")] == [f"{checkpoints}\n"] * 2


def test_check_reports_a_checkpoint_directory_that_is_not_shared(
    network: Network, check: Check, checkpoints: Path
) -> None:
    with mounted(network.hosts["gpu-b"], checkpoints, "-t", "tmpfs", "none"):
        report = check(network.write_spec(f"{SHOW}checkpoint_directory: {checkpoints}\n"))
        assert marks(network, checkpoints) == ["", ""]
    told = f"checkpoint_directory {checkpoints} is not shared: "
    assert errors(report) == [
        f"{told}gpu-a does not see what gpu-b writes there",
        f"{told}gpu-b does not see what gpu-a writes there",
    ]


@pytest.mark.parametrize(
    ("place", "options", "reason"),
    [("parent", (), "No such file or directory"), ("itself", ("-o", "ro"), "Read-only file system")],
    ids=["missing", "read-only"],
)
def test_check_reports_an_unwritable_checkpoint_directory(
    network: Network, check: Check, checkpoints: Path, place: str, options: Sequence[str], reason: str
) -> None:
    folder = checkpoints if place == "itself" else checkpoints.parent
    with mounted(network.hosts["gpu-b"], folder, "-t", "tmpfs", *options, "none"):
        report = check(network.write_spec(f"{SHOW}checkpoint_directory: {checkpoints}\n"))
        assert marks(network, checkpoints) == ["", ""]
    assert errors(report) == [f"checkpoint_directory {checkpoints} cannot be written on gpu-b: {reason}"]


# --- warnings ---


def test_check_warns_about_a_disk_with_little_space(network: Network, check: Check) -> None:
    b = network.hosts["gpu-b"]
    with mounted(b, b.home, "-t", "tmpfs", "-o", "size=64m", "none"):
        report = check(network.write_spec(SHOW))
    assert report["ok"]
    [finding] = report["findings"]
    assert (finding["level"], finding["node"], finding["reference"]) == ("warning", "gpu-b", "disk-space")
    assert re.fullmatch(r"gpu-b has 6[0-4](\.\d)? MiB left for the run's files", finding["message"])


OFFSETS = {"gpu-a": -50.0, "gpu-b": 100.0}
"""How far the clock of each host is ahead of the controller's clock."""

SMI = """\
#!/bin/sh
case "$1" in
  --query-gpu=index) echo 0; echo 1;;
  *) ANSWER;;
esac
"""

CLOCK = """\
import time
true_time = time.time
time.time = lambda: true_time() + {offset}
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts with clocks that are off; gpu-b has two GPUs, one of them in use, and a proxy."""
    skip_without_openssh()
    hosts = make_hosts(tmp_path_factory.mktemp("odd"))
    hosts.trust()
    with contextlib.ExitStack() as stack:
        for name, address in hosts.addresses.items():
            own = hosts.folder / name
            own.mkdir()
            (own / "sitecustomize.py").write_text(CLOCK.format(offset=OFFSETS[name]))
            env = {"PYTHONPATH": str(own)}
            if name == "gpu-b":
                write_program(own / "nvidia-smi", SMI.replace("ANSWER", "echo 0, 3, 24576; echo 1, 20480, 24576"))
                env["PATH"] = f"{own}:/usr/bin:/bin"
                env["https_proxy"] = env["http_proxy"] = "http://proxy.invalid:3128"
            stack.enter_context(running_sshd(hosts, address, env=env))
        yield hosts


@pytest.fixture(scope="module")
def oddities(odd: Hosts) -> dict[str, Any]:
    """The report of `check --json` on the odd hosts; gpu-b runs another Python, which has no TensorFlow."""
    spec = odd.folder / "odd.yaml"
    spec.write_text(
        f"nodes:\n  - {{host: gpu-a, python: {sys.executable}}}\n"
        f"  - {{host: gpu-b, python: {other_python(odd.folder)}}}\n{SHOW}"
    )
    command = distlaunch_command("check", "--json", str(spec))
    done = subprocess.run(command, env={**os.environ, **odd.env}, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def other_python(folder: Path) -> Path:
    """A Python of another version without TensorFlow: from pyenv, the system, or else a venv with a faked version."""
    look = (
        "import importlib.util as u, sys; "
        f"sys.exit(not (3, 9) <= sys.version_info[:2] != {sys.version_info[:2]} or bool(u.find_spec('tensorflow')))"
    )
    for path in (*sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3")), Path("/usr/bin/python3")):
        with contextlib.suppress(OSError):
            if subprocess.run([path, "-c", look], stderr=subprocess.DEVNULL, check=False).returncode == 0:
                return path
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "claim.pth").write_text("import sys; sys.version = '3.99.0 ' + sys.version.partition(' ')[2]\n")
    return folder / "venv" / "bin" / "python"


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def warnings(report: Mapping[str, Any], reference: str) -> list[str]:
    found = [finding for finding in report["findings"] if finding["reference"] == reference]
    assert {finding["level"] for finding in found} <= {"warning"}
    return [finding["message"] for finding in found]


def test_warnings_do_not_change_the_result_of_check(oddities: dict[str, Any]) -> None:
    assert oddities["ok"]


def test_check_warns_about_different_versions(oddities: dict[str, Any]) -> None:
    ours, others = (".".join(node["python"].split(".")[:2]) for node in oddities["nodes"])
    tensorflow, keras = metadata.version("tensorflow"), metadata.version("keras")
    assert ours != others
    assert warnings(oddities, "python-differs") == [f"Python differs: {ours} on gpu-a; {others} on gpu-b"]
    assert warnings(oddities, "tensorflow-differs") == [f"TensorFlow differs: {tensorflow} on gpu-a; none on gpu-b"]
    assert warnings(oddities, "keras-differs") == [f"Keras differs: {keras} on gpu-a; none on gpu-b"]


def test_check_warns_about_a_gpu_in_use(oddities: dict[str, Any]) -> None:
    assert warnings(oddities, "gpu-busy") == ["GPU 1 of gpu-b is busy: 20 GiB of 24 GiB are in use"]
    assert oddities["nodes"][1]["gpus"] == ["0 (3 MiB of 24 GiB in use)", "1 (20 GiB of 24 GiB in use)"]


def test_check_warns_about_a_proxy(oddities: dict[str, Any]) -> None:
    [warning] = warnings(oddities, "proxy")
    assert warning.startswith("https_proxy and http_proxy on gpu-b would send workers' traffic through a proxy")


def test_check_warns_about_wrong_clocks_with_sign_and_size(oddities: dict[str, Any]) -> None:
    for node, warning in zip(oddities["nodes"], warnings(oddities, "clock"), strict=True):
        offset = OFFSETS[node["node"]]
        assert node["clock_offset_s"] == pytest.approx(offset, abs=SECONDS)
        told = re.fullmatch(rf"the clock of {node['node']} is (\d+\.\d) s (ahead of|behind) ours", warning)
        assert told is not None, warning
        assert float(told[1]) == pytest.approx(abs(offset), abs=SECONDS)
        assert told[2] == ("ahead of" if offset > 0 else "behind")


def test_times_of_nodes_with_wrong_clocks_are_converted_to_the_controller_clock(
    distlaunch: Distlaunch, odd: Hosts, tmp_path: Path
) -> None:
    (tmp_path / "fail.py").write_text(
        "import time\n"
        "true_now = time.clock_gettime(time.CLOCK_REALTIME)\n"
        "print(true_now, time.time() - true_now, flush=True)\n"
        "raise ValueError\n"
    )
    ran = distlaunch("up", odd.write_spec("program: {script: fail.py}\n"), env=odd.env)
    assert ran.status == 1
    assert "Warning: the clock of gpu-b is 100.0 s ahead of ours\n" in ran.stderr
    [attempt] = ran.report["attempts"]
    failed = [task for task in attempt["tasks"] if task["crash"] is not None]
    assert failed  # the other task may have been stopped before it raised
    for task in failed:
        then, off = map(float, ran.log(task["task"].replace(":", "-")).split()[:2])
        assert off == pytest.approx(OFFSETS[task["node"]], abs=SECONDS)
        assert task["crash"]["time"] == pytest.approx(then, abs=SECONDS)
        assert attempt["started"] - SECONDS < task["started"] < then + SECONDS
        assert then - SECONDS < task["ended"] < attempt["ended"] + SECONDS


# --- interrupted ---


def test_ctrl_c_during_the_checks_stops_them_and_leaves_no_process_or_file(odd: Hosts, tmp_path: Path) -> None:
    asked, shared = tmp_path / "asked", tmp_path / "checkpoints"
    shared.mkdir()
    hang = f"echo $$ > {asked}.new; mv {asked}.new {asked}; exec sleep 600"
    smi = odd.folder / "gpu-b" / "nvidia-smi"
    usual = smi.read_text()
    smi.write_text(SMI.replace("ANSWER", hang))
    files = odd.home / ".local" / "state" / "distlaunch" / "nodes"
    before = set(files.iterdir()) if files.exists() else set()
    command = distlaunch_command("check", odd.write_spec(f"{SHOW}checkpoint_directory: {shared}\n"))
    env = {**os.environ, **odd.env}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            wait_until(asked.exists, "the checks are under way")
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
            smi.write_text(usual)
    assert process.returncode == 130
    assert stdout == b""
    assert b"SIGINT" in stderr
    assert b"could not" not in stderr  # a process that distlaunch stopped itself is not a finding
    assert not psutil.pid_exists(int(asked.read_text()))
    assert list(shared.iterdir()) == []
    assert (set(files.iterdir()) if files.exists() else set()) == before

"""`--wait-gpus`: a run gets all GPUs that it needs, or none; NVML is a stand-in here."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from launcher.cli.changes import read_changes
from launcher.cli.main import cli
from launcher.controller.attempt import CLAIM_PAUSE_S
from launcher.gang.state import Phase
from launcher.plan.resources import NodeFacts, find_needed_gpus, share_resources
from launcher.rundir.history import read_history, replay
from launcher.spec.loading import load_spec
from launcher.spec.nodes import NodeSpec
from launcher.spec.strategies import RULES, TORCH
from launcher.tasks import parse_task_id
from tests.harness.builders.gang import TWO_NODES, make_policy
from tests.harness.gpu_stand_ins import compile_library, install_smi
from tests.harness.hosts.sshd import make_hosts, running_sshd, skip_without_openssh
from tests.harness.polling import eventually
from tests.harness.processes.background import running
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.processes.in_process import run_here
from tests.harness.witness import wait_until
from tests.sim.nodes import At, Exit, FakeRun, lose
from worker_entry.agent.gpus.claims import GpuClaims
from worker_entry.agent.helpers.child_work import fork_work
from worker_entry.protocol.framing import Decoder, ProtocolError, encode
from worker_entry.protocol.gpus import UNKNOWN_RUN, BusyGpu, ClaimGpus, GpuHolder, GpusClaimed
from worker_entry.protocol.messages import Message
from worker_entry.protocol.orders import Preload, Stop
from worker_entry.system import gpu_holders, nvidia_smi
from worker_entry.system.gpu_holders import find_gpus, find_keepers, keep
from worker_entry.system.nvml import Nvml

COVERS = (
    "launcher/gang/claims.py",
    "worker_entry/agent/gpus/claims.py",
    "worker_entry/system/gpu_holders.py",
    "worker_entry/system/nvml.py",
)

W0, W1 = parse_task_id("worker:0"), parse_task_id("worker:1")
ALICE = BusyGpu("0", [GpuHolder(4242, "alice", "python")])
BOB = [GpuHolder(7, "bob", run="digits-7")]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("nvml"))


class Machine:
    """A machine with GPUs of this test only. `env`: the variables with which processes see them."""

    def __init__(self, folder: Path, library: Path, gpus: str) -> None:
        self._users = folder / "users"
        self._library = library
        self.suffix = f"{os.getpid()}-{folder.name}"
        self.env = {
            "LD_LIBRARY_PATH": str(library.parent),
            "NVML_GPUS": gpus,
            "NVML_USERS": str(self._users),
            "NVML_SUFFIX": self.suffix,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(gpus)))),
        }
        self.use()

    def use(self, *pids: Sequence[int]) -> None:
        """From now on, these processes use the first GPU, the second, …"""
        new = self._users.with_suffix(".new")
        new.write_text("".join(f"{' '.join(map(str, of_gpu))}\n" for of_gpu in pids))
        new.replace(self._users)

    @property
    def nvml(self) -> Nvml:
        return Nvml(str(self._library))

    def key(self, gpu: int) -> str:
        return f"GPU-{gpu:02d}-{self.suffix}"


@pytest.fixture
def machine(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with two GPUs that this process and its children see."""
    made = Machine(tmp_path, library, "aa")
    monkeypatch.setattr(gpu_holders, "Nvml", lambda: made.nvml)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


# --- who uses a GPU ---


class TestGpuProcesses:
    def test_nvml_lists_all_processes_of_each_gpu(self, machine: Machine) -> None:
        many = [*range(1000, 1200)]
        machine.use([5], many)
        assert [machine.nvml.read_processes(index) for index in range(3)] == [[5], many, None]

    def test_an_old_nvml_driver_lists_the_processes_of_each_gpu(
        self, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = compile_library(tmp_path, "-DOLD")
        machine.use([5], [6, 7])
        assert [Nvml(str(old)).read_processes(index) for index in (0, 1)] == [[5], [6, 7]]

    def test_a_gpu_does_not_count_as_free_if_the_driver_hides_its_users(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NVML_GPUS", "ap")
        assert machine.nvml.read_processes(1) is None
        found = find_gpus(["0", "1"])
        assert (found.gpus, found.problem) == ([], "the driver does not tell who uses GPU 1")

    @pytest.mark.parametrize("name", ["7", "GPU-99", "MIG-0-uuid", ""])
    def test_an_unknown_gpu_does_not_count_as_free(self, machine: Machine, name: str) -> None:
        assert find_gpus([name]).problem == f"the driver does not tell who uses GPU {name}"

    def test_a_gpu_has_the_same_key_for_each_of_its_names(self, machine: Machine) -> None:
        names = ["1", machine.key(1), machine.key(1)[:-2]]
        assert [gpu.key for gpu in find_gpus(names).gpus] == [machine.key(1)] * 3

    def test_a_gpu_process_is_described_by_pid_user_and_command(self, machine: Machine) -> None:
        child = subprocess.Popen(["sleep", "60"])
        try:
            wait_until(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n", "it runs")
            machine.use([child.pid, 1 << 22])
            [gpu] = find_gpus(["0"]).gpus
            user = gpu_holders.name_user(os.getuid())
            assert gpu.holders == [GpuHolder(child.pid, user, "sleep"), GpuHolder(1 << 22)]
        finally:
            child.kill()
            child.wait()

    def test_without_nvml_gpu_processes_are_read_from_nvidia_smi(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = '#!/bin/sh\ncase "$1" in *compute-apps*) cat {folder}/apps;; *) cat {folder}/listing;; esac\n'
        install_smi(tmp_path, script)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        uuids = [f"GPU-{number}-{os.getpid()}" for number in (0, 1)]
        (tmp_path / "listing").write_text("".join(f"{n}, {uuid}, 37, 1, 2, 3, 4\n" for n, uuid in enumerate(uuids)))
        (tmp_path / "apps").write_text(f"{uuids[1]}, 4194304\n{uuids[1]}, [N/A]\n")
        assert nvidia_smi.find_processes() == {uuids[1]: [1 << 22]}
        assert [gpu.holders for gpu in find_gpus(["0", "1"]).gpus] == [[], [GpuHolder(1 << 22)]]
        (tmp_path / "apps").unlink()
        assert find_gpus(["0"]).problem == "the driver does not tell who uses GPU 0"

    def test_without_nvml_and_nvidia_smi_gpu_processes_are_unknown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        assert find_gpus(["0"]).problem == "neither NVML nor nvidia-smi answers"


# --- a node claims GPUs ---


class Agent:
    """The GPU claims of an agent, with its loop."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._selector = selectors.DefaultSelector()
        self.said: list[Message] = []
        self.claims = GpuClaims(self._selector, self.said.append)

    def turn(self) -> None:
        for key, _ in self._selector.select(0.01):
            key.data()

    def claim(self, count: int, *gpus: str, others: Sequence[Agent] = ()) -> GpusClaimed:
        """The answer to an order; the others continue meanwhile."""
        self.claims.claim(ClaimGpus(1, [*gpus], count), self.run)

        def answered() -> Message:
            for agent in (self, *others):
                agent.turn()
            assert self.said
            return self.said.pop()

        answer = eventually(answered)
        assert isinstance(answer, GpusClaimed)
        return answer

    def end(self) -> None:
        self.claims.release()
        self._selector.close()
        for pid in self.claims.pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


@pytest.fixture
def agents() -> Iterator[tuple[Agent, Agent]]:
    pair = Agent("digits-7"), Agent("mnist-8")
    yield pair
    for agent in pair:
        agent.end()


class TestClaims:
    def test_a_run_claims_the_first_free_gpus(self, machine: Machine, agents: tuple[Agent, Agent]) -> None:
        machine.use([5], [])
        assert agents[0].claim(1, "0", "1") == GpusClaimed(1, ["1"])

    def test_a_run_without_enough_gpus_claims_none_and_names_their_users(
        self, machine: Machine, agents: tuple[Agent, Agent]
    ) -> None:
        machine.use([], [1 << 22])
        assert agents[0].claim(2, "0", "1") == GpusClaimed(1, [], [BusyGpu("1", [GpuHolder(1 << 22)])])
        assert find_keepers(machine.key(0)) == []

    def test_claimed_gpus_are_unavailable_to_other_runs_until_released(
        self, machine: Machine, agents: tuple[Agent, Agent]
    ) -> None:
        first, second = agents
        assert first.claim(1, "0").gpus == ["0"]
        keeper = GpuHolder(os.getpid(), gpu_holders.name_user(os.getuid()), run="digits-7")
        assert second.claim(2, "0", "1", others=[first]) == GpusClaimed(1, [], [BusyGpu("0", [keeper])])
        assert second.claim(1, "0", "1", others=[first]).gpus == ["1"]
        first.claims.release()
        assert second.claim(2, "0", "1").gpus == ["0", "1"]

    def test_a_child_process_of_an_agent_does_not_retain_released_gpus(
        self, machine: Machine, agents: tuple[Agent, Agent]
    ) -> None:
        """For example, a child that hangs in the driver, or lists the files of a slow disk."""
        first, second = agents
        assert first.claim(1, "0").gpus == ["0"]
        reading, writing = os.pipe()
        pid = fork_work(lambda: os.read(reading, 1), os.dup(1), reading)
        try:
            first.claims.release()

            def claimed() -> None:
                assert second.claim(1, "0").gpus == ["0"]

            eventually(claimed, 30)  # the child first closes the descriptors of its parent
        finally:
            os.close(writing)
            os.waitpid(pid, 0)
            os.close(reading)

    def test_a_repeated_gpu_claim_keeps_the_claimed_gpus(self, machine: Machine, agents: tuple[Agent, Agent]) -> None:
        first, second = agents
        assert first.claim(2, "0", "1").gpus == ["0", "1"]
        assert first.claim(2, "0", "1").gpus == ["0", "1"]
        assert first.claim(1, "0", "1").gpus == ["0"]
        assert second.claim(1, "0", "1", others=[first]).gpus == ["1"]

    def test_a_repeated_gpu_claim_that_fails_releases_all_gpus(
        self, machine: Machine, agents: tuple[Agent, Agent]
    ) -> None:
        first, second = agents
        assert first.claim(2, "0", "1").gpus == ["0", "1"]
        machine.use([], [1 << 22])
        assert first.claim(2, "0", "1").gpus == []
        assert second.claim(1, "0").gpus == ["0"]

    def test_a_gpu_with_two_names_is_claimed_once(self, machine: Machine, agents: tuple[Agent, Agent]) -> None:
        answer = agents[0].claim(2, "0", machine.key(0))
        assert (answer.gpus, answer.problem) == ([], f"0, {machine.key(0)} are only 1 GPUs")

    def test_a_gpu_claim_that_loses_a_race_reports_the_gpu_as_busy(
        self, machine: Machine, agents: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other run claims the GPU after the check and before the claim."""
        monkeypatch.setattr(gpu_holders, "find_keepers", lambda _key: [])  # the children are forks
        first, second = agents
        assert first.claim(1, "0").gpus == ["0"]
        assert second.claim(1, "0").busy == [BusyGpu("0", [GpuHolder(run=UNKNOWN_RUN)])]

    def test_a_gpu_driver_that_crashes_does_not_crash_the_agent(
        self, machine: Machine, agents: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gpu_holders, "Nvml", lambda: os._exit(139))
        assert agents[0].claim(1, "0").problem == "the driver does not answer"

    def test_a_gpu_driver_that_hangs_does_not_block_the_agent(
        self, machine: Machine, agents: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NVML_GPUS", "h")
        agents[0].claims.claim(ClaimGpus(1, ["0"], 1), "digits-7")
        agents[0].turn()
        assert agents[0].said == []
        for pid in agents[0].claims.pids:  # as the agent does at its end
            os.kill(pid, signal.SIGKILL)

    def test_finding_gpu_keepers_does_not_wait_for_an_unresponsive_keeper(self, machine: Machine) -> None:
        with socket.socket(socket.AF_UNIX) as place:
            keep(place, machine.key(0))
            [holder] = find_keepers(machine.key(0))
            assert (holder.pid, holder.run) == (os.getpid(), UNKNOWN_RUN)

    def test_gpu_claims_of_a_process_end_with_it(self, machine: Machine) -> None:
        code = (
            "import socket, sys\nfrom worker_entry.system.gpu_holders import keep\n"
            f"place = socket.socket(socket.AF_UNIX)\nkeep(place, {machine.key(0)!r})\n"
            "print(flush=True)\nsys.stdin.read()"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
            assert keeper.stdout is not None
            keeper.stdout.readline()
            assert len(find_keepers(machine.key(0))) == 1
            keeper.kill()
        assert find_keepers(machine.key(0)) == []


# --- how many GPUs a node needs, and which its tasks get ---


@pytest.mark.parametrize(
    ("node", "tasks", "rules", "needed"),
    [
        ({}, "worker:0", "multi_worker_mirrored", 4),
        ({}, "worker:0 worker:1", "multi_worker_mirrored", 4),
        ({"gpus_per_worker": 1}, "worker:0 worker:1", "multi_worker_mirrored", 2),
        ({"gpus_per_worker": 1}, "worker:0 evaluator:0", "multi_worker_mirrored", 4),  # it gets the rest
        ({"gpus": ["1", "2"]}, "worker:0", "multi_worker_mirrored", 2),
        ({"gpus": []}, "worker:0", "multi_worker_mirrored", 0),
        ({}, "ps:0", "parameter_server", 0),
        ({"gpus_per_worker": 1}, "chief:0 ps:0 worker:0", "parameter_server", 1),
        ({"gpus_per_worker": 1}, "worker:0", "torch", 4),  # it chooses by LOCAL_RANK
    ],
)
def test_a_node_claims_exactly_the_gpus_that_its_tasks_get(
    node: dict[str, Any], tasks: str, rules: str, needed: int
) -> None:
    facts = NodeFacts(8, ("0", "1", "2", "3"))
    names = [parse_task_id(task) for task in tasks.split()]
    chosen = TORCH if rules == "torch" else RULES[rules]  # type: ignore[index]  # a literal of the parameters above
    spec = NodeSpec.model_validate({"host": "gpu-a", **node})
    gpus, count = find_needed_gpus(spec, names, chosen, facts)
    assert (gpus, count) == (node.get("gpus", ["0", "1", "2", "3"]), needed)
    claimed = tuple(gpus[len(gpus) - count :])
    shares = share_resources(spec, names, chosen, NodeFacts(8, facts.gpus, claimed=claimed), [])
    seen = [gpu for share in shares.values() for gpu in share["CUDA_VISIBLE_DEVICES"].split(",") if gpu != "-1"]
    assert sorted(set(seen)) == [*claimed]
    orders = {share.get("CUDA_DEVICE_ORDER") for share in shares.values()}
    assert orders == ({"PCI_BUS_ID"} if claimed else {None})


# --- runs in fake time ---

GPUS = {"gpu-a": {"0": ""}, "gpu-b": {"0": "", "1": ""}}


def fake(folder: Path, script: Sequence[At | Exit] = (), gpus: Any = None, **spec: Any) -> FakeRun:
    made = {node: dict(of_node) for node, of_node in (gpus or GPUS).items()}
    return FakeRun(folder, script, {"wait_gpus_s": 0, **spec}, gpus=made)


def test_tasks_get_the_gpus_that_their_node_claimed(tmp_path: Path) -> None:
    nodes = [{"host": "gpu-a"}, {"host": "gpu-b", "gpus_per_worker": 1}]
    run = fake(tmp_path / "run", gpus={"gpu-a": {"0": ""}, "gpu-b": {"0": "alice", "1": ""}}, nodes=nodes, preload=True)
    assert run.run().outcome == "succeeded"
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [task["env"]["CUDA_VISIBLE_DEVICES"] for task in plan["tasks"]] == ["0", "1"]
    for node, gpu in (("gpu-a", "0"), ("gpu-b", "1")):
        kinds = run.nodes.kinds_of(node)
        assert kinds.index("ClaimGpus") < kinds.index("Preload") < kinds.index("Prepare")
        [preload] = [order for order in run.nodes.orders_of(node) if isinstance(order, Preload)]
        assert preload.env["CUDA_VISIBLE_DEVICES"] == gpu
    # A controller that takes the run over makes the same plan.
    assert replay(read_history(run.files), make_policy(TWO_NODES)).claimed == {"gpu-a": ("0",), "gpu-b": ("1",)}


def test_a_run_waits_for_busy_gpus_names_their_users_and_then_starts(tmp_path: Path) -> None:
    run = fake(tmp_path / "run", gpus={"gpu-a": {"0": ""}, "gpu-b": {"0": "alice"}})
    run.timing.after(3600.0, lambda: run.nodes.gpus["gpu-b"].update({"0": ""}))
    states = _watch_kept(run)
    report = run.run()
    assert report.outcome == "succeeded"
    assert report.goodput is not None
    assert report.goodput.waiting_s == pytest.approx(3600, abs=2 * CLAIM_PAUSE_S)
    lines = [line for line in run.said.splitlines() if "GPU" in line]
    waiting = "Waiting for GPUs: GPU 0 of gpu-b is used by pid 77 (python) of alice"
    assert lines == [waiting, waiting, waiting, "The GPUs are free"]  # now and then
    assert not any(states)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    named = [(event["state"], event["reference"]) for event in events if event["event"] == "state"]
    assert [event["node"] for event in events if event["event"] == "node-claimed"] == ["gpu-a", "gpu-b"]  # once each
    assert named[:4] == [("connecting", ""), ("waiting", "gpus-busy"), ("connecting", ""), ("forming", "")]


def _watch_kept(run: FakeRun) -> list[bool]:
    """Whether a node keeps GPUs while the run waits, checked every second in the first half an hour."""
    seen: list[bool] = []

    def look() -> None:
        seen.append(bool(run.nodes.kept))

    for second in range(2, 1800):
        run.timing.after(second + 0.5, look)
    return seen


def test_a_run_fails_after_the_gpu_wait_limit(tmp_path: Path) -> None:
    run = fake(tmp_path / "run", gpus={"gpu-a": {"0": ""}, "gpu-b": {"0": "alice"}}, wait_gpus_s=60)
    report = run.run()
    assert (report.outcome, report.exit_status, report.verdict.reference) == ("failed", 3, "gpus-busy")
    assert report.verdict.message == (
        "too few free GPUs within 60.0 s: GPU 0 of gpu-b is used by pid 77 (python) of alice"
    )
    assert 60 <= run.timing.monotonic() - 1000 < 62
    assert "Start" not in run.nodes.kinds_of("gpu-a")


def test_a_restart_on_a_spare_node_waits_for_its_gpus(tmp_path: Path) -> None:
    nodes = [{"host": "gpu-a"}, {"host": "gpu-b"}, {"host": "gpu-c", "spare": True}]
    gpus = {"gpu-a": {"0": ""}, "gpu-b": {"0": ""}, "gpu-c": {"0": "alice"}}
    script = [At(Phase.RUNNING, lose("cable pulled", left=0))]
    run = fake(tmp_path / "run", script, gpus, nodes=nodes, restart={"max_restarts": 1})
    run.timing.after(200.0, lambda: run.nodes.gpus["gpu-c"].update({"0": ""}))
    report = run.run()
    assert (report.outcome, len(report.attempts)) == ("succeeded", 2)
    assert run.nodes.kinds_of("gpu-a").count("ReleaseGpus") > 5
    assert [order.gpus for order in run.nodes.orders_of("gpu-c") if isinstance(order, ClaimGpus)][-1] == ["0"]
    assert "Waiting for GPUs: GPU 0 of gpu-c is used by pid 77 (python) of alice" in run.said


def test_wait_gpus_without_gpus_claims_nothing_and_prints_a_note(tmp_path: Path) -> None:
    run = fake(tmp_path / "run", gpus={"gpu-a": {}, "gpu-b": {}})
    assert run.run().outcome == "succeeded"
    assert "ClaimGpus" not in run.nodes.kinds_of("gpu-a")
    assert "no node has a GPU that the run needs: there is nothing to wait for" in run.said


def test_ctrl_c_during_the_gpu_wait_interrupts_the_run(tmp_path: Path) -> None:
    run = fake(tmp_path / "run", gpus={"gpu-a": {"0": ""}, "gpu-b": {"0": "alice"}})
    run.timing.after(100.0, lambda: signal.raise_signal(signal.SIGINT))
    report = run.run()
    assert (report.outcome, report.exit_status) == ("interrupted", 130)
    assert [type(order) for order in run.nodes.orders_of("gpu-b")].count(Stop) == 1


# --- the option ---


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (("local", "--wait-gpus", "train.py"), ["train.py"]),
        (("local", "--wait-gpus", "-n", "1", "train.py", "--wait-gpus"), ["train.py", "--wait-gpus"]),
        (("local", "--wait-gpus", "30m", "train.py", "30m"), ["train.py", "30m"]),
        (("local", "--wait-gpus=30m", "-n1", "train.py"), ["train.py"]),
        (("local", "-n", "1", "--wait-gpus", "--", "sh", "--wait-gpus"), ["sh", "--wait-gpus"]),
    ],
)
def test_wait_gpus_needs_no_value_and_consumes_no_other_argument(
    tmp_path: Path, words: Sequence[str], program: list[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    ran = run_here(*words[:1], "--dry-run", *words[1:], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    command = " ".join(program)
    assert command in ran.stdout


SPEC = "nodes: [{host: local, tasks: {worker: 2}}]\nprogram: {script: train.py}\n"


@pytest.mark.parametrize(
    ("words", "env", "expected"),
    [
        (["--wait-gpus"], {}, 0.0),
        (["--wait-gpus", "30m"], {}, 1800.0),
        (["--wait-gpus=1h30m"], {}, 5400.0),
        ([], {"DISTLAUNCH_UP_WAIT_GPUS": "90s"}, 90.0),
        ([], {"DISTLAUNCH_UP_WAIT_GPUS": "0s"}, 0.0),
        ([], {"DISTLAUNCH_UP_WAIT_GPUS": "true"}, 0.0),
        (["--set", "wait_gpus_s=5"], {}, 5.0),
        ([], {}, None),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_wait_gpus_sets_the_field_of_the_spec(
    tmp_path: Path, words: list[str], env: Mapping[str, str], expected: float | None, is_first: bool
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    command = next(each for name, each in cli.commands.items() if name == "up")
    arguments = [*words, "spec.yaml"] if is_first else ["spec.yaml", *words]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        # Without the settings of its group, the command would have no -h, and keep that.
        parent = click.Context(cli, info_name="distlaunch", **cli.context_settings)
        context = command.make_context("up", arguments, parent=parent)
    changes = read_changes(context)
    assert changes.apply(load_spec(tmp_path / "spec.yaml"), {}).wait_gpus_s == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--wait-gpus=soon"], "expected a duration such as 30d, 12h, 1h30m or 90s, not soon"),
        (["--wait-gpus", "30"], "expected a duration such as 30d, 12h, 1h30m or 90s, not 30"),
        (["--wait-gpus=400d"], "it is a year"),
    ],
)
def test_an_invalid_wait_gpus_duration_is_an_error(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    ran = run_here("up", *words, "spec.yaml", cwd=tmp_path)
    assert ran.returncode == 2
    assert message in ran.stderr


def test_wait_gpus_s_is_read_from_a_spec(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(f"{SPEC}wait_gpus_s: 600\n")
    assert load_spec(tmp_path / "spec.yaml").wait_gpus_s == 600


# --- real runs ---


@pytest.mark.slow
def test_a_run_starts_when_the_process_on_its_gpu_ends(tmp_path: Path, machine: Machine) -> None:
    program = tmp_path / "show.sh"
    program.write_text("echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER\n")
    user = subprocess.Popen(["sleep", "600"])
    machine.use([user.pid])
    with running(tmp_path, "--wait-gpus", "-n", "1", "--", "sh", str(program)) as run:
        run.wait_until_said(f"Waiting for GPUs: GPU 0 is used by pid {user.pid} (sleep) of ")
        user.kill()
        user.wait()
        machine.use([])
        assert run.end() == 0
        assert run.log(0) == b"0,1 PCI_BUS_ID\n"
        assert "The GPUs are free" in run.said


@pytest.mark.slow
def test_a_run_waits_for_the_gpus_of_another_run(tmp_path: Path, machine: Machine, distlaunch: Distlaunch) -> None:
    (tmp_path / "first").mkdir()
    with running(tmp_path / "first", "--wait-gpus", "-n", "1", "--", "sh", "-c", "echo up; sleep 600") as first:
        first.wait_for(b"up", 0)
        name = json.loads((first.directory / "run.json").read_text())["run_id"]
        late = distlaunch("local", "--wait-gpus", "6s", "-n", "1", "--", "true")
        assert late.status == 3
        assert f"GPUs 0, 1 are kept for run {name} of " in late.stderr
    ran = subprocess.run(
        distlaunch_command("local", "--wait-gpus", "6s", "-n", "1", "--run-dir", str(tmp_path / "last"), "--", "true"),
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_an_isolated_run_claims_gpus_in_the_network_of_the_machine(tmp_path: Path, machine: Machine) -> None:
    isolated = ("--set", "isolation=namespace", "--wait-gpus", "-n", "1", "--", "sh", "-c", "echo up; sleep 600")
    with running(tmp_path, *isolated) as run:
        run.wait_for(b"up", 0)
        assert [len(find_keepers(machine.key(gpu))) for gpu in (0, 1)] == [1, 1]
    assert [find_keepers(machine.key(gpu)) for gpu in (0, 1)] == [[], []]


@pytest.mark.ssh
def test_gpus_of_two_hosts_are_claimed_together_or_not_at_all(tmp_path: Path, library: Path) -> None:
    skip_without_openssh()
    hosts = make_hosts(tmp_path)
    hosts.trust()
    with contextlib.ExitStack() as stack:
        machines = {}
        for host, address in hosts.addresses.items():
            (tmp_path / host).mkdir()
            machines[host] = Machine(tmp_path / host, library, "aa")
            stack.enter_context(running_sshd(hosts, address, env=machines[host].env))
        machines["gpu-b"].use([], [1])
        spec = hosts.write_spec(f"working_directory: {tmp_path}\nprogram: {{command: ['true']}}\n")
        with (tmp_path / "stderr").open("wb") as stderr:
            run = subprocess.Popen(
                distlaunch_command("up", "--wait-gpus", "--run-dir", str(tmp_path / "run"), spec),
                env={**os.environ, **hosts.env},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        with run:
            said = tmp_path / "stderr"
            wait_until(lambda: "Waiting for GPUs: GPU 1 of gpu-b is used by pid 1 (" in said.read_text(), "it waits")
            wait_until(lambda: not find_keepers(machines["gpu-a"].key(0)), "gpu-a keeps nothing")
            machines["gpu-b"].use()
            assert run.wait(60) == 0, said.read_text()
    for machine in machines.values():
        assert find_keepers(machine.key(0)) == []


def test_a_gpu_list_in_a_frame_has_a_length_limit() -> None:
    with pytest.raises(ProtocolError, match="at most 1024 are allowed"):
        list(Decoder().feed(encode(GpusClaimed(1, ["0"] * 2000))))

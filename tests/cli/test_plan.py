"""The plan: GPUs, threads, environment, secrets, ports; and that the commands it prints do what a run does."""

from __future__ import annotations

import json
import os
import shlex
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from launcher.errors import UsageError
from launcher.plan.launch_plan import LaunchPlan, TaskPlan
from launcher.plan.making import make_plan
from launcher.plan.paths import RunPaths
from launcher.plan.planner import Planner, fill_in_folders
from launcher.plan.rendering import complete_command, render_by_hand, render_file, render_json, render_text
from launcher.plan.resources import NodeFacts
from launcher.spec.loading import parse_spec
from launcher.spec.models import ClusterSpec
from launcher.spec.pods import PodsSpec
from launcher.tasks import TaskId
from tests.harness.cases import first_quick
from tests.harness.hosts import loopback
from tests.harness.processes.commands import Distlaunch

COVERS = ("launcher/plan",)

CUDA = "CUDA_VISIBLE_DEVICES"
THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def planned(node: dict[str, Any], *, gpus: str = "", cores: int = 8, **spec: Any) -> LaunchPlan:
    """The plan of a spec with one node that has these GPUs and cores."""
    cluster = ClusterSpec.model_validate({"nodes": [{"host": "local", **node}], **spec})
    facts = {"local": NodeFacts(cores=cores, gpus=tuple(gpus))}
    return make_plan(cluster, directory="/work", environ=os.environ, python="/usr/bin/python3", facts=facts)


def column(plan: LaunchPlan, variable: str) -> dict[str, str | None]:
    """The variable in each task."""
    return {str(task.task): task.env.get(variable) for task in plan.tasks}


@pytest.mark.parametrize(
    ("stdin", "tasks", "strategy", "expected"),
    [
        ("chief", {"worker": 2, "evaluator": 1}, "multi_worker_mirrored", {"worker:0"}),
        ("all", {"worker": 2, "evaluator": 1}, "multi_worker_mirrored", {"worker:0", "worker:1", "evaluator:0"}),
        ("none", {"worker": 2}, "multi_worker_mirrored", set()),
        ("chief", {"chief": 1, "worker": 1}, "multi_worker_mirrored", {"chief:0"}),
        ("all", {"chief": 1, "worker": 2, "ps": 1}, "parameter_server", {"chief:0"}),  # the others are servers
    ],
)
def test_stdin_goes_only_to_tasks_that_run_the_program(
    stdin: Literal["chief", "all", "none"], tasks: dict[str, int], strategy: str, expected: set[str]
) -> None:
    plan = planned({"tasks": tasks}, strategy=strategy, tensorboard=True)
    assert {str(task) for task in plan.find_readers(stdin)} == expected


class TestGpus:
    @pytest.mark.parametrize(
        ("node", "gpus", "expected"),
        [
            pytest.param({"tasks": {"worker": 2}}, "0123", ["0,1", "2,3"], id="an-equal-share"),
            pytest.param({"tasks": {"worker": 2}}, "01234", ["0,1", "2,3"], id="remainder-unused"),
            pytest.param({"tasks": {"worker": 1}}, "01", ["0,1"], id="one-worker-gets-all"),
            pytest.param({"tasks": {"worker": 2}, "gpus_per_worker": 1}, "0123", ["0", "1"], id="gpus-per-worker"),
            pytest.param({"tasks": {"worker": 2}, "gpus": ["3", "1"]}, "0123", ["3", "1"], id="explicit-order-kept"),
            pytest.param({"tasks": {"worker": 1}, "gpus": ["GPU-1a"]}, "01", ["GPU-1a"], id="explicit-by-uuid"),
            pytest.param({"tasks": {"worker": 2}, "gpus": []}, "01", ["-1", "-1"], id="explicitly-none"),
            pytest.param({"tasks": {"worker": 2}}, "", [None, None], id="a-node-without-gpus"),
            pytest.param({"tasks": {"chief": 1, "worker": 1}}, "01", ["0", "1"], id="the-chief-trains-too"),
        ],
    )
    def test_gpus_are_divided_among_workers(self, node: dict[str, Any], gpus: str, expected: list[str | None]) -> None:
        plan = planned(node, gpus=gpus)

        assert list(column(plan, CUDA).values()) == expected
        assert plan.warnings == ()
        assert not any(column(plan, "TF_FORCE_GPU_ALLOW_GROWTH").values())

    def test_too_few_gpus_are_shared_with_a_warning_and_memory_growth(self) -> None:
        plan = planned({"tasks": {"worker": 3}}, gpus="01")

        assert list(column(plan, CUDA).values()) == ["0", "1", "0"]
        assert set(column(plan, "TF_FORCE_GPU_ALLOW_GROWTH").values()) == {"true"}
        (warning,) = plan.warnings
        assert "3 workers share 2 GPUs on local" in warning
        assert f"Warning: {warning}" in render_text(plan)
        assert render_json(plan)["warnings"] == [warning]

    @pytest.mark.parametrize(
        ("node", "gpus", "expected"),
        [
            ({"tasks": {"worker": 2, "evaluator": 1}}, "012", "2"),
            ({"tasks": {"worker": 2, "evaluator": 1}}, "0123", "-1"),
            ({"tasks": {"worker": 2, "evaluator": 1}, "gpus_per_worker": 1}, "0123", "2,3"),
            ({"tasks": {"worker": 2, "evaluator": 1}}, "0", "-1"),
            ({"tasks": {"worker": 2, "evaluator": 1}}, "", None),
            ({"tasks": {"worker": 2, "evaluator": 1}, "gpus": []}, "01", "-1"),
        ],
    )
    def test_leftover_gpus_go_to_the_evaluator(self, node: dict[str, Any], gpus: str, expected: str | None) -> None:
        assert column(planned(node, gpus=gpus), CUDA)["evaluator:0"] == expected

    def test_the_evaluator_gets_all_gpus_of_a_node_without_workers(self) -> None:
        nodes = [{"host": "a"}, {"host": "b", "tasks": {"evaluator": 1}, "gpus": ["1", "2"]}]
        plan = make_plan(ClusterSpec.model_validate({"nodes": nodes}), directory="/", environ={}, python="python")

        assert column(plan, CUDA) == {"worker:0": None, "evaluator:0": "1,2"}

    def test_gpus_are_never_shared_if_there_are_enough(self) -> None:
        for workers in range(1, 5):
            for count in range(workers, 9):
                plan = planned({"tasks": {"worker": workers, "evaluator": 1}}, gpus="01234567"[:count])
                given = [gpu for value in column(plan, CUDA).values() for gpu in (value or "").split(",")]
                owned = [gpu for gpu in given if gpu != "-1"]
                assert sorted(owned) == list("01234567"[:count])

    def test_more_gpus_per_worker_than_the_node_has_are_an_error(self) -> None:
        with pytest.raises(UsageError, match="local has 2 GPUs, but 2 workers with 2 each would need 4") as caught:
            planned({"tasks": {"worker": 2}, "gpus_per_worker": 2}, gpus="01")

        assert "--gpus-per-worker" in caught.value.hint

    def test_an_explicit_gpu_that_does_not_exist_causes_a_warning(self) -> None:
        plan = planned({"gpus": ["0", "7"]}, gpus="01")

        assert plan.warnings == ("local has no GPU 7: the program would train on the CPU instead",)

    def test_gpus_are_not_assigned_on_a_node_without_known_facts(self) -> None:
        spec = ClusterSpec.model_validate({"nodes": [{"host": "gpu-a", "tasks": {"worker": 2}}]})
        plan = make_plan(spec, directory="/", environ={}, python="python")

        assert set(column(plan, CUDA).values()) == {None}


class TestThreads:
    @pytest.mark.parametrize(
        ("cores", "workers", "intra", "inter"), [(8, 2, "4", "4"), (8, 3, "2", "2"), (2, 2, "1", "2"), (1, 4, "1", "2")]
    )
    def test_threads_are_capped_on_a_shared_node_with_inter_op_above_one(
        self, cores: int, workers: int, intra: str, inter: str
    ) -> None:
        for task in planned({"tasks": {"worker": workers}}, cores=cores).tasks:
            assert [task.env[name] for name in THREADS] == [intra, intra, inter]

    def test_threads_of_a_single_task_are_not_capped(self) -> None:
        (task,) = planned({}).tasks

        assert not set(THREADS) & task.env.keys()


class TestEnvironment:
    def test_node_env_overrides_cluster_env_and_both_override_our_defaults(self) -> None:
        plan = planned(
            {"tasks": {"worker": 2}, "env": {"B": "node", "OMP_NUM_THREADS": "7"}},
            env={"A": "cluster", "B": "cluster", "TF_CPP_MIN_LOG_LEVEL": "2"},
        )

        for task in plan.tasks:
            assert (task.env["A"], task.env["B"]) == ("cluster", "node")
            assert (task.env["OMP_NUM_THREADS"], task.env["TF_CPP_MIN_LOG_LEVEL"]) == ("7", "2")

    def test_env_from_overrides_node_env_and_cluster_env(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("A", "from us")
        plan = planned({"env": {"A": "node"}}, env={"A": "cluster"}, env_from=["A"])

        assert column(plan, "A") == {"worker:0": "from us"}


SECRET = "correct-horse-battery-staple"


def all_that_is_shown(plan: LaunchPlan) -> str:
    by_hand = [render_by_hand(task) for task in plan.tasks]
    return "\n".join(
        [
            json.dumps(render_json(plan)),
            json.dumps(render_file(plan)),
            render_text(plan),
            repr(plan),
            *map(repr, plan.tasks),
            *by_hand,
        ]
    )


class TestSecrets:
    def test_values_of_env_from_are_redacted_in_all_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HARMLESS_NAME", SECRET)
        plan = planned({"tasks": {"worker": 2}}, env_from=["HARMLESS_NAME"])

        assert column(plan, "HARMLESS_NAME") == {"worker:0": SECRET, "worker:1": SECRET}
        assert SECRET not in all_that_is_shown(plan)
        assert render_json(plan)["tasks"][0]["env"]["HARMLESS_NAME"] == "(redacted)"
        assert "HARMLESS_NAME=(redacted)" in render_text(plan)

    @pytest.mark.parametrize(
        "name",
        [
            *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "DB_PASSWORD", "MYSQL_PASSWD"),
            *("SSH_PASSPHRASE", "DB_PASS", "OPENAI_APIKEY", "SIGNING_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "MyToken"),
        ],
    )
    def test_variables_with_secret_names_are_redacted(self, name: str) -> None:
        for plan in (planned({}, env={name: SECRET}), planned({"env": {name: SECRET}})):
            assert column(plan, name) == {"worker:0": SECRET}
            assert SECRET not in all_that_is_shown(plan)

    @pytest.mark.parametrize("name", ["NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "KERAS_BACKEND", "COMPASS", "MONKEYS"])
    def test_variables_with_harmless_names_are_not_redacted(self, name: str) -> None:
        plan = planned({}, env={name: "visible"})

        assert f"{name}=visible" in render_text(plan)
        assert f"{name}=visible" in render_by_hand(plan.tasks[0])

    @pytest.mark.parametrize(
        "url", [f"postgres://u:{SECRET}@h/db", f"redis://:{SECRET}@h", f"https://{SECRET}@h/x.git"]
    )
    def test_urls_with_passwords_are_redacted(self, url: str) -> None:
        for plan in (
            planned({}, env={"DATABASE": url}),
            planned({}, program={"script": "x.py", "args": ["--db", url]}),
        ):
            assert SECRET not in all_that_is_shown(plan)

    @pytest.mark.parametrize("kind", ["script", "module", "command"])
    def test_secret_arguments_are_redacted_but_reach_the_program(self, kind: str) -> None:
        args = ["--token", SECRET, f"--db.password={SECRET}", "--epochs", "3"]
        program = {"command": ["./train", *args]} if kind == "command" else {kind: "train", "args": args}
        plan = planned({}, program=program)

        assert plan.tasks[0].program.args == args
        assert SECRET not in all_that_is_shown(plan)
        hidden = ["--token", "(redacted)", "--db.password=(redacted)", "--epochs", "3"]
        assert render_json(plan)["tasks"][0]["program"]["args"] == hidden
        assert shlex.join(hidden) in render_by_hand(plan.tasks[0])

    def test_secrets_are_in_no_file_of_a_run_except_task_orders(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "program.py").write_text(
            "import os, sys\nassert os.environ['HARMLESS'][::-1] == os.environ['REVERSED']\n"
            "assert os.environ['HARMLESS'].endswith(sys.argv[2])\n"
            "assert os.environ['DATABASE'] == f'sql://u:{os.environ[\"MY_KEY\"]}@h/'\nprint('it arrived')\n"
        )
        (tmp_path / "spec.yaml").write_text(
            f"nodes: [{{host: local, tasks: {{worker: 2}}, env: {{MY_KEY: {SECRET}}}}}]\n"
            f"program: {{script: program.py, args: [--password, {SECRET}]}}\n"
            f"env: {{HF_TOKEN: in-spec-{SECRET}, DATABASE: 'sql://u:{SECRET}@h/'}}\nenv_from: [HARMLESS]\n"
        )
        environment = {"HARMLESS": f"ours-{SECRET}", "REVERSED": f"ours-{SECRET}"[::-1]}

        ran = distlaunch("up", "spec.yaml", env=environment)

        assert ran.status == 0, ran.stderr
        assert b"it arrived" in ran.log("worker-0")
        assert SECRET not in ran.stdout + ran.stderr
        files = [path for path in ran.directory.rglob("*") if path.is_file()]
        assert {"plan.json", "spec.json", "report.json"} <= {path.name for path in files}
        for path in files:
            content = path.read_bytes()
            # The order tells the task's runner on the node all arguments.
            assert (SECRET.encode() in content) == path.name.endswith(".order.json"), path
        # The rest is still a valid spec, which `clean` needs.
        assert ClusterSpec.model_validate_json((ran.directory / "spec.json").read_bytes()).nodes[0].is_local

    def test_files_of_a_run_are_private_even_with_umask_zero(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        old = os.umask(0)
        try:
            ran = distlaunch("local", "--workers", "1", "--", "true")
        finally:
            os.umask(old)

        assert ran.status == 0, ran.stderr
        modes = {
            path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode)
            for path in [ran.directory, *ran.directory.rglob("*")]
        }
        assert len(modes) > 4
        assert modes == {path: 0o700 if (tmp_path / path).is_dir() else 0o600 for path in modes}


class TestPlacementAndPorts:
    SPEC = ClusterSpec.model_validate(
        {
            "nodes": [
                {"host": "alice@gpu-a", "tasks": {"worker": 2, "evaluator": 1}, "port": 2222},
                {"host": "gpu-b", "address": "fd00::2", "tasks": {"chief": 1, "worker": 1}},
            ],
            "ports": "30000-30010",
        }
    )

    def plan(self, ports: dict[TaskId, int] | None = None) -> dict[str, TaskPlan]:
        plan = make_plan(self.SPEC, directory="/work", environ={}, python="/opt/python", ports=ports)
        return {str(task.task): task for task in plan.tasks}

    def test_explicit_ports_count_up_and_other_ports_come_from_the_range(self) -> None:
        assert {name: (task.port, task.explicit_port) for name, task in self.plan().items()} == {
            "worker:0": (2222, True),
            "worker:1": (2223, True),
            "evaluator:0": (2224, True),
            "chief:0": (30000, False),
            "worker:2": (30001, False),
        }

    def test_task_indices_count_across_nodes(self) -> None:
        assert {name: task.node for name, task in self.plan().items()} == {
            "worker:0": "alice@gpu-a",
            "worker:1": "alice@gpu-a",
            "evaluator:0": "alice@gpu-a",
            "chief:0": "gpu-b",
            "worker:2": "gpu-b",
        }

    def test_tf_config_has_the_addresses_that_other_tasks_dial(self) -> None:
        config = self.plan()["worker:0"].tf_config
        assert config is not None
        assert config["cluster"] == {
            "chief": ["[fd00::2]:30000"],
            "worker": ["gpu-a:2222", "gpu-a:2223", "[fd00::2]:30001"],
        }

    def test_the_ports_that_nodes_took_replace_the_planned_ports(self) -> None:
        ports = {task: 40000 + i for i, (_, task) in enumerate(self.SPEC.placements())}
        plan = self.plan(ports)

        assert [task.port for task in plan.values()] == list(ports.values())
        config = plan["chief:0"].tf_config
        assert config is not None
        assert config["cluster"]["worker"] == ["gpu-a:40000", "gpu-a:40001", "[fd00::2]:40004"]

    def test_cluster_members_open_a_port_but_evaluators_and_single_tasks_do_not(self) -> None:
        opens = {name: task.opens_port for name, task in self.plan().items()}

        assert opens == {"worker:0": True, "worker:1": True, "evaluator:0": False, "chief:0": True, "worker:2": True}
        assert [task.opens_port for task in planned({}).tasks] == [False]

    def test_a_remote_node_uses_its_own_python_unless_the_spec_names_one(self) -> None:
        nodes = [{"host": "local", "address": "here"}, {"host": "b"}, {"host": "c", "python": "/venv/bin/python"}]
        plan = make_plan(ClusterSpec.model_validate({"nodes": nodes}), directory="/", environ={}, python="/opt/python")

        assert [task.python for task in plan.tasks] == ["/opt/python", "python3", "/venv/bin/python"]

    def test_the_cluster_python_applies_to_nodes_that_name_none(self) -> None:
        nodes = [{"host": "local", "address": "here"}, {"host": "b"}, {"host": "c", "python": "/venv/bin/python"}]
        spec = ClusterSpec.model_validate({"nodes": nodes, "python": "/opt/all"})
        plan = make_plan(spec, directory="/", environ={}, python="/opt/python")
        assert [task.python for task in plan.tasks] == ["/opt/all", "/opt/all", "/venv/bin/python"]

    def test_the_plan_shows_the_python_found_on_a_remote_node(self) -> None:
        spec = ClusterSpec.model_validate({"nodes": [{"host": "b"}, {"host": "c"}]})
        facts = {"b": NodeFacts(8, python="/home/alice/venv/bin/python3")}
        plan = make_plan(spec, directory="/", environ={}, python="/opt/python", facts=facts)
        assert [task.python for task in plan.tasks] == ["/home/alice/venv/bin/python3", "python3"]

    def test_pods_use_the_cluster_python_unless_they_name_one(self) -> None:
        pods = {"from": "kubernetes", "count": 1, "image": "x"}
        of_cluster = ClusterSpec.model_validate({"nodes": pods, "python": "/opt/all"})
        of_pods = ClusterSpec.model_validate({"nodes": {**pods, "python": "/opt/pods"}, "python": "/opt/all"})
        assert isinstance(of_cluster.source, PodsSpec)
        assert isinstance(of_pods.source, PodsSpec)
        assert (of_cluster.source.python, of_pods.source.python) == ("/opt/all", "/opt/pods")


class TestRenderedPlan:
    def test_plan_json_plan_text_and_dry_run_agree(self, in_process: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "spec.yaml").write_text(
            "name: two\nnodes: [{host: local, tasks: {worker: 2}, port: 2222}]\nprogram: {script: train.py}\n"
        )

        as_json = in_process("plan", "spec.yaml", "--json", run_dir=False)
        as_text = in_process("plan", "spec.yaml", run_dir=False)
        dry_run = in_process("up", "spec.yaml", "--dry-run", run_dir=False)

        assert (as_json.status, as_json.stderr, as_text.status, as_text.stderr) == (0, "", 0, "")
        assert dry_run.stdout == as_text.stdout
        assert [*tmp_path.iterdir()] == [tmp_path / "spec.yaml"]
        plan = json.loads(as_json.stdout)
        assert [task["task"] for task in plan["tasks"]] == ["worker:0", "worker:1"]
        for task in plan["tasks"]:
            assert json.loads(task["env"]["TF_CONFIG"]) == task["tf_config"]
            assert f"\n{task['task']} on local\n  address    127.0.0.1:{task['port']}\n" in as_text.stdout
            assert f"  TF_CONFIG  {json.dumps(task['tf_config'])}\n" in as_text.stdout
            assert f"  by hand    {task['command']}" in as_text.stdout

    def test_the_shown_plan_is_the_plan_that_runs(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        """The demo's arguments, and the folders of checkpoints and logs, which distlaunch chooses."""
        port = two_free_ports()
        (tmp_path / "spec.yaml").write_text(
            f"nodes: [{{host: local, port: {port}, tasks: {{worker: 1, evaluator: 1}}}}]\n"
            f"env: {{PYTHONPATH: {tmp_path}}}\npreload: false\n"
        )
        (tmp_path / "tensorflow.py").write_text("raise SystemExit  # the run ends at once: only its plan matters here")
        state = {"XDG_STATE_HOME": str(tmp_path / "state")}
        ahead = distlaunch("plan", "spec.yaml", "--json", run_dir=False, env=state)
        assert not (tmp_path / "state").exists()
        assert ahead.status == 0, ahead.stderr
        distlaunch("up", "spec.yaml", "--no-check", run_dir=False, env=state)
        [run] = (tmp_path / "state" / "distlaunch" / "runs").iterdir()
        started = (run / "plan.json").read_text()
        shown = json.loads(ahead.stdout.replace("<run>", run.name))
        ran = json.loads(started)
        assert ran.pop("cluster") == shown["tasks"][0]["tf_config"]["cluster"]
        for before, task in zip(shown["tasks"], ran["tasks"], strict=True):
            del before["command"], task["command"]  # commands in which a shell would need quotes around <run>
            before["tf_config"] = {**before["tf_config"], **task.pop("tf_config")}
            task["tf_config"] = before["tf_config"]
            task["env"]["TF_CONFIG"] = json.dumps(task["tf_config"], separators=(",", ":"))
        assert shown == ran
        assert f"runs/{run.name}/model" in started
        assert f"runs/{run.name}/checkpoints" in started
        assert f"runs/{run.name}/tensorboard/worker-0" in started
        assert (run / "checkpoints").is_dir()

    def test_the_plan_file_has_addresses_once_and_restores_complete_commands(self) -> None:
        nodes = [{"host": f"n{number}", "tasks": {"worker": 1}} for number in range(40)]
        nodes[7] = {"host": "n7", "tasks": {"worker": 1, "evaluator": 1}}
        plan = Planner(ClusterSpec.model_validate({"nodes": nodes}), "/work", {}, "python3").plan()

        text = json.dumps(render_file(plan))

        assert text.count('"n3:20000"') == 2  # in the cluster, and in the evaluator's, which adds itself
        assert json.dumps(render_json(plan)).count("n3:20000") > 100
        read = json.loads(text)
        for entry, task in zip(read["tasks"], plan.tasks, strict=True):
            assert {"cluster": read["cluster"], **entry["tf_config"]} == task.tf_config
            assert complete_command(read, entry).split() == render_by_hand(task).split()
        assert complete_command({}, {"command": 7, "tf_config": []}) == "7"
        assert complete_command({}, {}) == ""

    def test_dry_run_shows_paths_in_the_given_run_directory(self, in_process: Distlaunch, tmp_path: Path) -> None:
        shown = in_process("local", "--dry-run")
        assert f"--model-dir {tmp_path}/run/model" in shown.stdout
        assert f"DISTLAUNCH_LOG_DIR={tmp_path}/run/tensorboard/worker-0" in shown.stdout
        assert not shown.directory.exists()

    def test_the_plan_names_nodes_with_unknown_cores_and_gpus(self) -> None:
        spec = ClusterSpec.model_validate({"nodes": [{"host": "local", "address": "here"}, {"host": "b"}]})
        ahead = Planner(spec, "/work", {}, "python3").plan({"local": NodeFacts(8)})
        assert "\nCores and GPUs not known yet: b\n" in render_text(ahead)
        asked = Planner(spec, "/work", {}, "python3").plan({"local": NodeFacts(8), "b": NodeFacts(8)})
        assert "not known yet" not in render_text(asked)

    def test_the_plan_shows_alternative_addresses_until_the_checks_choose_one(self) -> None:
        spec = ClusterSpec.model_validate(
            {"nodes": [{"host": "a", "addresses": ["10.0.0.1", "10.1.0.1", "a.lab"]}, {"host": "b", "port": 1}]}
        )
        ahead = Planner(spec, "/work", {}, "python3")
        assert (
            "  address    10.0.0.1:20000 (or the next free port; or 10.1.0.1, a.lab if not all nodes reach the first)\n"
            in render_text(ahead.plan())
        )
        checked = ahead.plan(addresses={"a": "10.1.0.1", "b": "b"})
        assert "  address    10.1.0.1:20000 (or the next free port)\n" in render_text(checked)

    def test_a_node_address_defaults_to_its_ssh_address(self) -> None:
        nodes = [{"host": "a"}, {"host": "b", "address": "10.0.0.2"}, {"host": "spare", "spare": True}]
        spec = ClusterSpec.model_validate({"nodes": nodes, "restart": {"max_restarts": 1}})
        # Two names of one machine are no contradiction: its agents share its free ports.
        planner = Planner(spec, "/work", {}, "python3", {"a": "10.0.0.9", "spare": "10.0.0.9"})
        assert [task.address for task in planner.without_spares().plan().tasks] == ["10.0.0.9", "10.0.0.2"]
        assert planner.candidates == {"a": ["10.0.0.9"], "b": ["10.0.0.2"], "spare": ["10.0.0.9"]}
        found = planner.select_nodes(["b"])
        assert found is not None
        assert [task.address for task in found[0].plan().tasks] == ["10.0.0.9", "10.0.0.9"]

    def test_the_plan_of_a_single_task_shows_tf_config_as_unset(self) -> None:
        plan = planned({})

        assert render_text(plan).startswith("cluster: multi_worker_mirrored, 1 task on 1 node, in /work\n")
        assert "  TF_CONFIG  unset\n" in render_text(plan)
        assert render_json(plan)["tasks"][0]["tf_config"] is None


SHOW = """
import json, os, sys
of_a_run = (
    "DISTLAUNCH_RUN_ID",
    "DISTLAUNCH_ATTEMPT",
    "DISTLAUNCH_CHECKPOINT_DIR",
    "DISTLAUNCH_LOG_DIR",
    "DISTLAUNCH_CLOCK",
)
names = ("_", "PWD", "OLDPWD", "SHLVL", "LC_CTYPE", "DISTLAUNCH_CHILDREN", *of_a_run)
env = {name: value for name, value in os.environ.items() if name not in names}
shown = {"argv": sys.argv[1:], "cwd": os.getcwd(), "env": env, "path": sys.path}
shown["patches_keras"] = '"patch_keras": true' in os.environ["DISTLAUNCH_CHILDREN"]  # in the Pythons that it starts
print("SHOWN " + json.dumps(shown), flush=True)
"""

AWKWARD = [
    "it's",
    '"quoted"',
    "$(touch pwned)",
    "`touch pwned`",
    "two\nlines",
    "größe 🙂",
    "",
    "-m",
    "--",
    "a=b",
    "*",
    "\\",
    "\x01",
]


def two_free_ports() -> int:
    """The first of two neighbouring ports that are free, and that no other test process takes meanwhile."""
    for port in loopback.ports()[::2]:
        try:
            for offset in (0, 1):
                with socket.socket() as probe:
                    probe.bind(("", port + offset))
        except OSError:
            continue
        return port
    raise AssertionError("no two free ports")


def shown(output: str) -> dict[str, Any]:
    (line,) = [line for line in output.splitlines() if line.startswith("SHOWN ")]
    values: dict[str, Any] = json.loads(line.removeprefix("SHOWN "))
    return values


class TestCommandByHand:
    """The command in the plan gives a task exactly what a run gives it."""

    @pytest.mark.parametrize("kind", ["script", "module", "command"])
    @pytest.mark.parametrize("workers", first_quick([2, 1]))
    def test_a_task_started_by_hand_gets_the_same_arguments_and_environment(
        self, distlaunch: Distlaunch, tmp_path: Path, kind: str, workers: int
    ) -> None:
        folder = tmp_path / "it's a folder"
        folder.mkdir()
        (folder / "show.py").write_text(SHOW)
        programs: dict[str, dict[str, Any]] = {
            "script": {"script": "show.py", "args": AWKWARD},
            "module": {"module": "show", "args": AWKWARD},
            "command": {"command": [sys.executable, "show.py", *AWKWARD]},
        }
        spec = {
            "nodes": [{"host": "local", "tasks": {"worker": workers}, "port": two_free_ports()}],
            "program": programs[kind],
            "env": {f"AWKWARD_{i}": text for i, text in enumerate(AWKWARD)},
            "env_from": ["FROM_US"],
        }
        # JSON is YAML; its escapes hold what YAML does not allow as it is.
        (folder / "spec.yaml").write_text(json.dumps(spec))
        environment = {"FROM_US": 'it\'s "ours" $(touch pwned)', "TF_CONFIG": "of an outer run"}

        ran = distlaunch("up", "spec.yaml", cwd=folder, env=environment)
        plan = json.loads(distlaunch("plan", "spec.yaml", "--json", cwd=folder, env=environment, run_dir=False).stdout)

        assert ran.status == 0, ran.stderr
        assert len(plan["tasks"]) == workers
        for index, task in enumerate(plan["tasks"]):
            in_run = shown(ran.log(f"worker-{index}").decode())
            by_hand = subprocess.run(
                ["sh", "-c", task["command"]],
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
                cwd=tmp_path,
            )
            assert shown(by_hand.stdout) == in_run
            assert in_run["argv"] == AWKWARD
            assert in_run["cwd"] == str(folder)
            assert ("TF_CONFIG" in in_run["env"]) == (workers > 1)
            assert [in_run["env"][f"AWKWARD_{i}"] for i in range(len(AWKWARD))] == AWKWARD
            assert in_run["env"]["FROM_US"] == environment["FROM_US"]
        assert not [*tmp_path.rglob("pwned")]

    @pytest.mark.parametrize(
        ("directory", "shown"), [("~", "~"), ("~/a b", "~/'a b'"), ("/a ~", "'/a ~'"), ("a~", "'a~'")]
    )
    def test_the_command_by_hand_quotes_the_working_directory_but_not_the_tilde(
        self, directory: str, shown: str
    ) -> None:
        plan = planned({}, program={"script": "train.py"}, working_directory=directory)

        assert render_by_hand(plan.tasks[0]).startswith(f"cd {shown} && ")

    def test_the_command_by_hand_disables_the_keras_patch_if_the_run_does(self) -> None:
        for patch in (True, False):
            plan = planned({}, program={"script": "train.py"}, keras={"patch": patch})

            assert ("--no-keras-patch" in render_by_hand(plan.tasks[0])) == (not patch)

    def test_a_command_by_hand_patches_keras_in_its_children_if_enabled(self) -> None:
        for patch in (True, False):
            plan = planned({}, program={"command": ["./run.sh", "3"]}, keras={"patch": patch})

            assert render_by_hand(plan.tasks[0]).endswith(
                " -m worker_entry run -- ./run.sh 3" if patch else " ./run.sh 3"
            )
            assert ("worker_entry" in render_by_hand(plan.tasks[0])) == patch


class TestStrategies:
    def planned(self, text: str) -> dict[str, TaskPlan]:
        plan = make_plan(parse_spec(text.encode()), directory="/work", environ={}, python="python3")
        return {str(task.task): task for task in plan.tasks}

    def test_parameter_server_runs_the_program_only_on_chief_and_evaluator(self) -> None:
        tasks = self.planned(
            "nodes: [{host: a, tasks: {chief: 1, worker: 1, ps: 1, evaluator: 1}, gpus: [0, 1]}]\n"
            "strategy: parameter_server\nprogram: {script: train.py}\n"
        )
        programs = {name: task.program.target for name, task in tasks.items()}
        assert programs == {
            "chief:0": "train.py",
            "evaluator:0": "train.py",
            "worker:0": "worker_entry.task.server",
            "ps:0": "worker_entry.task.server",
        }
        gpus = {name: task.env["CUDA_VISIBLE_DEVICES"] for name, task in tasks.items()}
        assert gpus == {"chief:0": "-1", "ps:0": "-1", "worker:0": "0,1", "evaluator:0": "-1"}
        for name, task in tasks.items():
            # The evaluator does not need it, but is forked from a process that has imported for all tasks.
            assert task.env["GRPC_FAIL_FAST"] == "use_caller", name
            assert (task.patch_keras, task.collective) == (name in ("chief:0", "evaluator:0"), False)

    def test_a_single_process_gets_strategy_variables_instead_of_tf_config(self) -> None:
        [task] = self.planned("nodes: [{host: a}]\nstrategy: mirrored\ndevices: 4\ncross_device: nccl\n").values()
        assert "TF_CONFIG" not in task.env
        told = {name: value for name, value in task.env.items() if name.startswith("DISTLAUNCH_")}
        assert told == {
            "DISTLAUNCH_TASK": "worker:0",
            "DISTLAUNCH_STRATEGY": "mirrored",
            "DISTLAUNCH_DEVICES": "4",
            "DISTLAUNCH_CROSS_DEVICE": "nccl",
        }

    def test_tensorboard_runs_on_the_node_of_the_chief_outside_the_cluster(self) -> None:
        tasks = self.planned(
            "nodes: [{host: a}, {host: b, tasks: {chief: 1}}]\ntensorboard: true\ncheckpoint_directory: /shared\n"
        )
        board = tasks["tensorboard:0"]
        assert (board.node, board.tf_config, board.address, board.port) == ("b", None, "127.0.0.1", 20001)
        assert board.program.args[:2] == ["--logdir", "/shared/logs"]
        config = tasks["chief:0"].tf_config
        assert config is not None
        assert config["cluster"] == {"chief": ["b:20000"], "worker": ["a:20000"]}
        assert tasks["worker:0"].env["DISTLAUNCH_LOG_DIR"] == "/shared/logs/worker-0"

    def test_tensorboard_gets_the_environment_of_its_node_without_cluster_variables(self) -> None:
        """It reads the same storage, and is forked from the same process."""
        node = {"tasks": {"worker": 2}, "env": {"AWS_REGION": "b"}}
        plan = planned(node, tensorboard=True, checkpoint_directory="/shared", env={"AWS_SECRET_KEY": "k"})
        worker, _, board = plan.tasks
        assert worker.env["OMP_NUM_THREADS"] == "4"
        own = {"DISTLAUNCH_TASK": "tensorboard:0", "CUDA_VISIBLE_DEVICES": "-1"}
        assert board.env == {name: worker.env[name] for name in board.env if name not in own} | own
        of_cluster = {"DISTLAUNCH_STRATEGY", "DISTLAUNCH_LOG_DIR", "DISTLAUNCH_CHECKPOINT_DIR", "TF_GRPC_REUSE_PORT"}
        assert worker.env.keys() - board.env.keys() == of_cluster
        assert [*board.secrets] == ["AWS_SECRET_KEY"]
        assert board.defaults == worker.defaults

    def test_only_variables_that_the_spec_does_not_set_yield_to_the_shell(self) -> None:
        task, *_ = planned({"tasks": {"worker": 2}, "env": {"OMP_NUM_THREADS": "7"}}).tasks
        assert task.defaults == {"TF_CPP_MIN_LOG_LEVEL", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"}


class TestDefaultFolders:
    """The folders that a spec leaves to distlaunch."""

    def test_a_run_directory_that_is_not_utf_8_is_rejected(self) -> None:
        spec = ClusterSpec.model_validate({"nodes": [{"host": "local"}]})
        with pytest.raises(UsageError, match=r"the path '/caf\\udce9' is not UTF-8"):
            fill_in_folders(spec, RunPaths(Path(os.fsdecode(b"/caf\xe9"))))

    @pytest.mark.parametrize(("fields", "folder"), [({}, "~"), ({"sync": {"to": "~/synced"}}, None)])
    def test_a_remote_demo_runs_in_the_home_directory_unless_files_are_synced(
        self, fields: dict[str, Any], folder: str | None
    ) -> None:
        nodes = [{"host": "gpu-a"}, {"host": "gpu-b"}]
        spec = fill_in_folders(ClusterSpec.model_validate({"nodes": nodes, **fields}), RunPaths(Path("/run")))
        assert spec.working_directory == folder

"""A spec for real machines, on containers: what remains of it, and the Compose file that replaces its machines."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from launcher.errors import UsageError
from launcher.plan.compose import render_compose
from launcher.spec.loading import parse_spec
from launcher.spec.models import ClusterSpec
from launcher.spec.rehearsal import rehearse
from tests.harness.processes.rehearsals import REAL


def spec_of(text: str = REAL) -> ClusterSpec:
    return parse_spec(text.encode())


def hosts(spec: ClusterSpec) -> list[str]:
    return [node.host for node in spec.nodes]


def compose_of(text: str, count: int = 2, path: str = "spec.yaml") -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(render_compose(spec_of(text), path, count))
    return loaded


class TestRehearse:
    def test_a_rehearsal_keeps_tasks_and_drops_machine_settings(self) -> None:
        spec = rehearse(spec_of(), 3)
        assert hosts(spec) == ["gpu-a", "gpu-b.example.org", "node-3"]
        assert [node.tasks for node in spec.nodes] == [node.tasks for node in spec_of().nodes]
        assert (spec.nodes[1].port, spec.nodes[2].env, spec.env_from) == (2222, {"A": "b"}, ["WANDB_API_KEY"])
        for node in spec.nodes:
            assert (node.address, node.addresses, node.gpus, node.gpus_per_worker, node.python) == (None,) * 5
            assert node.ssh == spec.ssh == ClusterSpec.model_fields["ssh"].default
        assert spec.host_keys == "strict"

    def test_a_rehearsal_is_a_valid_spec_for_one_to_six_containers(self) -> None:
        for count in range(1, 7):
            ClusterSpec.model_validate(rehearse(spec_of(), count).model_dump(exclude_unset=True))

    def test_a_rehearsal_on_fewer_containers_uses_the_first_nodes(self) -> None:
        assert hosts(rehearse(spec_of(), 2)) == ["gpu-a", "gpu-b.example.org"]

    def test_additional_containers_copy_the_last_node_that_trains(self) -> None:
        spec = rehearse(spec_of("nodes:\n  - {host: a, tasks: {worker: 2, evaluator: 1}, port: 99}\n"), 3)
        assert hosts(spec) == ["a", "node-2", "node-3"]
        assert [(node.tasks, node.port) for node in spec.nodes[1:]] == [({"worker": 2}, None)] * 2

    def test_a_rehearsal_limits_min_workers_to_its_number_of_workers(self) -> None:
        spec = spec_of("nodes: [{host: a}, {host: b}, {host: c}]\nrestart: {max_restarts: 1, min_workers: 3}\n")
        assert [rehearse(spec, count).restart.min_workers for count in (1, 2, 3, 4)] == [1, 2, 3, 3]
        assert rehearse(spec, 1).restart.max_restarts == 1

    def test_an_additional_container_copied_from_a_chief_is_a_worker(self) -> None:
        spec = rehearse(spec_of("nodes: [{host: a, tasks: {chief: 1}}]\n"), 2)
        assert [node.tasks for node in spec.nodes] == [{"chief": 1}, {"worker": 1}]

    @pytest.mark.parametrize(
        ("host", "name"),
        [
            ("local", "node-1"),
            ("controller", "node-1"),
            ("keys", "node-1"),
            ("fe80::1", "node-1"),
            ("Rack1_Node", "rack1_node"),
            ("_a", "node-1"),
        ],
    )
    def test_host_names_that_no_container_can_have_are_replaced(self, host: str, name: str) -> None:
        assert hosts(rehearse(spec_of(f"nodes: [{{host: '{host}'}}]\n"), 1)) == [name]

    def test_two_users_of_one_machine_become_two_containers(self) -> None:
        assert hosts(rehearse(spec_of("nodes: [{host: a@gpu, port: 1}, {host: b@gpu, port: 2}]\n"), 2)) == [
            "gpu",
            "node-2",
        ]

    def test_a_rehearsal_without_a_training_task_is_rejected(self) -> None:
        spec = spec_of("nodes: [{host: a, tasks: {evaluator: 1}}, {host: b}]\n")
        with pytest.raises(UsageError, match="no task trains on the first 1 of the spec's 2 nodes"):
            rehearse(spec, 1)


class TestCompose:
    def test_each_node_is_a_compose_service_that_the_controller_waits_for(self) -> None:
        file = compose_of(REAL, 4)
        nodes = ["gpu-a", "gpu-b.example.org", "node-3", "node-4"]
        assert [*file["services"]] == ["keys", "controller", *nodes]
        assert [*file["services"]["controller"]["depends_on"]] == nodes
        assert file["services"]["controller"]["command"] == ["up", "spec.yaml", "--rehearsal", "4"]
        assert file["services"]["controller"]["environment"] == ["WANDB_API_KEY"]

    @pytest.mark.parametrize(("framework", "name"), [("jax", "JAX"), ("torch", "PyTorch")])
    def test_compose_says_how_to_add_another_framework_to_the_image(self, framework: str, name: str) -> None:
        spec = f"nodes: [{{host: a}}, {{host: b}}]\nprogram: {{script: train.py}}\nframework: {framework}\n"
        text = render_compose(spec_of(spec), "spec.yaml", 2)
        assert f"For {name}, build another from these lines" in text
        assert f"#   RUN pip install {framework}\n" in text
        assert yaml.safe_load(text)["services"].keys() == {"keys", "controller", "a", "b"}
        assert "build another" not in render_compose(spec_of(), "spec.yaml", 2)

    @pytest.mark.parametrize(
        ("directory", "mounted"),
        [("/data/me", "/data/me"), ("~/me", "/home/trainer/me"), ("/project", None), ("a", None)],
    )
    def test_compose_mounts_the_program_at_the_working_directory_of_the_spec(
        self, directory: str, mounted: str | None
    ) -> None:
        file = compose_of(f"nodes: [{{host: a}}, {{host: b}}]\nworking_directory: {directory}\n")
        places = ["/project"] if mounted is None else ["/project", mounted]
        assert file["services"]["a"]["volumes"][1:] == [f"${{PROJECT:-.}}:{place}" for place in places]

    def test_the_checkpoint_directory_is_a_shared_writable_compose_volume(self) -> None:
        file = compose_of("nodes: [{host: a}, {host: b}]\ncheckpoint_directory: /shared/all\n")
        assert "checkpoints:/shared/all" in file["services"]["a"]["volumes"]
        assert file["services"]["keys"]["command"] == ["make_keys", "/runs", "/shared/all"]
        assert "checkpoints" in file["volumes"]

    def test_a_dollar_sign_in_user_text_is_escaped_for_compose(self) -> None:
        file = compose_of("nodes: [{host: a}]\ncheckpoint_directory: /a$b\n", 1, "my $spec.yaml")
        assert file["services"]["keys"]["command"] == ["make_keys", "/runs", "/a$$b"]
        assert file["services"]["controller"]["command"][1] == "my $$spec.yaml"

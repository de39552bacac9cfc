"""The published JSON Schemas are valid, and accept and reject the same values as the reader."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import jsonschema
import pytest
import yaml

from launcher.report.models import AttemptReport, RunReport, TaskReport
from launcher.verdict.models import Verdict
from tests.harness.places import EXAMPLES
from tests.harness.processes.commands import Distlaunch

SPECS = EXAMPLES


def published(in_process: Distlaunch, *what: str) -> dict[str, Any]:
    ran = in_process("schema", *what, run_dir=False)
    assert (ran.status, ran.stderr) == (0, "")
    schema: dict[str, Any] = json.loads(ran.stdout)
    return schema


@pytest.mark.parametrize("what", ["spec", "report", "check", "doctor", "events"])
def test_each_published_schema_names_its_dialect_and_the_address_of_its_version(
    what: str, in_process: Distlaunch
) -> None:
    schema = published(in_process, what)

    assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"].endswith(f"/v{metadata.version('distlaunch')}/{what}.schema.json")


def test_a_written_spec_names_the_schema_that_this_version_publishes(in_process: Distlaunch) -> None:
    first = in_process("init", "-o", "-", run_dir=False).stdout.partition("\n")[0]

    assert first == f"# yaml-language-server: $schema={published(in_process)['$id']}"


def accepts(schema: dict[str, Any], value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


class TestSpec:
    def test_the_schema_command_prints_the_spec_schema_by_default(self, in_process: Distlaunch) -> None:
        assert published(in_process) == published(in_process, "spec")

    def test_the_spec_schema_accepts_all_examples_and_rejects_unknown_fields(self, in_process: Distlaunch) -> None:
        schema = published(in_process)
        assert SPECS
        for file in SPECS:
            spec = yaml.safe_load(file.read_text(encoding="utf-8"))
            jsonschema.validate(spec, schema, jsonschema.Draft202012Validator)
            assert not accepts(schema, {**spec, "nodse": []}), file
            if spec["nodes"] == "slurm":
                spec["nodes"] = "slrum"
            elif isinstance(spec["nodes"], dict):
                spec["nodes"]["imgae"] = "an-image"
            else:
                spec["nodes"][0]["prot"] = 2222
            assert not accepts(schema, spec), file

    def test_the_spec_schema_accepts_values_that_the_reader_accepts(self, in_process: Distlaunch) -> None:
        schema = published(in_process)

        for more in (
            {"ports": 20000},
            {"ports": "20000 - 20999"},
            {"env": {"DEBUG": False, "LEVEL": 3, "NAME": "x"}},
            {"program": {"command": ["sleep", 1.5]}},
            {"timeouts": {"start_s": 0}},
            {"nodes": {"from": {"command": ["list", 3]}}},
            {"nodes": {"from": {"command": ["list"]}, "known": [{"host": "gpu-a"}]}},
            {"preload": False},
            {"preload": ["numpy", "my_package.data"]},
            {"nodes": [{"host": "local", "gpus": [0, "GPU-1a2b"], "tasks": {"worker": 1, "evaluator": 1}}]},
        ):
            assert accepts(schema, {"nodes": [{"host": "local"}], **more}), more

    def test_the_spec_schema_rejects_values_that_the_reader_rejects(self, in_process: Distlaunch) -> None:
        schema = published(in_process)

        errors: list[dict[str, Any]] = [
            {"nodes": []},
            {"nodes": {"from": {"command": []}}},
            {"nodes": {"from": {}}},
            {"nodes": {"known": [{"host": "gpu-a"}]}},
            {"nodes": {"from": {"command": ["list"]}, "host": "gpu-a"}},
            {"nodes": [{}]},
            {"nodes": [{"host": "a b"}]},
            {"nodes": [{"host": "local", "tasks": {"Worker": 1}}]},
            {"nodes": [{"host": "local", "tasks": {"worker": -1}}]},
            {"nodes": [{"host": "local", "port": 65536}]},
            {"nodes": [{"host": "local", "gpus": ["0,1"]}]},
            {"program": {"command": "train"}},
            {"strategy": "mirror"},
            {"env": {"A-B": "x"}},
            {"ports": "20000:20999"},
            {"restart": {"max_restarts": -1}},
            {"restart": {"on": ["gone"]}},
            {"timeouts": {"start_s": "10m"}},
            {"timeouts": {"lease_s": 3000000}},
            {"restart": {"max_restarts": 10**9}},
            {"devices": 65},
            {"preload": "numpy"},
            {"preload": ["os;x"]},
            {"name": "a/b"},
            {"working_directory": None},
            {"nodes": [{"host": "local", "port": None}]},
        ]
        for wrong in errors:
            assert not accepts(schema, {"nodes": [{"host": "local"}], **wrong}), wrong

    def test_the_spec_schema_describes_every_node_field(self, in_process: Distlaunch) -> None:
        schema = published(in_process)
        nodes = schema["$defs"]["NodeSpec"]["properties"]

        assert all("description" in field for field in nodes.values())
        assert "description" in schema["properties"]["env_from"]


class TestReport:
    @pytest.fixture
    def report(self) -> dict[str, Any]:
        verdict = Verdict(reference="succeeded", message="All tasks ended well")
        task = TaskReport(task="worker:0", node="local", address="127.0.0.1:20000", log="attempt-1/worker-0.log")
        attempt = AttemptReport(attempt=1, started=1.0, ended=2.0, tasks=[task], verdict=verdict, processes_left=0)
        report = RunReport(
            run_id="x", name="x", outcome="succeeded", exit_status=0, versions={}, directory="/", started=1.0,
            ended=2.0, verdict=verdict, attempts=[attempt],
        )  # fmt: skip
        value: dict[str, Any] = json.loads(report.model_dump_json())
        return value

    def test_the_report_schema_accepts_a_report_and_rejects_unknown_fields(
        self, in_process: Distlaunch, report: dict[str, Any]
    ) -> None:
        schema = published(in_process, "report")

        jsonschema.validate(report, schema, jsonschema.Draft202012Validator)
        assert not accepts(schema, {**report, "verdit": "good"})
        report["attempts"][0]["tasks"][0]["exit"] = 0
        assert not accepts(schema, report)

    def test_the_report_schema_rejects_a_report_without_an_outcome(
        self, in_process: Distlaunch, report: dict[str, Any]
    ) -> None:
        del report["outcome"]

        assert not accepts(published(in_process, "report"), report)

"""How specs are read, with all their errors at once; any bytes result in a spec or a SpecError."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.errors import SpecError
from launcher.plan.making import make_plan
from launcher.spec.fields import PortRange
from launcher.spec.loading import load_spec
from launcher.spec.models import ClusterSpec
from launcher.spec.yaml_positions import SIZE_LIMIT
from launcher.tasks import TaskId
from tests.harness.builders.specs import specs

COVERS = ("launcher/spec",)

LONGEST_S = 60.0
"""How long the worst file may take; on a quiet machine, it takes some three seconds."""


def load(folder: Path, text: str | bytes, environ: Mapping[str, str] | None = None) -> ClusterSpec:
    file = folder / "spec.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_spec(file, environ)


def errors(folder: Path, text: str | bytes, environ: Mapping[str, str] | None = None) -> list[str]:
    """The lines of the error, without the file's name."""
    with pytest.raises(SpecError) as caught:
        load(folder, text, environ)
    prefix = f"{folder / 'spec.yaml'}:"
    assert all(line.startswith(prefix) for line in caught.value.evidence)
    return [line.removeprefix(prefix) for line in caught.value.evidence]


class TestValidSpecs:
    def test_the_smallest_spec_runs_the_demo_with_one_local_worker(self, tmp_path: Path) -> None:
        spec = load(tmp_path, "nodes: [{host: local}]")

        assert [task for _, task in spec.placements()] == [TaskId("worker", 0)]
        assert spec.program.module == "worker_entry.demo.train"

    def test_yaml_scalars_in_a_spec_keep_their_written_text(self, tmp_path: Path) -> None:
        spec = load(
            tmp_path,
            """
            nodes: [{host: 10.1, gpus: [0, 1], tasks: {worker: 1}}]
            program: {script: 2024-01-01, args: [no, 1:30, 0x10, 1e3, ~, null, 007, "3", on]}
            env: {DEBUG: no, LEVEL: 1_000, EMPTY: , QUOTED: ""}
            keras: {patch: no}
            """,
        )

        assert spec.program.script == "2024-01-01"
        assert spec.program.args == ["no", "1:30", "0x10", "1e3", "~", "null", "007", "3", "on"]
        assert spec.env == {"DEBUG": "no", "LEVEL": "1_000", "EMPTY": "", "QUOTED": ""}
        assert spec.nodes[0].host == "10.1"
        assert spec.nodes[0].gpus == ["0", "1"]
        assert spec.keras.patch is False

    @pytest.mark.parametrize(
        ("ports", "expected"),
        [("20000-20999", (20000, 20999)), ("20000 - 20999", (20000, 20999)), ("20000", (20000, 20000))],
    )
    def test_a_port_range_may_contain_spaces_or_a_single_port(
        self, tmp_path: Path, ports: str, expected: tuple[int, int]
    ) -> None:
        first, last = expected

        assert load(tmp_path, f"nodes: [{{host: local}}]\nports: {ports}").ports == PortRange(first=first, last=last)

    def test_a_yaml_alias_may_replace_a_whole_value(self, tmp_path: Path) -> None:
        spec = load(tmp_path, "nodes:\n- {host: a, env: &e {A: '1'}}\n- {host: b, env: *e}\n")

        assert [node.env for node in spec.nodes] == [{"A": "1"}, {"A": "1"}]

    def test_a_spec_may_have_windows_line_ends_and_a_byte_order_mark(self, tmp_path: Path) -> None:
        spec = load(tmp_path, b"\xef\xbb\xbfnodes:\r\n  - host: local\r\nname: x\r\n")

        assert spec.name == "x"

    def test_unicode_in_program_arguments_and_environment_is_preserved(self, tmp_path: Path) -> None:
        spec = load(tmp_path, "nodes: [{host: local}]\nprogram: {script: å.py, args: [größe 🙂]}\nenv: {A: 'é\n\n é'}")

        assert (spec.program.script, spec.program.args, spec.env) == ("å.py", ["größe 🙂"], {"A": "é\né"})

    def test_tasks_are_numbered_across_nodes_in_spec_order(self, tmp_path: Path) -> None:
        spec = load(
            tmp_path,
            """
            nodes:
            - {host: b, tasks: {worker: 2, evaluator: 1}}
            - {host: a, tasks: {worker: 1, chief: 1}}
            """,
        )

        assert [(node.host, str(task)) for node, task in spec.placements()] == [
            ("b", "worker:0"),
            ("b", "worker:1"),
            ("b", "evaluator:0"),
            ("a", "chief:0"),
            ("a", "worker:2"),
        ]

    def test_two_nodes_may_share_an_address_if_their_ports_differ(self, tmp_path: Path) -> None:
        spec = load(tmp_path, "nodes:\n- {host: a, address: c, port: 2222}\n- {host: b, address: c, port: 2223}\n")

        assert [node.default_address for node in spec.nodes] == ["c", "c"]

    def test_only_workers_get_gpus_in_a_parameter_server_plan(self, tmp_path: Path) -> None:
        tasks = "{chief: 1, ps: 1, worker: 2}"
        text = f"nodes: [{{host: a, tasks: {tasks}, gpus: [0, 1], gpus_per_worker: 1}}]\nstrategy: parameter_server\n"
        plan = make_plan(load(tmp_path, text), directory="/", environ={}, python="python3")

        gpus = {str(task.task): task.env["CUDA_VISIBLE_DEVICES"] for task in plan.tasks}
        assert gpus == {"chief:0": "-1", "worker:0": "0", "worker:1": "1", "ps:0": "-1"}

    def test_a_spec_may_be_json_with_escaped_characters(self, tmp_path: Path) -> None:
        args = ["größe 🙂", "\x01\x7f", 'it\'s "quoted"', "\\", "a\tb\n"]
        text = json.dumps({"nodes": [{"host": "local"}], "program": {"script": "x.py", "args": args}})

        assert r"\ud83d\ude42" in text
        assert load(tmp_path, text).program.args == args

    @given(specs())
    @settings(max_examples=50)
    def test_a_spec_written_as_json_is_read_back_unchanged(
        self, tmp_path_factory: pytest.TempPathFactory, spec: ClusterSpec
    ) -> None:
        text = spec.model_dump_json(indent=2, exclude_defaults=True)

        assert load(tmp_path_factory.getbasetemp(), text) == spec


class TestErrors:
    def test_all_spec_errors_are_reported_at_once_in_file_order(self, tmp_path: Path) -> None:
        found = errors(
            tmp_path,
            """\
name: a/b
nodes:
  - host: gpu-a
    prot: 2222
    port: high
    port: 2222
  - host: gpu-b
    gpus: 2
program: {script: train.py, module: train}
strategy: multi_worker_mirored
env: {TF_CONFIG: "{}", 1A: x}
env_from: [IS_NOT_SET]
timeouts: {start: 5, stop_grace_s: -1}
color: blue
""",
            environ={},
        )

        assert [line.partition(": ")[0] for line in found] == [
            "1:7 name",
            "4:5 nodes[0].prot",
            "5:11 nodes[0].port",
            "6:5 nodes[0].port",
            "8:11 nodes[1].gpus",
            "9:10 program",
            "10:11 strategy",
            "11:24 env.1A",
            "12:12 env_from[0]",
            "13:12 timeouts.start",
            "13:36 timeouts.stop_grace_s",
            "14:1 color",
        ]

    def test_contradictions_in_a_spec_are_reported_with_other_errors(self, tmp_path: Path) -> None:
        found = errors(
            tmp_path,
            """\
nodes:
  - host: gpu-a
    port: 2222
  - host: gpu-b
    address: gpu-a
    port: 2222
    hots: gpu-c
env_from: [IS_NOT_SET]
ports: low
""",
            environ={},
        )

        assert found == [
            "6:11 nodes[1].port: 2222 is already used by worker:0 on the same node; choose another port",
            "7:5 nodes[1].hots: unknown field; did you mean `host`?",
            "8:12 env_from[0]: IS_NOT_SET is not set in this environment; export it first",
            "9:8 ports: expected a range of ports; write it like 20000-20999",
        ]

    def test_a_spec_error_causes_no_misleading_second_error(self, tmp_path: Path) -> None:
        found = errors(tmp_path, "nodes:\n- {host: local, tasks: {worker: two, evaluator: 1}}\n")

        assert found == ["2:33 nodes[0].tasks.worker: expected a whole number, got 'two'"]

    def test_the_first_line_counts_the_spec_errors(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match=r"^the spec has an error; nothing was started\n"):
            load(tmp_path, "nodes: []")
        with pytest.raises(SpecError, match=r"^the spec has 2 errors; nothing was started\n"):
            load(tmp_path, "nodes: []\nnam: x")

    def test_only_the_first_20_of_many_spec_errors_are_shown(self, tmp_path: Path) -> None:
        text = "nodes: [{host: local}]\n" + "".join(f"field_{number}: 1\n" for number in range(2000))
        with pytest.raises(SpecError, match=r"^the spec has 2,000 errors; nothing was started\n") as caught:
            load(tmp_path, text)
        assert len(caught.value.evidence) == 21
        assert "2:1 field_0: unknown field" in caught.value.evidence[0]
        assert caught.value.evidence[-1] == f"{tmp_path / 'spec.yaml'}: and 1,980 more"

    def test_a_spec_error_about_a_long_value_is_one_short_line(self, tmp_path: Path) -> None:
        long = "x" * 100_000
        for text in (f"nodes: [{{host: '{long} '}}]", f"nodes: [{{host: local}}]\n{long}: 1", f"name: {long}"):
            assert all(len(line) < 500 for line in errors(tmp_path, text))

    def test_spec_errors_contain_only_printable_characters(self, tmp_path: Path) -> None:
        for text in (r'"\e[31m\n": 1', r'nodes: [{host: "\e[31m\n"}]', "!%1b%0a x", r'name: "\x9b\u202e"'):
            assert all(line.isprintable() for line in errors(tmp_path, text))

    def test_env_from_variables_are_required_only_if_an_environment_is_given(self, tmp_path: Path) -> None:
        text = "nodes: [{host: local}]\nenv_from: [IS_NOT_SET]"

        assert load(tmp_path, text).env_from == ["IS_NOT_SET"]
        assert load(tmp_path, text, {"IS_NOT_SET": ""}).env_from == ["IS_NOT_SET"]
        assert len(errors(tmp_path, text, {})) == 1

    @pytest.mark.parametrize(
        ("path", "reason"),
        [("missing.yaml", "No such file"), (".", "Is a directory"), ("spec.yaml/x", "Not a directory")],
    )
    def test_an_unreadable_spec_file_is_a_spec_error(self, tmp_path: Path, path: str, reason: str) -> None:
        (tmp_path / "spec.yaml").touch()

        with pytest.raises(SpecError, match=reason) as caught:
            load_spec(tmp_path / path)

        assert str(tmp_path) in caught.value.message

    def test_a_spec_file_larger_than_the_limit_is_a_spec_error(self, tmp_path: Path) -> None:
        text = "nodes: [{host: local}]\n#"

        assert load(tmp_path, text + "#" * (SIZE_LIMIT - len(text)))
        assert errors(tmp_path, text + "#" * (SIZE_LIMIT - len(text) + 1)) == [
            "1:1: the file is larger than 256 KiB; is it a spec?"
        ]

    def test_an_endless_file_is_rejected_as_a_spec(self) -> None:
        with pytest.raises(SpecError, match="an error"):
            load_spec(Path("/dev/zero"))


WORDS = [
    *("nodes", "host", "local", "tasks", "worker", "chief", "ps", "evaluator", "port", "ports", "gpus", "program"),
    *("script", "args", "env", "env_from", "name", "timeouts", "start_s", "keras", "patch", "restart", "max_restarts"),
    *(
        ": ",
        "\n",
        "\n  ",
        "\n- ",
        "  - ",
        "{",
        "}",
        "[",
        "]",
        ", ",
        "&a ",
        "*a",
        "<<",
        "? ",
        "---\n",
        "...\n",
        "%YAML ",
    ),
    *("'", '"', "|", ">", "#", "!t ", "!!int ", "\\", "\t", "\0", "\\0", "\\ud800", "\\U00110000", "\x85", "\ufeff"),
    *("0", "1", "-1", "1.5", "20000-20999", "99999999999999999999", "true", "~", "é", "🙂", "[key]", "TF_CONFIG"),
]


class TestAnyBytes:
    """The result is a spec or a SpecError, never another exception."""

    def read(self, folder: Path, data: bytes) -> None:
        file = folder / "fuzz.yaml"
        file.write_bytes(data)
        try:
            load_spec(file, {})
        except SpecError as error:
            lines = error.evidence
        else:
            return
        assert lines
        assert all(line.isprintable() and line.startswith(f"{file}:") for line in lines)

    @given(st.binary(max_size=200))
    @settings(max_examples=150)
    def test_loading_random_bytes_raises_only_a_spec_error(
        self, tmp_path_factory: pytest.TempPathFactory, data: bytes
    ) -> None:
        self.read(tmp_path_factory.getbasetemp(), data)

    @given(st.lists(st.sampled_from(WORDS), max_size=40).map("".join))
    @settings(max_examples=400)
    @example('"[key]": 1')
    @example('"\\UFFFFFFFF"')
    @example("%YAML 1." + "9" * 5000 + "\n---\n")
    def test_loading_random_spec_and_yaml_words_raises_only_a_spec_error(
        self, tmp_path_factory: pytest.TempPathFactory, text: str
    ) -> None:
        self.read(tmp_path_factory.getbasetemp(), text.encode())

    @given(
        st.recursive(
            st.sampled_from(WORDS) | st.integers() | st.floats() | st.booleans() | st.none(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
            max_leaves=20,
        )
    )
    @settings(max_examples=200)
    def test_loading_values_of_the_wrong_shape_raises_only_a_spec_error(
        self, tmp_path_factory: pytest.TempPathFactory, value: object
    ) -> None:
        self.read(tmp_path_factory.getbasetemp(), yaml.safe_dump(value, allow_unicode=True).encode())

    @given(specs(), st.integers(0, 2**32))
    @settings(max_examples=150)
    def test_loading_a_spec_with_changed_bytes_raises_only_a_spec_error(
        self, tmp_path_factory: pytest.TempPathFactory, spec: ClusterSpec, seed: int
    ) -> None:
        data = bytearray(yaml.safe_dump(spec.model_dump(exclude_defaults=True), allow_unicode=True).encode())
        dice = random.Random(seed)
        for _ in range(3):
            data[dice.randrange(len(data))] = dice.choice(b" \n:-[]{}&*!|>'\"%@`#,\\\t\x00\xff0a")
        self.read(tmp_path_factory.getbasetemp(), bytes(data))

    @pytest.mark.parametrize(
        "data",
        [
            pytest.param("nodes: [" + "a," * (SIZE_LIMIT // 2 - 8), id="list-not-closed", marks=pytest.mark.slow),
            pytest.param("[" * (SIZE_LIMIT - 1), id="brackets"),
            pytest.param("- " * (SIZE_LIMIT // 2 - 1), id="dashes"),
            pytest.param("? " * (SIZE_LIMIT // 2 - 1), id="question-marks"),
            pytest.param("a: b\n" * (SIZE_LIMIT // 5 - 1), id="repeated-key", marks=pytest.mark.slow),
            pytest.param('"' + "\n" * (SIZE_LIMIT - 2), id="quote-not-closed"),
            pytest.param(
                "".join(f"- &a{i} [{f'*a{i - 1}' if i else ''}]\n" for i in range(9000)), id="chain-of-aliases"
            ),
            pytest.param(
                "nodes:\n- &n {host: a, tasks: {worker: 100000}}\n" + "- *n\n" * 40000, id="many-tasks-by-aliases"
            ),
        ],
    )
    def test_loading_the_worst_spec_takes_a_bounded_time(self, tmp_path: Path, data: str) -> None:
        assert len(data) <= SIZE_LIMIT
        began = time.process_time()

        self.read(tmp_path, data.encode())

        assert time.process_time() - began < LONGEST_S

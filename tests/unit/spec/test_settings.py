"""`--set` and `-e`: their effects on a spec, and the errors for invalid values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.spec.models import ClusterSpec
from launcher.spec.settings import set_fields
from launcher.spec.variables import check_variables, set_variables
from tests.harness.builders.specs import specs

NODES = {"nodes": [{"host": "gpu-a", "env": {"A": "node", "B": "node"}}, {"host": "gpu-b"}]}


def spec_of(**fields: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({**NODES, **fields})


def errors(error: UsageError) -> list[str]:
    return [*error.evidence] or [error.message]


class TestSet:
    @pytest.mark.parametrize(
        ("text", "fields"),
        [
            ("restart.max_restarts=3", {"restart": {"max_restarts": 3}}),
            ("name=mine", {"name": "mine"}),
            ("env.DEBUG=no", {"env": {"DEBUG": "no"}}),
            ("env.TEXT=a=b", {"env": {"TEXT": "a=b"}}),
            ("env.EMPTY=", {"env": {"EMPTY": ""}}),
            ("preload=[numpy, my.data]", {"preload": ["numpy", "my.data"]}),
            ("timeouts={start_s: 0, drain_s: 5}", {"timeouts": {"start_s": 0, "drain_s": 5}}),
            ("program={script: train.py}", {"program": {"script": "train.py"}}),
            ("ports=3000-3010", {"ports": "3000-3010"}),
            ("nodes[1].tasks.worker=2", {"nodes": [NODES["nodes"][0], {"host": "gpu-b", "tasks": {"worker": 2}}]}),
            ("nodes={from: {command: [list]}}", {"nodes": {"from": {"command": ["list"]}}}),
        ],
    )
    def test_the_set_option_parses_a_value_like_a_spec_file(self, text: str, fields: dict[str, Any]) -> None:
        assert set_fields(spec_of(), [text]) == spec_of(**fields)

    def test_the_set_option_keeps_the_other_values_of_a_section(self) -> None:
        spec = spec_of(restart={"max_restarts": 2, "pause_s": 5}, program={"script": "a.py", "args": ["x", "y"]})
        changed = set_fields(spec, ["restart.max_restarts=3", "program.args[1]=z"])
        assert (changed.restart.max_restarts, changed.restart.pause_s) == (3, 5)
        assert changed.program.args == ["x", "z"]

    def test_the_last_set_option_for_a_field_wins(self) -> None:
        assert set_fields(spec_of(), ["name=a", "name=b"]).name == "b"

    def test_several_set_options_are_validated_together(self) -> None:
        with pytest.raises(UsageError):
            set_fields(spec_of(), ["strategy=mirrored"])
        assert set_fields(spec_of(), ["strategy=mirrored", "nodes=[{host: local}]"]).is_local

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("restart.max_restart=3", "--set restart.max_restart: unknown field; did you mean `max_restarts`?"),
            ("restart.max_restarts=x", "--set restart.max_restarts: expected a whole number, got 'x'"),
            ("timeouts={start: 3}", "--set timeouts: timeouts.start: unknown field; did you mean `start_s`?"),
            ("nodes[0].port=70000", "--set nodes[0].port: expected at most 65535, got '70000'"),
            ("nodes[2].port=70", "--set nodes[2].port: nodes has 2 items; its last item is nodes[1]"),
            ("nodes.port=70", "--set nodes.port: nodes is a list"),
            ("restart.on[0]=stalled", "--set restart.on[0]: restart.on has 0 items; set restart.on as a whole"),
            ("strategy=mirrored", "--set strategy: mirrored runs one process on one node, but this spec has 2 tasks; "),
            ("cross_device=nccl", "--set cross_device: applies only to mirrored; remove it"),
            ("name=", "--set name: is empty; fill it in, or remove the field"),
            ("env.A=[x", "--set env.A: a bracket is not closed; write `,` or `]` here"),
            ("env.A=#x", "--set env.A: `#` begins a comment in YAML; "),
            ("env.A=!!int 3", "--set env.A: the tag !!int has no meaning in a spec; remove it"),
            ("env.TF_CONFIG=x", "--set env.TF_CONFIG: is set by distlaunch for each task; remove it"),
            ("restart.max_restarts", "--set 'restart.max_restarts': expected FIELD=VALUE, like restart.max_restarts=3"),
            ("restart max=3", "--set 'restart max': expected FIELD=VALUE, like "),
            ("=3", "--set '': expected FIELD=VALUE, like "),
            ("name=\udcff", "the argument 'name=\\udcff' is not UTF-8"),
        ],
    )
    def test_an_invalid_set_option_is_named_in_the_error(self, text: str, message: str) -> None:
        with pytest.raises(UsageError) as caught:
            set_fields(spec_of(), [text])
        [line] = errors(caught.value)
        assert line.startswith(message)

    def test_every_invalid_set_option_is_named_with_its_error(self) -> None:
        with pytest.raises(UsageError) as caught:
            set_fields(spec_of(), ["name=a/b", "restart.period_s=x", "ports=1-2"])
        assert [line.partition(":")[0] for line in errors(caught.value)] == ["--set name", "--set restart.period_s"]

    def test_an_error_in_a_set_option_does_not_show_the_value(self) -> None:
        with pytest.raises(UsageError) as caught:
            set_fields(spec_of(), ["nodes[9].env.API_KEY=hidden"])
        assert "hidden" not in "".join(errors(caught.value))

    @given(specs())
    def test_setting_a_field_to_its_own_value_changes_nothing(self, spec: ClusterSpec) -> None:
        again = set_fields(spec, [f"name={spec.name}" if not spec.name.isdigit() else "progress=true"])
        assert (again, again.source) == (spec, spec.source)

    @given(specs(), st.from_regex(r"[a-z_.\[\]0-9]{1,20}=[^\x00]{0,20}", fullmatch=True))
    def test_any_set_option_results_in_a_valid_spec_or_a_usage_error(self, spec: ClusterSpec, text: str) -> None:
        try:
            changed = set_fields(spec, [text])
        except UsageError as error:
            first = errors(error)[0]
            assert first.startswith(("--set", "the argument"))
        else:
            assert ClusterSpec.model_validate(changed.model_dump(exclude_unset=True)) == changed


class TestVariables:
    def test_an_env_option_with_a_value_overrides_all_variables_of_that_name(self) -> None:
        spec = spec_of(env={"A": "all", "C": "all"}, env_from=["A", "D"])
        changed = set_variables(spec, ["A=x=y", "E="], {"D": "1"})
        assert changed.env == {"A": "x=y", "C": "all", "E": ""}
        assert [node.env for node in changed.nodes] == [{"B": "node"}, {}]
        assert changed.env_from == ["D"]

    def test_an_env_option_without_a_value_becomes_env_from_and_not_env(self) -> None:
        changed = set_variables(spec_of(env={"A": "all"}), ["A"], {"A": "hidden"})
        assert (changed.env, changed.env_from, changed.nodes[0].env) == ({}, ["A"], {"B": "node"})
        assert "hidden" not in changed.model_dump_json()

    def test_an_env_option_for_an_unset_variable_removes_the_variable(self) -> None:
        changed = set_variables(spec_of(env={"A": "all"}, env_from=["Z"]), ["A", "Z"], {})
        assert (changed.env, changed.env_from, changed.nodes[0].env) == ({}, [], {"B": "node"})

    def test_the_last_env_option_for_a_name_wins(self) -> None:
        assert set_variables(spec_of(), ["A=1", "A=2"], {}).env == {"A": "2"}
        assert set_variables(spec_of(), ["A=1", "A"], {"A": "3"}).env_from == ["A"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "-e '': expected NAME or NAME=VALUE, with letters, digits and _ in the name"),
            ("=x", "-e '': expected NAME or NAME=VALUE, with letters, digits and _ in the name"),
            ("A-B=hidden", "-e 'A-B': expected NAME or NAME=VALUE, with letters, digits and _ in the name"),
            ("TF_CONFIG=hidden", "-e TF_CONFIG: is set by distlaunch for each task; remove it"),
            ("TF_CONFIG", "-e TF_CONFIG: TF_CONFIG is set by distlaunch for each task; remove it"),
        ],
    )
    def test_an_invalid_env_option_is_named_without_its_value(self, text: str, message: str) -> None:
        with pytest.raises(UsageError) as caught:
            set_variables(spec_of(), [text], {"TF_CONFIG": "hidden"})
        assert errors(caught.value) == [message]

    def test_env_options_keep_the_command_that_lists_nodes(self) -> None:
        spec = ClusterSpec.model_validate({"nodes": {"from": {"command": ["list"]}}})
        changed = set_variables(spec, ["A=1"], {})
        assert (changed.source, changed.nodes, changed.env) == (spec.source, [], {"A": "1"})

    def test_an_unset_env_from_variable_is_a_usage_error(self) -> None:
        with pytest.raises(UsageError, match=r"^env_from: B is not set in this environment"):
            check_variables(spec_of(env_from=["A", "B"]), {"A": ""})

"""The docstrings below the fields of a model describe them."""

from __future__ import annotations

from launcher.described import read_meanings
from launcher.result import Result
from launcher.spec.nodes import ListedNodesSpec
from launcher.spec.parts import TimeoutsSpec


def test_field_descriptions_are_read_from_docstrings() -> None:
    assert read_meanings(TimeoutsSpec)["stop_grace_s"].startswith("How long tasks may take to end")
    assert "from" in read_meanings(ListedNodesSpec)


def test_inherited_fields_keep_their_descriptions() -> None:
    class Parent(Result):
        first: int
        """The first."""

    class Child(Parent):
        bare: str
        second: int = 0
        """The second, in
        two lines."""

    assert read_meanings(Child) == {"first": "The first.", "second": "The second, in\ntwo lines."}
    assert Child.model_json_schema()["properties"]["first"]["description"] == "The first."

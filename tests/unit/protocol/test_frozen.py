"""Our frozen dataclasses behave like the standard ones."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any, ClassVar

import pytest

from worker_entry.protocol import frozen


@frozen.dataclass(frozen=True)
class Ours:
    number: int
    names: list[str] = frozen.field(default_factory=list)
    secret: str = frozen.field(default="", repr=False)
    limit: ClassVar[int] = 3


@dataclasses.dataclass(frozen=True)
class Theirs:
    number: int
    names: list[str] = dataclasses.field(default_factory=list)
    secret: str = dataclasses.field(default="", repr=False)
    limit: ClassVar[int] = 3


@frozen.dataclass(frozen=True)
class Child(Ours):
    secret: str = "known"
    parts: tuple[Ours, ...] = ()


@frozen.dataclass(frozen=True, kw_only=True)
class Named:
    last: int = 0
    first: int

    def __post_init__(self) -> None:
        if self.first < 0:
            raise ValueError("negative")


@pytest.mark.parametrize("cls", [Ours, Theirs])
def test_frozen_values_can_be_compared_printed_and_copied_but_not_changed(cls: Any) -> None:
    value = cls(1, ["a"], secret="s")
    assert value == cls(number=1, names=["a"], secret="s") != cls(1)
    assert (value.number, cls(2).names, cls.limit, cls.secret) == (1, [], 3, "")
    assert cls(2).names is not cls(2).names
    assert repr(value) == f"{cls.__name__}(number=1, names=['a'])"
    assert value != dataclasses.astuple(value)
    assert dataclasses.asdict(value) == {"number": 1, "names": ["a"], "secret": "s"}
    assert dataclasses.replace(value, number=2) == cls(2, ["a"], "s")
    assert copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.number = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del value.number
    with pytest.raises(TypeError):  # its list cannot be hashed
        hash(value)
    match value:
        case cls(1, names):
            assert names == ["a"]


@pytest.mark.parametrize("cls", [Ours, Theirs])
@pytest.mark.parametrize(("args", "named"), [((), {}), ((1, [], "", 2), {}), ((1,), {"number": 1}), ((1,), {"x": 1})])
def test_frozen_dataclasses_reject_wrong_arguments(cls: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        cls(*args, **named)


def test_frozen_dataclass_fields_match_the_standard_dataclasses() -> None:
    def facts(cls: Any) -> list[Any]:
        return [(of.name, of.type, of.default, of.default_factory, of.repr) for of in dataclasses.fields(cls)]

    assert facts(Ours) == facts(Theirs)
    assert frozen.required(Ours) == {"number"}
    assert dataclasses.is_dataclass(Ours)


def test_a_frozen_subclass_has_the_fields_of_its_parent_first() -> None:
    value = Child(1, parts=(Ours(2, ["b"]),))
    assert [of.name for of in dataclasses.fields(Child)] == ["number", "names", "secret", "parts"]
    assert value.secret == "known"
    assert frozen.asdict(value) == dataclasses.asdict(value)
    assert frozen.replace(value, number=5).parts == value.parts
    assert value != Ours(1, secret="known")


def test_a_standard_dataclass_may_subclass_a_frozen_one() -> None:
    @dataclasses.dataclass(frozen=True)
    class Later(Ours):
        more: int = 0

    value = Later(1, more=2)
    assert dataclasses.asdict(value) == {"number": 1, "names": [], "secret": "", "more": 2}
    assert frozen.replace(value, number=3) == Later(3, more=2) != Later(3)


def test_all_values_of_a_frozen_dataclass_without_fields_are_equal() -> None:
    @frozen.dataclass(frozen=True)
    class Nothing:
        pass

    assert Nothing() == Nothing()
    assert len({Nothing(), Nothing()}) == 1
    assert repr(Nothing()).endswith("Nothing()")


def test_frozen_dataclasses_support_keyword_only_fields_and_post_init() -> None:
    assert Named(first=1) == Named(last=0, first=1)
    assert hash(Named(first=1)) == hash(Named(first=1))
    with pytest.raises(TypeError):
        Named(1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="negative"):
        frozen.replace(Named(first=1), first=-1)

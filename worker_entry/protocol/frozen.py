"""Frozen dataclasses that barely slow down the start of Python, with the names and rules of `dataclasses`.

`dataclasses` generates and compiles methods for each class, which takes 0.4 ms; an agent has 80 such classes, a
controller 250. Here all classes share their methods, which look up the fields at run time. Type checkers see the
original `dataclasses`, whose functions also treat these classes as ordinary dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

_MISSING: Any = object()


class _Field:
    """The declared properties of a field."""

    __slots__ = ("default", "default_factory", "repr")

    def __init__(self, *, default: Any = _MISSING, default_factory: Any = _MISSING, repr: bool = True) -> None:  # noqa: A002 - as in dataclasses
        self.default = default
        self.default_factory = default_factory
        self.repr = repr

    @property
    def is_required(self) -> bool:
        return self.default is _MISSING and self.default_factory is _MISSING


def _frozen(*, frozen: bool, kw_only: bool = False) -> Callable[[type], type]:
    """Makes a class a frozen dataclass; this module supports no other kind."""
    assert frozen

    def make(cls: Any) -> Any:
        fields = {**getattr(cls, "__frozen_fields__", {}), **dict(_own_fields(cls))}
        attributes = {
            "__frozen_fields__": fields,
            "__frozen_values__": attrgetter(*fields) if fields else type,
            "__match_args__": () if kw_only else tuple(fields),
            "__dataclass_fields__": _Original(),
            "__dataclass_params__": _Params,
        }
        for name, attribute in {**attributes, **_METHODS}.items():
            if name not in _METHODS or vars(cls).get(name) is None:  # __eq__ alone sets __hash__ to None
                setattr(cls, name, attribute)
        return cls

    return make


class _Params:
    """The parameters that `dataclasses` looks for in the base of a class."""

    init = repr = eq = frozen = True
    order = unsafe_hash = False


def _own_fields(cls: type) -> Iterator[tuple[str, _Field]]:
    """Yields the fields that this class declares; class attributes become defaults, as in any dataclass."""
    for name, _ in _annotations(cls):
        value = cls.__dict__.get(name, _MISSING)
        if not isinstance(value, _Field):
            yield name, _Field(default=value)
            continue
        yield name, value
        if value.default is _MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, value.default)


def _annotations(cls: type) -> list[tuple[str, str]]:
    kinds = vars(cls).get("__annotations__", {})  # strings, because our modules import `annotations` from __future__
    return [(name, kind) for name, kind in kinds.items() if not kind.startswith("ClassVar")]


class _Original:
    """The fields that `dataclasses` looks for in a class, made from a twin of the class at the first access."""

    def __get__(self, instance: object, cls: Any) -> dict[str, Any]:
        import dataclasses

        kinds = {name: kind for base in reversed(cls.__mro__) for name, kind in _annotations(base)}
        # Without a docstring, `dataclasses` would generate one, for which `inspect` parses a signature.
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__ or cls.__name__, "__annotations__": kinds}
        twin = type(cls.__name__, (), namespace)
        for name, declared in cls.__frozen_fields__.items():
            given = {"default": declared.default, "default_factory": declared.default_factory}
            known = {key: value for key, value in given.items() if value is not _MISSING}
            setattr(twin, name, dataclasses.field(repr=declared.repr, **known))
        whole: Any = dataclasses.dataclass(init=False, repr=False, eq=False)(twin)
        made = {one.name: one for one in dataclasses.fields(whole)}
        setattr(cls, "__dataclass_fields__", made)  # noqa: B010 - mypy knows the name
        return made


def _init(self: Any, *args: Any, **given: Any) -> None:
    fields, values = self.__frozen_fields__, vars(self)
    if len(args) > len(self.__match_args__):
        raise TypeError(f"{type(self).__name__} takes {len(self.__match_args__)} positional arguments, not {len(args)}")
    for name, value in zip(fields, args):  # noqa: B905 - fewer arguments than fields; Python 3.9 has no `strict`
        if name in given:
            raise TypeError(f"{type(self).__name__}: {name!r} is given twice")
        values[name] = value
    for name, declared in list(fields.items())[len(args) :] if args else fields.items():
        if name in given:
            values[name] = given.pop(name)
        elif declared.default is not _MISSING:
            values[name] = declared.default
        elif declared.default_factory is not _MISSING:
            values[name] = declared.default_factory()
        else:
            raise TypeError(f"{type(self).__name__}: {name!r} is missing")
    if given:
        raise TypeError(f"{type(self).__name__} has no field {min(given)!r}")
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _repr(self: Any) -> str:
    shown = (f"{name}={getattr(self, name)!r}" for name, of in self.__frozen_fields__.items() if of.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self.__frozen_values__(self) == self.__frozen_values__(other)


def _hash(self: Any) -> int:
    return hash(self.__frozen_values__(self))


def _refuse_set(self: Any, name: str, value: object) -> None:
    _refuse_delete(self, name)


def _refuse_delete(self: Any, name: str) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


_METHODS = {
    "__init__": _init,
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _refuse_set,
    "__delattr__": _refuse_delete,
}


def _replace(value: Any, /, **changes: Any) -> Any:
    if "__frozen_fields__" not in vars(type(value)):  # made by `dataclasses`, perhaps as a subclass of our class
        import dataclasses

        return dataclasses.replace(value, **changes)
    kept, fields = vars(value), value.__frozen_fields__
    if unknown := changes.keys() - fields.keys():
        raise TypeError(f"{type(value).__name__} has no field {min(unknown)!r}")
    copy = object.__new__(type(value))
    vars(copy).update({name: kept[name] for name in fields}, **changes)  # not through `_init`: states have 50 fields
    if hasattr(copy, "__post_init__"):
        copy.__post_init__()
    return copy


def _asdict(value: Any) -> Any:
    """Converts dataclasses to dicts, also inside lists, tuples and dicts; shares other values with the original."""
    if is_frozen(value):
        return {name: _asdict(getattr(value, name)) for name in value.__frozen_fields__}
    if isinstance(value, (list, tuple)):
        return type(value)(_asdict(item) for item in value)
    return {key: _asdict(item) for key, item in value.items()} if isinstance(value, dict) else value


def fields_of(value: Any) -> dict[str, Any]:
    """Returns an instance's fields with unconverted values; raises TypeError for any other object."""
    if not is_frozen(value):
        raise TypeError(f"{type(value).__name__} is not one of our frozen dataclasses")
    return {name: getattr(value, name) for name in value.__frozen_fields__}


def is_frozen(cls: Any) -> bool:
    """Whether this is a class, or an instance of a class, that this module has made."""
    return hasattr(cls, "__frozen_fields__")


def required(cls: Any) -> set[str]:
    """Returns the fields without a default of a class that this module has made."""
    return {name for name, of in cls.__frozen_fields__.items() if of.is_required}


if TYPE_CHECKING:
    from dataclasses import asdict as asdict
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
else:
    asdict, dataclass, field, replace = _asdict, _frozen, _Field, _replace

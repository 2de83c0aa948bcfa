"""The classes of `facts/settings.py` as a tree of named fields, read once per class."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs

from appliance.facts.keys import METADATA, Key
from appliance.facts.settings import NOT_YET, Settings


@attrs.frozen
class Field:
    """One name an operator may write.

    `shape`: "table" is a section of its own, "tables" a list of them ([[...]]), "list" a list of single values, "map" a
    table whose names the operator chooses, with a string for each, "value" one value. `type` is the class of the
    section, of one entry, or of one value. `default` is `attrs.NOTHING` where the
    key must be given.
    """

    name: str
    key: Key
    shape: Literal["table", "tables", "list", "map", "value"]
    type: type
    default: Any

    @property
    def required(self) -> bool:
        return self.default is attrs.NOTHING


@functools.cache
def fields_of(cls: type) -> tuple[Field, ...]:
    """The fields of a class that operators may set, in the order of the class."""
    hints = typing.get_type_hints(cls)
    return tuple(
        _field(a.name, a.metadata[METADATA], hints[a.name], a.default)
        for a in attrs.fields(cls)
        if METADATA in a.metadata
    )


@functools.cache
def is_section(cls: type) -> bool:
    return attrs.has(cls) and bool(fields_of(cls))


def _field(name: str, key: Key, hint: Any, default: Any) -> Field:
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = default.factory()
    if isinstance(hint, types.UnionType):  # "... | None": None is what leaving it out means, and cannot be written
        hint = next(arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        item = key.entry or typing.get_args(hint)[0]
        return Field(name, key, "tables" if is_section(item) else "list", item, default)
    if typing.get_origin(hint) is Mapping:
        return Field(name, key, "map", typing.get_args(hint)[1], default)
    return Field(name, key, "table" if is_section(hint) else "value", hint, default)


def leaves(settings: Settings) -> Iterator[tuple[str, Field, Any]]:
    """Every key with its value, as (dotted path, field, value); entries of lists as `endpoints[0].url`."""
    return _leaves(settings, type(settings), "")


def _leaves(section: object, cls: type, prefix: str) -> Iterator[tuple[str, Field, Any]]:
    for field in fields_of(cls):
        path, value = prefix + field.name, getattr(section, field.name)
        match field.shape:
            case "table":
                yield from _leaves(value, field.type, f"{path}.")
            case "tables":
                # An entry of another class than the one operators write still answers to the same names.
                for i, entry in enumerate(value):
                    yield from _leaves(entry, field.type, f"{path}[{i}].")
            case _:
                yield path, field, value


@functools.cache
def every_key(cls: type = Settings, prefix: str = "") -> tuple[str, ...]:
    """All dotted names, sections included, without indexes: `server`, `server.listen`, `endpoints.url`."""
    names: list[str] = []
    for field in fields_of(cls):
        names.append(prefix + field.name)
        if field.shape in ("table", "tables"):
            names.extend(every_key(field.type, f"{prefix}{field.name}."))
    return tuple(names)


def not_yet(dotted: str) -> bool:
    """Whether `dotted` (without indexes) belongs to a feature that a later version brings."""
    return any(dotted == name or dotted.startswith(f"{name}.") for name in NOT_YET)

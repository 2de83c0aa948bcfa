"""A TOML document into the classes of `facts/settings.py`, finding every fault on the way.

One walk over the fields of the classes rather than a library's: the messages are the interface here, each needs the
path, the unit and the bounds of its key, and a faulty value must not hide the faults behind it. What is faulty is
replaced by a value of the right type, so that the rules between keys can still look at everything else.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable
from typing import Any

import attrs

from appliance.cli.config.forms import FORMS, PATHS, TYPES, Form, Mismatch
from appliance.cli.config.quote import UNPRINTABLE, got, toml_value
from appliance.cli.config.schema import Field, every_key, fields_of, not_yet
from appliance.facts.errors import Fault
from appliance.facts.settings import Settings

LARGEST_INT = 2**63 - 1
"""TOML's own bound on whole numbers, which the parser does not hold files to."""

_UNITS = (("_s", " of seconds"), ("_bytes", " of bytes"), ("_tokens", " of tokens"))
_NAME = re.compile(r"[A-Za-z0-9_./-]+")
_FAULTY = object()


@attrs.define
class Walk:
    """What one walk finds: `faults`, and in `given` the paths of the keys that the document holds.

    `folder_of(path)` is where a relative path at that key starts.
    """

    folder_of: Callable[[str], str]
    faults: list[Fault] = attrs.field(factory=list)
    given: set[str] = attrs.field(factory=set)

    def settings(self, document: dict[str, Any], **fixed: Any) -> Settings:
        """The settings of a document; usable only when no fault was found."""
        settings: Settings = self.section(Settings, document, "", fixed)
        return settings

    def section(self, cls: type, table: dict[str, Any], prefix: str, fixed: dict[str, Any] | None = None) -> Any:
        """One table as an instance of `cls`, or of what its `build` makes; `fixed` are fields that are no keys."""
        fields = {field.name: field for field in fields_of(cls)}
        for name in table:
            if name not in fields:
                self._unknown(name, prefix, list(fields))
        values = {name: self._field(field, table, prefix + name) for name, field in fields.items()}
        built = cls(**values, **(fixed or {}))
        return built.build() if hasattr(built, "build") else built

    def _unknown(self, name: str, prefix: str, siblings: list[str]) -> None:
        dotted = re.sub(r"\[\d+\]", "", prefix) + name
        path = prefix + (name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name))
        if not_yet(dotted):
            self.faults.append(Fault(path, "not available in this version"))
            return
        close = difflib.get_close_matches(name, siblings, 1, 0.7)
        elsewhere = [key for key in every_key() if key.rpartition(".")[2] == name]
        if close or elsewhere:
            self.faults.append(Fault(path, f"unknown key; did you mean {(close or elsewhere)[0]}?"))
        else:
            self.faults.append(Fault(path, "unknown key"))

    def _field(self, field: Field, table: dict[str, Any], path: str) -> Any:
        if field.name not in table:
            if field.shape == "table":
                return self.section(field.type, {}, f"{path}.")
            if field.required:
                self.faults.append(Fault(path, f"missing; expected {expected(field)}"))
                return self._placeholder(field)
            return field.default
        raw = table[field.name]
        match field.shape:
            case "table":
                if not isinstance(raw, dict):
                    self._fault(path, f"a table ([{path}])", raw)
                return self.section(field.type, raw if isinstance(raw, dict) else {}, f"{path}.")
            case "tables":
                if not isinstance(raw, list) or not all(isinstance(entry, dict) for entry in raw):
                    self._fault(path, f"a list of tables ([[{path}]])", raw)
                    return field.default
                if field.key.minimum is not None and len(raw) < field.key.minimum:
                    self.faults.append(Fault(path, f"expected at least {field.key.minimum:g}: tables ([[{path}]])"))
                    return field.default
                return tuple(self.section(field.type, entry, f"{path}[{i}].") for i, entry in enumerate(raw))
            case "list":
                self.given.add(path)
                return self._list(field, raw, path)
            case "map":
                self.given.add(path)
                return self._map(field, raw, path)
            case _:
                self.given.add(path)
                value = self._value(field, raw, path)
                return self._placeholder(field) if value is _FAULTY else value

    def _list(self, field: Field, raw: Any, path: str) -> Any:
        """One value may stand for a list of one, as it does for `listen`; "" stands for none."""
        if isinstance(raw, str):
            raw = [raw] if raw else []
        if not isinstance(raw, list):
            self._fault(path, f"a list, each {expected(field)}", raw)
            return self._placeholder(field)
        paths = [path if len(raw) == 1 else f"{path}[{i}]" for i in range(len(raw))]
        values = [self._value(field, item, here) for item, here in zip(raw, paths, strict=True)]
        if field.key.minimum is not None and len(values) < field.key.minimum:
            self.faults.append(Fault(path, f"expected at least {field.key.minimum:g}: {expected(field)}"))
            return self._placeholder(field)
        if field.type is str:  # keeps its place by a text that no other item can equal, so that paths still count right
            values = [f"\0{here}" if value is _FAULTY else value for value, here in zip(values, paths, strict=True)]
        return tuple(value for value in values if value is not _FAULTY)

    def _map(self, field: Field, raw: Any, path: str) -> Any:
        """A table of strings; `choices` of its key are the names it may hold."""
        if not isinstance(raw, dict):
            self._fault(path, f"a table, each {expected(field)}", raw)
            return field.default
        values = {}
        for name, item in raw.items():
            here = f"{path}.{name}" if _NAME.fullmatch(name) else f"{path}.{toml_value(name)}"
            if field.key.choices and name not in field.key.choices:
                self.faults.append(Fault(here, f"expected one of {', '.join(field.key.choices)}"))
            elif not _NAME.fullmatch(name):
                self.faults.append(Fault(here, "expected a name of letters, digits and _ . / -"))
            else:
                values[name] = self._value(attrs.evolve(field, key=attrs.evolve(field.key, choices=())), item, here)
        return {name: value for name, value in values.items() if value is not _FAULTY}

    def _value(self, field: Field, raw: Any, path: str) -> Any:
        """`raw` as a value of the field's type, or `_FAULTY` once the fault is noted."""
        try:
            return self._typed(field, raw, path)
        except Mismatch as mismatch:
            self._fault(path, str(mismatch) or expected(field), raw)
            return _FAULTY

    def _typed(self, field: Field, raw: Any, path: str) -> Any:
        key = field.key
        if field.type is bool:
            if not isinstance(raw, bool):
                raise Mismatch
            return raw
        if field.type in (int, float):
            if isinstance(raw, bool) or not isinstance(raw, int | float if field.type is float else int):
                raise Mismatch
            if not math.isfinite(raw) or abs(raw) > LARGEST_INT or not _within(field, raw):
                raise Mismatch
            return field.type(raw)
        if not isinstance(raw, str) or (key.choices and raw not in key.choices):
            raise Mismatch
        if UNPRINTABLE.search(raw):
            raise Mismatch("a string without control characters")
        if raw and (key.form in PATHS or (key.form == "program" and "/" in raw)):
            raw = os.path.normpath(os.path.join(self.folder_of(path), raw))
        form = _form(field)
        return form.parse(raw) if form else raw

    def _placeholder(self, field: Field) -> Any:
        if not field.required:
            return field.default
        form = _form(field)
        return form.parse(field.key.example) if form and isinstance(field.key.example, str) else field.key.example

    def _fault(self, path: str, wanted: str, raw: Any) -> None:
        self.faults.append(Fault(path, f"expected {wanted}, got {got(raw)}"))


def expected(field: Field) -> str:
    """What one value of the field must be, in words that follow "expected"."""
    key = field.key
    if field.shape == "map":
        form = _form(field)
        return form.expected if form else "a string"
    if key.choices:
        words = [toml_value(choice) for choice in key.choices]
        return " or ".join([", ".join(words[:-1]), words[-1]])
    if field.type is bool:
        return "true or false"
    if field.type in (int, float):
        unit = next((words for suffix, words in _UNITS if field.name.endswith(suffix)), "")
        return f"a {'whole ' if field.type is int else ''}number{unit}{_bounds(field)}"
    form = _form(field)
    return form.expected if form else "a string"


def _form(field: Field) -> Form | None:
    return TYPES.get(field.type) or FORMS.get(field.key.form)


def _within(field: Field, number: float) -> bool:
    key = field.key
    return (
        (key.minimum is None or number >= key.minimum)
        and (key.above is None or number > key.above)
        and (key.maximum is None or number <= key.maximum)
    )


def _bounds(field: Field) -> str:
    key = field.key
    if key.minimum is not None and key.maximum is not None:
        return f" from {key.minimum:g} to {key.maximum:g}"
    if key.above is not None:
        return f" above {key.above:g}"
    if key.minimum is not None:
        return f", {key.minimum:g} or more" if key.minimum == int(key.minimum) else f" of at least {key.minimum:g}"
    return ""

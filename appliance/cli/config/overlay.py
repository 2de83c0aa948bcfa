"""The environment laid over the file: `APPLIANCE_<SECTION>__<KEY>=value`, with values as TOML.

A value of the file is replaced as a whole by what lies over it, so a table or a list given by a variable leaves nothing
of the file's; a variable that names a deeper key is laid on after those that name its table.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import attrs

from appliance.cli.config.forms import TYPES
from appliance.cli.config.mentat import NAMES, Unread
from appliance.cli.config.quote import got
from appliance.cli.config.schema import Field, every_key, fields_of, not_yet
from appliance.facts.errors import Fault
from appliance.facts.settings import Settings

PREFIX = "APPLIANCE_"

NOT_OVERLAYS = frozenset({"APPLIANCE_CONFIG", "APPLIANCE_ADMIN", "APPLIANCE_RUNTIME_DIR"})
"""Variables of the same prefix that are read elsewhere: the file to load, ctl's socket, where the program unpacks."""


@attrs.frozen
class Layer:
    """A value laid over the file at `path`, and where it came from: "environment NAME" or "command line"."""

    path: tuple[str, ...]
    value: Any
    origin: str


def overlay(environ: Mapping[str, str]) -> tuple[list[Layer], list[Fault]]:
    """All overlays of the environment, outer keys before inner ones, and the variables that are none."""
    layers, faults = _of_clusters(environ)
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in NOT_OVERLAYS:
            continue
        path = tuple(part.lower() for part in variable[len(PREFIX) :].split("__"))
        if not_yet(".".join(path)):
            faults.append(Fault(variable, "not available in this version"))
        elif variable != variable.upper() or (field := _find(path)) is None:
            faults.append(Fault(variable, "unknown key" + _meant(variable)))
        else:
            try:
                layers.append(Layer(path, read(environ[variable], field), f"environment {variable}"))
            except tomllib.TOMLDecodeError as error:
                why = re.sub(r" \(at .*\)$", "", str(error))  # the place counts from text that is not the operator's
                faults.append(Fault(variable, f"expected TOML, got {got(environ[variable])}: {why}"))
    return sorted(layers, key=lambda layer: len(layer.path)), faults


def _of_clusters(environ: Mapping[str, str]) -> tuple[list[Layer], list[Fault]]:
    """What the names of other routers say (`mentat.py`). Our own names for the same keys are laid over them."""
    layers: list[Layer] = []
    faults: list[Fault] = []
    for name, variable in NAMES.items():
        text = environ.get(name)
        if text is None or (not text.strip() and not variable.empty_counts):
            continue
        try:
            for key, value in variable.read(text.strip()):
                layers.append(Layer(tuple(key.split(".")), value, f"environment {name}"))
        except Unread as wanted:
            faults.append(Fault(name, f"expected {wanted}, got {got(text)}"))
    return layers, faults


def read(text: str, field: Field) -> Any:
    """A variable's text as a value for `field`.

    Where a string is wanted, text that is no TOML string is the string itself, so that `LEVEL=info` needs no quotes.
    Anything else that is no TOML comes back as text too, and is refused where its type is looked at.
    Raises `tomllib.TOMLDecodeError` where a table was wanted, since only TOML can say where it broke.
    """
    wants_text = field.shape in ("value", "list") and (field.type is str or field.type in TYPES)
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if field.shape in ("table", "tables", "map"):
            raise
        return text
    except RecursionError:
        return text
    value = document.pop("value", text)
    if document:  # a line break in the text began further keys
        return text
    if wants_text and not isinstance(value, str if field.shape == "value" else str | list):
        return text
    return value


def lay(document: dict[str, Any], layers: list[Layer]) -> None:
    """Puts `layers` into `document`, in order. A section of the file that is no table is left for its own fault."""
    for layer in layers:
        table: Any = document
        for part in layer.path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                break
        else:
            table[layer.path[-1]] = layer.value


def _find(path: tuple[str, ...]) -> Field | None:
    cls: type | None = Settings
    found: Field | None = None
    for part in path:
        if cls is None:
            # An entry of a table whose names are known: others may be in mixed case, which a variable cannot tell.
            if found is None or found.shape != "map" or part not in found.key.choices or part != path[-1]:
                return None
            return attrs.evolve(found, name=part, shape="value", key=attrs.evolve(found.key, choices=()))
        found = next((field for field in fields_of(cls) if field.name == part), None)
        if found is None:
            return None
        cls = found.type if found.shape == "table" else None
    return found


def _meant(variable: str) -> str:
    """A hint at the closest overlay, or at how a list of tables is given."""
    for section in fields_of(Settings):
        whole = f"{PREFIX}{section.name.upper()}"
        if section.shape == "tables" and re.match(f"{whole}_", variable):
            return f"; the whole list is given as {whole}='[{{...}}]'"
    known = [PREFIX + key.upper().replace(".", "__") for key in every_key() if _find(tuple(key.split(".")))]
    close = difflib.get_close_matches(variable.upper(), known, 1, 0.8) if variable != PREFIX else []
    return f"; did you mean {close[0]}?" if close else ""

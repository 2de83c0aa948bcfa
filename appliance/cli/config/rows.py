"""The effective configuration as rows, for `ctl config show`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs

from appliance.cli.config.loaded import Loaded
from appliance.cli.config.quote import masked, toml_value
from appliance.cli.config.schema import leaves

_SECRET = re.compile("token|key|secret|password|credential", re.I)

__all__ = ["Row", "plain", "show", "toml_value"]


class Row(NamedTuple):
    """One key: its dotted path, its value as JSON and TOML know it (None: left out), and where it came from."""

    path: str
    value: Any
    origin: str


def show(loaded: Loaded) -> list[Row]:
    """Every key with its effective value. What may hold a secret is masked: keys that are one, URLs, an engine's
    environment."""
    return [
        Row(path, "***" if field.key.form == "secret" and value else _masked(plain(value)), loaded.origins[path])
        for path, field, value in leaves(loaded.settings)
    ]


def plain(value: object) -> Any:
    """A value in the types of TOML."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case tuple():
            return [plain(item) for item in value]
        case Mapping():
            return {name: plain(item) for name, item in value.items()}
        case _ if attrs.has(type(value)):
            return str(value)
        case _:
            raise TypeError(f"no written form for {type(value).__name__}")


def _masked(value: Any) -> Any:
    match value:
        case str():
            return masked(value)
        case list():
            return [_masked(item) for item in value]
        case dict():
            return {name: "***" if _SECRET.search(name) else _masked(item) for name, item in value.items()}
        case _:
            return value

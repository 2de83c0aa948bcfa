"""What a reload changes, what it cannot, and the settings that hold after it."""

from __future__ import annotations

from typing import Any

import attrs

from appliance.cli.config.schema import Field, fields_of
from appliance.facts.settings import Settings

_TLS = ("tls_cert", "tls_key")


def changes(old: Settings, new: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dotted keys that differ: those a running process can take over, and those that need a restart.

    Entries of lists are named by their first key, since their numbers move when one is taken out: `endpoints.a` came
    or went, `endpoints.a.url` changed.
    """
    live: list[str] = []
    fixed: list[str] = []
    for path, field in _different(old, new, Settings, ""):
        (live if field.key.live and not _tls_switched(path, old, new) else fixed).append(path)
    return tuple(live), tuple(fixed)


def keep_fixed(old: Settings, new: Settings) -> Settings:
    """`new`, with the keys that need a restart still as in `old`: what holds after a reload."""
    sections: dict[str, Any] = {"state_dir": old.state_dir, "runtime_dir": old.runtime_dir}
    for field in fields_of(Settings):
        if field.shape == "table":
            sections[field.name] = _kept(getattr(old, field.name), getattr(new, field.name), field.type)
    settings = attrs.evolve(new, **sections)
    if _tls_switched("server.tls_cert", old, new):
        server = attrs.evolve(settings.server, tls_cert=old.server.tls_cert, tls_key=old.server.tls_key)
        settings = attrs.evolve(settings, server=server)
    return settings


def _different(old: object, new: object, cls: type, prefix: str) -> list[tuple[str, Field]]:
    found: list[tuple[str, Field]] = []
    for field in fields_of(cls):
        path, before, after = prefix + field.name, getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        match field.shape:
            case "table":
                found += _different(before, after, field.type, f"{path}.")
            case "tables":
                found += _different_entries(before, after, field, path)
            case _:
                found.append((path, field))
    return found


def _different_entries(before: Any, after: Any, field: Field, path: str) -> list[tuple[str, Field]]:
    named = fields_of(field.type)[0].name
    olds = {getattr(entry, named): entry for entry in before}
    news = {getattr(entry, named): entry for entry in after}
    found: list[tuple[str, Field]] = []
    for name in dict.fromkeys([*olds, *news]):
        if name in olds and name in news:
            found += _different(olds[name], news[name], field.type, f"{path}.{name}.")
        else:
            found.append((f"{path}.{name}", field))
    return found or [(path, field)]  # the same entries in another order


def _kept(old: object, new: Any, cls: type) -> Any:
    kept: dict[str, Any] = {}
    for field in fields_of(cls):
        if field.shape == "table":
            kept[field.name] = _kept(getattr(old, field.name), getattr(new, field.name), field.type)
        elif not field.key.live:
            kept[field.name] = getattr(old, field.name)
    return attrs.evolve(new, **kept)


def _tls_switched(path: str, old: Settings, new: Settings) -> bool:
    """Another certificate is taken over at once; whether the door speaks TLS at all is decided when it opens."""
    return path.removeprefix("server.") in _TLS and bool(old.server.tls_cert) != bool(new.server.tls_cert)

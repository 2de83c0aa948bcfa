"""The parts of an answer that are read, out of bytes from whoever announced himself.

What becomes of bytes costs more than the bytes: 15 MiB of empty lists take seconds to decode, during which no request
is served, and 500 MB. So a document is gone through one table at a time, what nobody reads is only skipped, and of each
table no more is decoded than a large cluster has. What does not fit is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

MOST_GROUPS = 512
"""Of one document. Newer daemons tell of all groups of the cluster in one."""
MOST_ROWS = 512
"""Agents, actors or peers in one table."""
MOST_AGENTS = 4096
"""Rows of agents and of actors in one document, each."""
MOST_FIELD_BYTES = 4 << 10
"""Of one field that is read. A list of addresses is the longest of them."""
MOST_MODEL_ROW_BYTES = 32 << 10
MOST_COMMAS = 200_000
"""In all of an engine's rows."""
MOST_MODELS = 1000
MOST_MODEL_BYTES = 1 << 20
"""Of all entries of one engine. What comes after is known by its name alone, as long as those are no more either."""

_ROW = frozenset(
    (
        *("id", "alive", "node_ip", "provider", "services", "services_ports", "service_notes"),  # agents
        *("state",),  # actors
        *("node_ip", "link_ip", "addrs", "http_port", "alive"),  # peers
        *("replica",),  # shards
    )
)

_TOP = ("node_id", "node_ip", "addrs", "peers", "groups", "appliance")

_Raws = dict[str, msgspec.Raw]
_DROPPED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class NotJson(ValueError):
    """The bytes are no JSON, or so deep that nobody means them."""


_ABSENT = msgspec.Raw(b"")


class _Named(msgspec.Struct):
    id: str


class _Listed(msgspec.Struct):
    data: msgspec.Raw = _ABSENT


_Top = msgspec.defstruct("_Top", [(key, msgspec.Raw, _ABSENT) for key in _TOP])
_Row = msgspec.defstruct("_Row", [(key, msgspec.Raw, _ABSENT) for key in sorted(_ROW)])
"""What else a document or a row has is passed over, and no dictionary is made of it."""


def document(body: bytes) -> object:
    """A daemon's `/status` with the fields that are read. Raises NotJson."""
    top = _fields(_whole(body), _Top)
    if top is None:
        return None
    left = [MOST_AGENTS, MOST_AGENTS]
    found: dict[str, object] = {key: _value(top[key]) for key in ("node_id", "node_ip", "addrs") if key in top}
    if "peers" in top:
        found["peers"] = _rows(top["peers"], MOST_ROWS)
    if "groups" in top:
        groups = _table(top["groups"])
        found["groups"] = None if groups is None else {name: _group(groups[name], left) for name in _first(groups)}
    if "appliance" in top:
        own = _table(top["appliance"])
        found["appliance"] = None if own is None else {key: _part(key, own[key]) for key in own if key in _OWN}
    return found


def entries(body: bytes, most_bytes: int = MOST_MODEL_BYTES) -> list[Mapping[str, object]]:
    """An engine's rows of models, those with an id, of about `most_bytes` in all. Raises NotJson."""
    listed = (_fields(_whole(body), _Listed) or {}).get("data", _ABSENT)
    try:
        # Of millions of empty rows not even a list is made.
        rows = [] if bytes(listed).count(b",") > MOST_COMMAS else msgspec.json.decode(listed, type=list[msgspec.Raw])
    except _DROPPED:
        return []
    found: list[Mapping[str, object]] = []
    left = names_left = most_bytes
    for row in rows[:MOST_MODELS]:
        left -= len(bytes(row))
        whole = _value(row, MOST_MODEL_ROW_BYTES) if left >= 0 else None
        if whole is None:
            whole = _named(row)
            names_left -= len(str(whole))
        if names_left < 0:
            break
        if isinstance(whole, dict) and isinstance(whole.get("id"), str):
            found.append(whole)
    return found


_OWN = ("control", "shards")


def _part(key: str, raw: msgspec.Raw) -> object:
    """Of `control` it matters alone that it is there, however long it is."""
    if key == "shards":
        return _rows(raw, MOST_ROWS)
    return None if _table(raw) is None else {}


def _group(raw: msgspec.Raw, left: list[int]) -> object:
    """One group; `left` are how many rows of agents and of actors the document may still have."""
    fields = _table(raw)
    if fields is None:
        return None
    found: dict[str, object] = {}
    for at, key in enumerate(("agents", "actors")):
        if key in fields:
            rows = _rows(fields[key], min(MOST_ROWS, left[at]))
            left[at] -= len(rows) if isinstance(rows, list | dict) else 0
            found[key] = rows
    if "gpus_total" in fields:
        found["gpus_total"] = _value(fields["gpus_total"])
    return found


def _rows(raw: msgspec.Raw, most: int) -> object:
    """A table in either form, with its first rows."""
    table = _table(raw)
    if table is not None:
        return {key: _row(table[key]) for key, _ in zip(table, range(most), strict=False)}
    try:
        rows = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except _DROPPED:
        return None
    return [_row(row) for row in rows[:most]]


def _row(raw: msgspec.Raw) -> object:
    fields = _fields(raw, _Row)
    return None if fields is None else {key: _value(fields[key]) for key in fields}


def _first(groups: _Raws) -> Iterator[str]:
    yield from (name for name, _ in zip(groups, range(MOST_GROUPS), strict=False))


def _whole(body: bytes) -> msgspec.Raw:
    try:
        return msgspec.json.decode(body, type=msgspec.Raw)
    except _DROPPED:
        raise NotJson("the answer is not JSON") from None


def _table(raw: msgspec.Raw) -> _Raws | None:
    try:
        return msgspec.json.decode(raw, type=_Raws)
    except _DROPPED:
        return None


def _fields(raw: msgspec.Raw, known: type[msgspec.Struct]) -> _Raws | None:
    """Those fields of an object that `known` has; None where it is none."""
    try:
        found = msgspec.json.decode(raw, type=known)
    except _DROPPED:
        return None
    fields = {key: getattr(found, key) for key in known.__struct_fields__}
    return {key: raw for key, raw in fields.items() if len(memoryview(raw))}


def _value(raw: msgspec.Raw, most: int = MOST_FIELD_BYTES) -> object:
    """None for what is larger than any that is meant."""
    if len(bytes(raw)) > most:
        return None
    try:
        return msgspec.json.decode(raw)
    except _DROPPED:
        return None


def _named(raw: msgspec.Raw) -> object:
    try:
        return {"id": msgspec.json.decode(raw, type=_Named).id, "object": "model"}
    except _DROPPED:
        return None

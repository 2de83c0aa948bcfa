"""Tools of many groups in one list, and a name called back to its group.

Two ways to name them. `prefix`: each tool is listed as `<group>__<tool>`. `flat`: each name is listed once, and has an
argument `__group` that says whose it is where several offer it. Calls may use either, whatever the list uses: the names
of the list are looked up first, so what is listed always means what it says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
import msgspec

from .messages import Fields, is_object, raw, taken_apart, value

SEPARATOR = "__"
GROUP_ARGUMENT = "__group"
SHOWN_NAMES = 200
"""As many valid names a refusal holds: enough to find a slip of the pen, too few to fill a model's context."""

MOST_NAME = 300
"""Characters in the name of a tool. The protocol's own limit is 128, so what is longer is no name."""

_EMPTY_SCHEMA = {"type": "object", "properties": {}}


@attrs.frozen
class Tool:
    """A tool as its group lists it; `entry` is the whole of it. `takes_group`: it has an argument called like ours."""

    name: str
    entry: Fields
    takes_group: bool = False


@attrs.frozen
class Dropped:
    """Why a tool is not in the list."""

    group: str
    tool: str
    reason: str


@attrs.frozen
class Route:
    """Where a call goes: the group, its own name for the tool, and the arguments to send (None: none were given)."""

    group: str
    tool: str
    arguments: msgspec.Raw | None


@attrs.frozen
class NoRoute:
    """Nothing to call; `text` says what could be."""

    text: str


@attrs.frozen
class Merged:
    """The list, and both ways to read a name of it. `native` are the names of our own tools."""

    entries: tuple[Mapping[str, object], ...]
    native: frozenset[str]
    prefixed: Mapping[str, tuple[str, str]]
    flat: Mapping[str, tuple[str, ...]]
    dropped: tuple[Dropped, ...]
    naming: str

    @property
    def names(self) -> list[str]:
        return [str(entry["name"]) for entry in self.entries]


def tools_of(entries: Iterable[msgspec.Raw]) -> list[Tool]:
    """The tools of one page of a list. What has no name that can be shown cannot be called, and is left out."""
    tools = []
    for entry in entries:
        fields = taken_apart(entry)
        name = value(fields.get("name")) if fields else None
        if fields is not None and isinstance(name, str) and 0 < len(name) <= MOST_NAME and name.isprintable():
            tools.append(Tool(name, fields, GROUP_ARGUMENT in _properties(fields)))
    return tools


def merge(
    groups: Sequence[tuple[str, Sequence[Tool]]], naming: str, native: Sequence[Mapping[str, object]] = ()
) -> Merged:
    """One list: our own tools first, then those of the groups in the order given. The first of a name has it."""
    own = frozenset(str(entry["name"]) for entry in native)
    prefixed: dict[str, tuple[str, str]] = {}
    offers: dict[str, list[str]] = {}
    first: dict[str, Tool] = {}
    by_prefix: list[Mapping[str, object]] = []
    dropped: list[Dropped] = []
    for group, tools in groups:
        for tool in _once(tools):
            long = group + SEPARATOR + tool.name
            if long in own or long in prefixed:
                holder = "the router" if long in own else f"group {prefixed[long][0]}"
                if naming == "prefix":
                    dropped.append(Dropped(group, tool.name, f"{long} is a tool of {holder}"))
            else:
                prefixed[long] = group, tool.name
                by_prefix.append(_prefixed(group, tool))
            if tool.name in own or tool.takes_group:
                if naming == "flat":
                    taken = f"{tool.name} is a tool of the router"
                    reason = taken if tool.name in own else f"it has an argument {GROUP_ARGUMENT} of its own"
                    dropped.append(Dropped(group, tool.name, reason))
                continue
            offers.setdefault(tool.name, []).append(group)
            first.setdefault(tool.name, tool)
    flat = {name: tuple(having) for name, having in offers.items()}
    listed = by_prefix if naming == "prefix" else [_flat(tool, offers[name]) for name, tool in first.items()]
    return Merged((*native, *listed), own, prefixed, flat, tuple(dropped), naming)


def route(merged: Merged, groups: Collection[str], name: str, arguments: msgspec.Raw | None) -> Route | NoRoute:
    """Where a call of `name` goes. `groups` are all there are: one whose list is not known can be called as well, since
    its own server knows best what it has."""
    by_prefix = _by_prefix(merged, name, arguments)
    by_flat = _by_flat(merged, groups, name, arguments)
    found = (by_prefix or by_flat) if merged.naming == "prefix" else (by_flat or by_prefix)
    if found is not None:
        return found
    # the longest, so that a group `a__b` is reachable beside a group `a`
    for group in sorted(groups, key=len, reverse=True):
        tool = name.removeprefix(group + SEPARATOR)
        if tool and tool != name:
            return Route(group, tool, arguments)
    known = ", ".join(merged.names[:SHOWN_NAMES])
    more = len(merged.names) - SHOWN_NAMES
    return NoRoute(f"There is no tool {name}. Tools: {known}{f' and {more} more' if more > 0 else ''}")


def _by_prefix(merged: Merged, name: str, arguments: msgspec.Raw | None) -> Route | None:
    found = merged.prefixed.get(name)
    return Route(*found, arguments) if found is not None else None


def _by_flat(
    merged: Merged, groups: Collection[str], name: str, arguments: msgspec.Raw | None
) -> Route | NoRoute | None:
    offering = merged.flat.get(name, ())
    fields = taken_apart(arguments) or {}
    if GROUP_ARGUMENT not in fields:
        if len(offering) > 1:
            return NoRoute(f"{name} is offered by several groups: set {GROUP_ARGUMENT} to one of {', '.join(offering)}")
        return Route(offering[0], name, arguments) if offering else None
    asked = value(fields.pop(GROUP_ARGUMENT))
    if isinstance(asked, str) and (asked in offering or (not offering and asked in groups)):
        return Route(asked, name, raw(fields))
    if not offering:
        return None
    return NoRoute(f"{name} is offered by {', '.join(offering)}; {GROUP_ARGUMENT} must be one of these")


def _prefixed(group: str, tool: Tool) -> Mapping[str, object]:
    described = value(tool.entry.get("description"))
    text = f"{described} (group {group})" if isinstance(described, str) and described else f"(group {group})"
    schema = tool.entry.get("inputSchema")
    return {
        **tool.entry,
        "name": group + SEPARATOR + tool.name,
        "description": text,
        "inputSchema": schema if is_object(schema) else _EMPTY_SCHEMA,
    }


def _flat(tool: Tool, offering: Sequence[str]) -> Mapping[str, object]:
    given = taken_apart(tool.entry.get("inputSchema")) or {}
    schema: dict[str, object] = {**_EMPTY_SCHEMA, **given}
    whose = {
        "type": "string",
        "enum": list(offering),
        "description": "The group whose tool is called.",
    }
    schema["properties"] = {**_properties(tool.entry), GROUP_ARGUMENT: whose}
    if len(offering) > 1:
        required = value(given.get("required"))
        schema["required"] = [*(required if isinstance(required, list) else []), GROUP_ARGUMENT]
    return {**tool.entry, "name": tool.name, "inputSchema": schema}


def _properties(entry: Fields) -> Fields:
    schema = taken_apart(entry.get("inputSchema")) or {}
    return taken_apart(schema.get("properties")) or {}


def _once(tools: Sequence[Tool]) -> Iterable[Tool]:
    seen: set[str] = set()
    for tool in tools:
        if tool.name not in seen:
            seen.add(tool.name)
            yield tool

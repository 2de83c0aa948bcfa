"""The decisions of the merge: names, events, headers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.rules.mcp import messages, protocol
from appliance.rules.mcp.events import Event, Events, EventTooLarge
from appliance.rules.mcp.naming import (
    GROUP_ARGUMENT,
    SHOWN_NAMES,
    Merged,
    NoRoute,
    Route,
    Tool,
    merge,
    route,
    tools_of,
)
from appliance.rules.mcp.params import param_headers

OWN = ({"name": "serve_status", "description": "", "inputSchema": {}},)


def tool(name: str, **entry: Any) -> Tool:
    (made,) = tools_of([messages.raw({"name": name, **entry})])
    return made


def merged(naming: str, **groups: Any) -> Merged:
    lists = [
        (group, [tool(name) if isinstance(name, str) else name for name in names]) for group, names in groups.items()
    ]
    return merge(lists, naming, OWN)


def entries(of: Merged) -> list[Any]:
    return json.loads(msgspec.json.encode(of.entries))


# -- names --------------------------------------------------------------------------------------

_NAME = st.text("ab_", min_size=1, max_size=4)
_GROUPS = st.dictionaries(_NAME, st.lists(_NAME, max_size=4), max_size=4)


@settings(deadline=None)
@given(_GROUPS, st.sampled_from(["prefix", "flat"]))
def test_what_is_listed_leads_to_one_tool_of_one_group(groups: dict[str, list[str]], naming: str) -> None:
    listed = merged(naming, **groups)
    assert len(set(listed.names)) == len(listed.names)
    reached = set()
    for name in listed.names[1:]:
        offering = listed.flat.get(name, ())
        arguments = messages.raw({"x": 1})
        if naming == "flat" and len(offering) > 1:
            assert isinstance(route(listed, groups, name, arguments), NoRoute)
        for group in offering if naming == "flat" else ("",):
            given_ = messages.raw({"x": 1, GROUP_ARGUMENT: group}) if group else arguments
            found = route(listed, groups, name, given_)
            assert isinstance(found, Route)
            assert found.tool in groups[found.group]
            assert messages.value(found.arguments) == {"x": 1}
            assert not group or found.group == group
            assert (found.group, found.tool) not in reached
            reached.add((found.group, found.tool))
    dropped = {(row.group, row.tool) for row in listed.dropped}
    assert reached | dropped == {(group, name) for group, names in groups.items() for name in names}
    assert not reached & dropped


@settings(deadline=None)
@given(_GROUPS, st.sampled_from(["prefix", "flat"]))
def test_either_form_may_be_called(groups: dict[str, list[str]], naming: str) -> None:
    listed = merged(naming, **groups)
    for group, names in groups.items():
        for name in names:
            if listed.prefixed.get(f"{group}__{name}") == (group, name) and not (
                naming == "flat" and f"{group}__{name}" in listed.flat
            ):
                assert route(listed, groups, f"{group}__{name}", None) == Route(group, name, None)


def test_prefixed_entries_keep_all_but_name_and_description() -> None:
    full = tool(
        "add",
        description="Adds.",
        inputSchema={"type": "object", "properties": {"a": {"type": "string", "x-mcp-header": "A"}}},
        outputSchema={"type": "object"},
        annotations={"readOnlyHint": True},
        later={"kept": 1},
    )
    own, first, second = entries(merged("prefix", g=[full, "bare"]))
    assert own["name"] == "serve_status"
    assert first == {**json.loads(msgspec.json.encode(full.entry)), "name": "g__add", "description": "Adds. (group g)"}
    assert second == {
        "name": "g__bare",
        "description": "(group g)",
        "inputSchema": {"type": "object", "properties": {}},
    }


def test_flat_entries_gain_the_group_and_require_it_where_it_matters() -> None:
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
    _, shared, alone = entries(
        merged("flat", a=[tool("add", description="First.", inputSchema=schema), "one"], b=["add"])
    )
    assert shared["description"] == "First."
    assert shared["inputSchema"]["required"] == ["a", "__group"]
    assert shared["inputSchema"]["properties"]["__group"]["enum"] == ["a", "b"]
    assert shared["inputSchema"]["additionalProperties"] is False
    assert "required" not in alone["inputSchema"]
    assert alone["inputSchema"]["properties"]["__group"]["enum"] == ["a"]


def test_names_that_are_taken_are_dropped_and_say_whose_they_are() -> None:
    clash = merged("prefix", a=["b__c"], a__b=["c"])
    assert clash.names == ["serve_status", "a__b__c"]
    assert [(row.group, row.tool, row.reason) for row in clash.dropped] == [
        ("a__b", "c", "a__b__c is a tool of group a")
    ]
    claims = tool("t", inputSchema={"type": "object", "properties": {"__group": {}}})
    reserved = merged("flat", a=["serve_status", claims])
    assert reserved.names == ["serve_status"]
    assert [row.reason for row in reserved.dropped] == [
        "serve_status is a tool of the router",
        "it has an argument __group of its own",
    ]
    # with its group's name before it, such a tool is whole: its own argument is left alone
    found = route(merged("prefix", a=[claims]), ["a"], "a__t", messages.raw({"__group": "mine"}))
    assert found == Route("a", "t", messages.raw({"__group": "mine"}))


def test_a_group_whose_list_is_not_known_can_be_called() -> None:
    nothing = merged("prefix")
    assert route(nothing, ["a", "a__b"], "a__b__c", None) == Route("a__b", "c", None)
    assert route(nothing, ["a"], "t", messages.raw({"__group": "a"})) == Route("a", "t", messages.raw({}))
    for name in ("a__", "a", "__x", "b__c"):
        assert isinstance(route(nothing, ["a"], name, None), NoRoute)


def test_a_refusal_names_what_there_is_within_bounds() -> None:
    many = merged("prefix", g=[f"t{n}" for n in range(1000)])
    refused = route(many, ["g"], "x", None)
    assert isinstance(refused, NoRoute)
    assert refused.text.startswith("There is no tool x. Tools: serve_status, g__t0, ")
    assert refused.text.endswith(f" and {1001 - SHOWN_NAMES} more")


def test_entries_that_are_no_tools_are_left_out() -> None:
    raws = [messages.raw(entry) for entry in ({}, {"name": 3}, {"name": ""}, "x", None, {"name": "t"})]
    assert [made.name for made in tools_of(raws)] == ["t"]


# -- events --------------------------------------------------------------------------------------

_LINES = st.sampled_from(
    [
        "data: a",
        "data:b",
        "data",
        "data: ü",
        "event: message",
        "event: other",
        "id: 7",
        "retry: 50",
        ": ping",
        "x: y",
        "",
    ]
)


@settings(deadline=None)
@given(st.lists(st.tuples(_LINES, st.sampled_from(["\n", "\r\n", "\r"])), max_size=30), st.data())
def test_events_are_the_same_however_they_are_cut(lines: list[tuple[str, str]], data: st.DataObject) -> None:
    stream = "".join(line + end for line, end in lines).encode() + b"\n\n"
    # LF after CR is one line end, so the whole is not what the pairs say: it is its own measure
    whole = Events(1000).feed(stream)
    pieces, rest = [], stream
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    cutter = Events(1000)
    assert [event for piece in pieces for event in cutter.feed(piece)] == whole
    cutter = Events(1000)
    assert [event for byte in stream for event in cutter.feed(bytes([byte]))] == whole


def test_what_events_hold() -> None:
    stream = b"\xef\xbb\xbf: hi\n\nid: 1\nretry: 9\ndata:\n\nevent: message\r\ndata: a\r\ndata: b\r\n\r\ndata: left"
    assert Events(100).feed(stream) == [Event(b"", id="1", retry_ms=9), Event(b"a\nb")]


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 200, b"data: x\n" * 40, b"data: " + b"x" * 150 + b"\n\n"])
def test_events_are_bounded(piece: bytes) -> None:
    with pytest.raises(EventTooLarge):
        Events(100).feed(piece)


# -- headers --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.text(max_size=20) | st.sampled_from(["=?base64?YQ==?=", " a", "a ", "=?base64?", "a\r\nb"]))
def test_any_text_survives_a_header(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    value = protocol.header_value(text)
    assert protocol.header_text(value) == text
    assert value.isascii() and value.isprintable() and value == value.strip()


@pytest.mark.parametrize("value", ["=?base64?!?=", "=?base64?YR==?=", "=?base64?/w==?=", "=?base64?YQ?="])
def test_marks_that_hold_nothing(value: str) -> None:
    assert protocol.header_text(value) is None


def test_headers_that_repeat_arguments() -> None:
    schema = {
        "properties": {
            "a": {"type": "string", "x-mcp-header": "First"},
            "b": {"type": "boolean", "x-mcp-header": "B"},
            "n": {"type": "integer", "x-mcp-header": "N"},
            "in": {"type": "object", "properties": {"c": {"type": "string", "x-mcp-header": "C"}}},
            "bad": {"type": "string", "x-mcp-header": "not a token"},
            "list": {"type": "array", "x-mcp-header": "L"},
        }
    }
    given_ = {"a": "hé", "b": True, "n": 3, "in": {"c": "x"}, "bad": "x", "list": [1], "other": 1}
    assert param_headers(schema, given_) == {
        "mcp-param-first": "=?base64?aMOp?=",
        "mcp-param-b": "true",
        "mcp-param-n": "3",
        "mcp-param-c": "x",
    }
    assert param_headers(schema, {"a": None}) == {}
    for odd in (None, [], {"properties": 3}, {"properties": {"a": 3}}):
        assert param_headers(odd, given_) == {}
        assert param_headers(schema, odd) == {}


def test_numbers_pass_as_they_are_written() -> None:
    numbers = b'{"n":1e2,"big":123456789012345678901234567890}'
    params = messages.read(b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"arguments":' + numbers + b"}}").params
    assert params is not None
    assert numbers in messages.request(1, "tools/call", params)

"""The merged list of tools in memory: pages, times, groups that come, go, hang and share names."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from appliance.facts.mcp import McpSettings
from tests.toolservers.scripted import Server, response, said, scene

ERAS = ("modern", "handshake")


async def test_all_pages_are_walked_and_circles_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    paged, circle = Server("modern", [f"t{n}" for n in range(7)]), Server("modern", ["a"])
    paged.per_page = 2

    def always(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        if body["method"] != "tools/list":
            return None
        return said(body["id"], {"tools": circle.tools, "nextCursor": "again"})

    circle.before = always
    async with scene(monkeypatch, {"c": circle, "p": paged}) as here:
        assert await here.names() == ["serve_status", "c__a", *(f"p__t{n}" for n in range(7))]
    assert len(circle.asked("tools/list")) == 2
    assert len(paged.asked("tools/list")) == 4


async def test_pages_without_an_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Server("modern")

    def next_page(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        if body["method"] != "tools/list":
            return None
        number = int(body["params"].get("cursor", 0))
        return said(body["id"], {"tools": [{"name": f"t{number}"}], "nextCursor": str(number + 1)})

    endless.before = next_page
    async with scene(monkeypatch, {"g": endless}) as here:
        assert len(await here.names()) == 101


async def test_a_list_is_asked_for_once_within_its_time(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    server = Server("modern")
    async with scene(monkeypatch, {"g": server}) as here:
        await here.names()
        await trio.sleep(59)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(here.names)
        assert len(server.asked("tools/list")) == 1
        await trio.sleep(2)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(here.names)
        assert len(server.asked("tools/list")) == 2


async def test_a_hung_group_costs_the_others_its_bound_once_and_nothing_later(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    hung, well = Server("modern"), Server("modern")
    hung.hung = True
    with capture_logs() as logs:
        async with scene(monkeypatch, {"a": hung, "b": well}) as here:
            assert await here.call("b__add") == '["add", null]'
            assert trio.current_time() == 0  # calls of others do not wait at all
            assert await here.names() == ["serve_status", "b__add"]
            assert trio.current_time() == 10
            for _ in range(5):
                assert await here.names() == ["serve_status", "b__add"]
            assert trio.current_time() <= 10 + 5 * 0.5
            for _ in range(3):  # failing again is not told again
                await trio.sleep(11)
                await here.names()
            hung.hung = False
            await trio.sleep(20)
            assert await here.names() == ["serve_status", "a__add", "b__add"]
    told = [line["event"] for line in logs if line.get("group") == "a"]
    assert told == ["mcp_tools_fetch_failed", "mcp_tools_fetched_again"]


async def test_groups_that_are_down_or_talk_nonsense_contribute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nonsense, locked = Server(), Server()
    nonsense.before = lambda *_: response(200, b"<html>hello</html>", content_type="text/html")
    locked.before = lambda *_: response(401)
    servers = {"down": Server(), "locked": locked, "nonsense": nonsense, "well": Server()}
    async with scene(monkeypatch, servers) as here:
        gone = servers.pop("down")
        del gone
        sources = here.merge._sources
        monkeypatch.setattr(here.merge, "_sources", lambda: [*sources(), type(sources()[0])("down", "http://down/mcp")])
        assert await here.names() == ["serve_status", "well__add"]
        errors = {row["group"]: row["error"] for row in here.merge.rows()}
        assert errors["well"] is None
        assert errors["down"] == "no connection: refused"
        assert "401" in str(errors["locked"])
        assert "nonsense" in errors and "<html>" in str(errors["nonsense"])
        assert await here.call("down__add") == (
            "failed",
            "Group down did not answer: no connection: refused. Nothing was sent.",
        )


async def test_groups_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Server(), Server("modern", ["sub"])
    servers, hidden = {"a": first}, set[str]()
    async with scene(monkeypatch, servers, hidden=hidden) as here:
        assert await here.names() == ["serve_status", "a__add"]
        servers["b"] = second
        assert await here.names() == ["serve_status", "a__add", "b__sub"]
        hidden.add("a")
        assert await here.names() == ["serve_status", "b__sub"]
        await trio.testing.wait_all_tasks_blocked()
        assert (first.made, first.sessions) == (1, set())  # ended when the group went
        told = await here.call("a__add")
        assert told == ("failed", "There is no tool a__add. Tools: serve_status, b__sub")
        hidden.clear()
        assert await here.call("a__add") == '["add", null]'
        assert await here.names() == ["serve_status", "a__add", "b__sub"]


# -- our own tools, and names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modern", [True, False])
async def test_serve_status_is_the_status_document(monkeypatch: pytest.MonkeyPatch, modern: bool) -> None:
    async with scene(monkeypatch, {}) as here:
        assert json.loads(await here.call("serve_status", modern=modern)) == {"models": {"m": 1}}


async def test_flat_names_and_groups_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = {"a": Server(tools=["add", "serve_status"]), "b": Server("modern", ["add", "sub"])}
    with capture_logs() as logs:
        async with scene(monkeypatch, servers, McpSettings(naming="flat")) as here:
            # a name without its list: asked for first
            assert await here.call("sub", {"x": 1}) == '["sub", {"x": 1}]'
            assert await here.names() == ["serve_status", "add", "sub"]
            assert await here.call("add", {"__group": "b", "x": 1}) == '["add", {"x": 1}]'
            assert await here.call("b__add", {"x": 2}) == '["add", {"x": 2}]'
            assert await here.call("add", {"x": 1}) == (
                "failed",
                "add is offered by several groups: set __group to one of a, b",
            )
            assert await here.call("add", {"__group": "c"}) == (
                "failed",
                "add is offered by a, b; __group must be one of these",
            )
            assert json.loads(await here.call("serve_status")) == {"models": {"m": 1}}
    assert [call["arguments"] for call in servers["b"].ran] == [{"x": 1}, {"x": 1}, {"x": 2}]
    assert servers["a"].ran == []
    dropped = [line for line in logs if line["event"] == "mcp_tool_dropped"]
    assert [(line["group"], line["tool"]) for line in dropped] == [("a", "serve_status")]

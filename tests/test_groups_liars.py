"""Daemons and engines that lie: what they say costs bounded time, reaches no address of this machine, and leaves the
groups of honest ones alone."""

from __future__ import annotations

import ipaddress
import json
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from appliance.groups import groups as groups_module
from appliance.groups.pace import REST, Pace
from appliance.rules.groups import skim
from appliance.rules.groups.daemons import MAKE_ROOM_S, MOST_WATCHED, Daemons
from appliance.rules.groups.merge import MOST_CANDIDATES, merge
from appliance.rules.groups.once import MOST_LINES, Allowance
from appliance.rules.groups.reception import Heard
from appliance.rules.groups.sources import Sources, is_one_of
from appliance.rules.groups.views import MOST_ADDRESSES, MOST_NAME, read_view
from tests.fake_daemon import engine_at, fake_daemon
from tests.fake_engine import fake_engine, says, streamed
from tests.groups_scene import scene, until
from tests.test_groups_door import body_of, found, served, url_of

OWN = [ipaddress.ip_network("10.0.0.0/24"), ipaddress.ip_network("127.0.0.0/8")]
LOCAL = Sources(["local"])


def groups_of(names: list[str], service: Any) -> dict[str, Any]:
    row = {"node_ip": "127.0.0.1", "alive": True, "services": {"openai": service}}
    return {name: {"agents": {"a": row}} for name in names}


def document(groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"node_id": "N", "node_ip": "10.0.0.1", "addrs": ["10.0.0.1"], "groups": groups, **more}


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


# -- what is read of a document ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"groups":{},"unread":[' + b",".join([b"[]"] * 300_000) + b"]}",
        b'{"groups":{"g":{"agents":{"a":{"services":[' + b",".join([b"[]"] * 300_000) + b"]}}}}}",
        b'{"groups":{"g":{"agents":[' + b",".join([b"{}"] * 300_000) + b"]}}}",
        b'{"groups":{' + b",".join(b'"g%d":{}' % i for i in range(60_000)) + b"}}",
        b'{"node_id":"' + b"x" * 900_000 + b'","addrs":["' + b"y" * 900_000 + b'"],"groups":{}}',
    ],
)
def test_of_a_huge_document_little_is_kept(body: bytes) -> None:
    assert len(json.dumps(skim.document(body))) < 60_000


def test_rows_are_bounded_over_all_groups() -> None:
    agents = {f"a{i}": {"alive": True} for i in range(500)}
    view = read_view(skim.document(dumped(document({f"g{i}": {"agents": agents} for i in range(20)}))))
    assert sum(len(group.agents) for group in view.groups.values()) == skim.MOST_AGENTS


@pytest.mark.parametrize("body", [b"", b"{", b"<html>", b"[" * 100_000 + b"]" * 100_000, b"\xff", b'{"a":NaN}'])
def test_what_is_no_json(body: bytes) -> None:
    with pytest.raises(skim.NotJson):
        skim.document(body)
    with pytest.raises(skim.NotJson):
        skim.entries(body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(["node_id", "addrs", "peers", "groups", "appliance", "agents", "actors", "services"]), _JSON)
def test_an_odd_value_anywhere_is_left_out(where: str, value: Any) -> None:
    honest = groups_of(["ok"], {"port": 8, "path": "/v1"})
    odd = document({"odd": {where: value, "agents": {"a": {where: value}}}, **honest}) | (
        {} if where == "groups" else {where: value}
    )
    assert "ok" in read_view(skim.document(dumped(odd))).groups


def test_the_same_is_read_as_of_the_whole_document() -> None:
    whole = document(
        groups_of(["a", "b"], {"port": 8, "path": "/v1", "note": "n", "provider": "vllm"}),
        peers={"N2": {"node_ip": "10.0.0.2", "addrs": ["10.0.0.2"], "http_port": 6380, "probes": [1, 2]}},
        appliance={"control": {"much": ["x" * 9000]}, "shards": [{"replica": "b", "more": 1}]},
    )
    assert read_view(skim.document(dumped(whole))) == read_view(whole)


def test_entries_of_an_engine_are_bounded() -> None:
    rows = [{"id": f"m{i}", "meta": "x" * 9000} for i in range(1200)]
    found = skim.entries(dumped({"data": [7, {"id": 1}, {"id": "deep", "x": "y" * 99_000}, *rows]}))
    assert len(dumped(found)) < 2 * skim.MOST_MODEL_BYTES
    assert found[0] == {"id": "deep", "object": "model"}
    assert found[1] == rows[0]
    assert len(found) == skim.MOST_MODELS - 2
    assert found[-1] == {"id": "m996", "object": "model"}


def test_no_text_of_a_document_can_move_a_cursor_or_fill_a_page() -> None:
    ugly = "a\x1b[2J\n\u202e" + "b" * 5000
    row = {"node_ip": ugly, "alive": True, "provider": ugly, "service_notes": {"openai": ugly}, "services": {}}
    row["services_ports"] = {"openai": {"port": 8, "path": "/v1"}}
    view = read_view(document({"g": {"agents": [row]}}, addrs=[ugly] * 5000, node_id=ugly))
    (agent,) = view.groups["g"].agents
    assert agent.openai is not None
    for text in (agent.node_ip, agent.openai.note, agent.openai.provider, view.node_id, *view.addrs):
        assert text.isprintable()
        assert len(text) <= MOST_NAME
    assert len(view.addrs) == MOST_ADDRESSES


# -- addresses that are not the daemon's -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:6391/v1",
        "http://localhost:6391/v1",
        "http://LOCALHOST.:6391/v1",
        "http://[::1]:6391/v1",
        "http://[::ffff:127.0.0.1]:6391/v1",
        "http://127.1:6391/v1",
        "http://0x7f000001:6391/v1",
        "http://2130706433:6391/v1",
        "http://169.254.169.254/latest",
        "http://[fe80::1]:8000/v1",
        "http://224.0.0.1:8000/v1",
    ],
)
@pytest.mark.parametrize("kind", ["openai", "mcp"])
def test_another_nodes_document_leads_to_no_address_of_this_machine(url: str, kind: str) -> None:
    row = {"node_ip": "10.0.0.1", "alive": True, "services": {kind: url}}
    (group,) = merge({"10.0.0.1:6380": read_view(document({"g": {"agents": {"a": row}}}))}, LOCAL, OWN).values()
    assert (group.candidates, group.mcp) == ((), "")


def test_what_a_daemon_of_this_machine_says_of_loopback_is_meant() -> None:
    row = {"node_ip": "127.0.0.1", "alive": True, "services": {"openai": "http://127.0.0.1:8/v1", "mcp": {"port": 9}}}
    (group,) = merge({"127.0.0.1:6380": read_view(document({"g": {"agents": {"a": row}}}))}, LOCAL, OWN).values()
    assert (group.candidates, group.mcp) == (("http://127.0.0.1:8/v1",), "http://127.0.0.1:9")
    far = merge({"10.0.0.1:6380": read_view(document({"g": {"agents": {"a": row}}}))}, LOCAL, OWN)["g"]
    assert (far.candidates, far.mcp) == ((), "")
    assert far.unreachable == (
        "announced http://127.0.0.1:8/v1 on node 127.0.0.1, and no other machine reaches that address"
    )


def test_so_many_addresses_of_one_group_are_tried() -> None:
    addrs = [f"10.0.0.{i}" for i in range(1, 60)]
    row = {"node_ip": "10.0.0.1", "alive": True, "services": {"openai": {"port": 8}}}
    (group,) = merge(
        {"10.0.0.1:6380": read_view(document({"g": {"agents": {"a": row}}}, addrs=addrs))}, LOCAL, OWN
    ).values()
    assert len(group.candidates) == MOST_CANDIDATES


@pytest.mark.parametrize(
    ("listening", "there", "here", "ours"),
    [
        ("0.0.0.0", "10.0.0.5", "10.0.0.5", True),
        ("0.0.0.0", "10.0.0.6", "10.0.0.5", False),
        ("0.0.0.0", "127.0.0.2", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "10.0.0.5", "10.0.0.5", False),
        ("::", "::ffff:10.0.0.5", "::ffff:10.0.0.5", True),
        ("10.0.0.5", "10.0.0.5", "10.0.0.9", True),
    ],
)
def test_where_this_router_listens(listening: str, there: str, here: str, ours: bool) -> None:
    assert is_one_of([(listening, 6381)], (there, 6381), here) is ours
    assert not is_one_of([(listening, 6391)], (there, 6381), here)


async def test_a_group_that_is_announced_at_the_router_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would serve all models of the router, its own included, for ever, and send their requests round and round."""
    async with fake_engine(says(*streamed(b"{}"))) as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine), actors=["running"])
        async with found(monkeypatch, tmp_path, daemon) as door:
            await served(door)
            host, port = door.app.sockets.door[0].getsockname()[:2]
            daemon.group("mirror", openai=f"http://{host}:{port}/v1", actors=["running"])
            await daemon.tell()

            async def why() -> Any:
                row = (await body_of(door, "/status.json"))["groups"].get("mirror") or {}
                return row.get("why_not")

            with trio.fail_after(10):
                while "this router itself" not in str(await why()):  # noqa: ASYNC110  the door is asked
                    await trio.sleep(0.02)
            daemon.groups.pop(0)
            await daemon.tell()
            await door.until("the model is gone", lambda: not door.app.gateway.table.find("llama"))


# -- many of them ------------------------------------------------------------------------------------------------------


async def test_groups_of_a_liar_take_no_place_of_an_honest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "MOST_GROUPS", 20)
    async with engine_at("m") as engine, fake_daemon() as honest, fake_daemon(node_id="liar") as liar:
        honest.group("z", openai=engine.url)
        async with scene(daemons=[honest.address, liar.address]) as found:
            await found.serving("m")
            for i in range(50):
                liar.group(f"a{i}", mcp="http://127.0.0.1:1/mcp")
            await liar.tell()
            await until("the table is full", lambda: len(found.status["groups"]) == 20)
            assert found.models == ["m"]


async def test_two_thousand_groups_leave_the_process_to_its_requests() -> None:
    """Each probe that fails used to have all groups merged again: minutes in which nothing else ran."""
    async with fake_daemon() as liar:
        body = dumped(
            {"node_id": "N1", "groups": groups_of([f"g{i}" for i in range(2000)], {"host": "127.0.0.1", "port": 1})}
        )
        liar.answer = lambda: body
        async with scene(daemons=[liar.address], probe_interval_s=5.0) as found:
            await until("they are known", lambda: len(found.status["groups"]) == skim.MOST_GROUPS)
            settled = 0
            settle = found.groups._settle_now

            def counted() -> None:
                nonlocal settled
                settled += 1
                settle()

            found.groups._settle_now = counted  # type: ignore[method-assign]
            await until(
                "all are probed",
                lambda: all(row["why_not"] != "not probed yet" for row in found.status["groups"].values()),
            )
            assert settled < 50


def test_whoever_never_answers_makes_room() -> None:
    daemons = Daemons((), LOCAL, 0.0)
    for i in range(MOST_WATCHED):
        daemons.announced(Heard(f"liar{i}", (f"10.0.{i // 250}.{i % 250}:6380",)), 0.0)
    real, *liars = daemons.all
    daemons.read(real, read_view(document({}, node_id=real.node_id)), 1.0)
    daemons.announced(Heard("late", ("10.0.9.9:6380",)), 1.0)
    assert "late" not in {each.node_id for each in daemons}  # none of them has failed yet
    for each in liars:
        daemons.failed(each, "refused")
    daemons.announced(Heard("late", ("10.0.9.9:6380",)), MAKE_ROOM_S - 1)
    assert "late" not in {each.node_id for each in daemons}  # they may be starting
    daemons.announced(Heard("late", ("10.0.9.9:6380",)), MAKE_ROOM_S)
    assert "late" in {each.node_id for each in daemons}
    assert real in daemons.all
    assert len(daemons.all) == MOST_WATCHED


async def test_work_is_followed_by_rest(autojump_clock: trio.testing.MockClock) -> None:
    pace = Pace()
    assert pace.free
    with pace.work():
        begun = time.perf_counter()
        while time.perf_counter() - begun < 0.01:
            sum(range(100))
    assert not pace.free
    at = trio.current_time()
    await pace.turn()
    assert trio.current_time() - at >= REST * 0.01


async def test_names_of_models_that_no_log_could_hold() -> None:
    async with engine_at("ok", "two\nlines", "\x1b[2J", "") as engine, fake_daemon() as daemon:
        daemon.group("g", openai=engine.url)
        async with scene(daemons=[daemon.address]) as found:
            await found.serving("ok")


def test_changes_are_told_while_there_are_not_too_many() -> None:
    lines = Allowance()
    assert sum(lines.take(0.0) for _ in range(10_000)) == MOST_LINES
    assert lines.passed_over == 10_000 - MOST_LINES
    assert sum(lines.take(i * 0.01) for i in range(6000)) == 29  # a minute, and one for two seconds
    assert lines.take(1e9)


async def test_groups_that_come_and_go_without_end_fill_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.rules.groups.once.MOST_LINES", 6)
    names = [f"m{i:03}" for i in range(100)]
    async with engine_at(*names) as engine, fake_daemon() as daemon, scene(daemons=[daemon.address]) as found:
        for turn in range(12):
            daemon.groups.clear()
            daemon.group(f"g{turn}", openai=engine.url)
            await daemon.tell()
            await until("it serves", lambda turn=turn: found.why(f"g{turn}") == "")  # type: ignore[misc]
        changes = [line for line in found.log if line["event"] in ("group serves", "group is gone")]
        assert 4 <= len(changes) <= 8
        assert changes[0]["models"].count(",") == 20

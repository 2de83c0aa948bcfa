"""Documents of every shape, merged; the gates in their order; which daemons are watched; what is published."""

from __future__ import annotations

import copy
import ipaddress
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts.groups import Announced, Registered, Service, View
from appliance.rules.groups.daemons import MOST_ADDRESSES, Daemons
from appliance.rules.groups.gate import (
    NO_ACTORS,
    NO_ENDPOINT,
    NOT_PROBED,
    PROBE_STALE,
    Standing,
    for_clients,
    why_not,
)
from appliance.rules.groups.merge import merge
from appliance.rules.groups.published import publish
from appliance.rules.groups.reception import Heard
from appliance.rules.groups.registered import Unregistered, registered
from appliance.rules.groups.sources import Sources
from appliance.rules.groups.views import NotAView, read_view

OWN = [ipaddress.ip_network("10.0.0.0/24")]
ALL = Sources(["0.0.0.0/0"])

SEED: dict[str, Any] = {
    "node_id": "N1",
    "node_ip": "10.0.0.1",
    "addrs": ["10.0.0.1", "192.168.1.11"],
    "peers": {
        "N2": {"node_ip": "10.0.0.2", "link_ip": "10.0.0.2", "addrs": ["10.0.0.2"], "http_port": 6380, "alive": True}
    },
    "groups": {
        "glm": {
            "agents": [
                {
                    "id": "glm@c0@10.0.0.1",
                    "node_ip": "10.0.0.1",
                    "alive": True,
                    "services": {"openai": "http://10.0.0.1:8000/v1", "mcp": "http://10.0.0.1:9000/mcp"},
                }
            ],
            "actors": [{"id": "ab12", "name": "w0", "node_id": "N1", "gpu_ids": [0], "state": "running", "pid": 9312}],
            "placement_groups": [],
            "gpus_total": 1,
            "gpus_used": 1,
        }
    },
    "counters": {},
}
NEW: dict[str, Any] = {
    "proto": "0.99",
    "node_id": "N1",
    "node_ip": "10.0.0.1",
    "seq": 12,
    "addrs": ["10.0.0.1", "192.168.1.11"],
    "peers": SEED["peers"],
    "groups": {
        "glm": {
            "agents": {
                "glm@c0@10.0.0.1": {
                    "node_ip": "10.0.0.1",
                    "alive": True,
                    "services": {
                        "openai": {"host": "", "port": 8000, "path": "/v1", "provider": "vllm", "note": ""},
                        "mcp": {"host": "10.0.0.1", "port": 9000, "path": "/mcp", "provider": "", "note": ""},
                    },
                }
            },
            "actors": {"a:0123": {"name": "w0", "node_id": "N1", "state": "running", "reason": ""}},
            "placement_groups": {},
            "gpus_total": 1,
            "gpus_used": 1,
        }
    },
    "clients": {},
}


def merged(*documents: dict[str, Any], sources: Sources = ALL) -> dict[str, Announced]:
    return merge({f"10.0.0.{i + 1}:6380": read_view(each) for i, each in enumerate(documents)}, sources, OWN)


def agent(**row: Any) -> dict[str, Any]:
    return {"node_ip": "10.0.0.1", "alive": True, **row}


def document(groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"node_id": "N", "node_ip": "10.0.0.1", "addrs": ["10.0.0.1"], "groups": groups, **more}


def only(group: dict[str, Any], **more: Any) -> Announced:
    return merged(document({"g": group}, **more))["g"]


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_the_older_shape() -> None:
    group = merged(SEED)["glm"]
    assert group == Announced(
        "glm", "10.0.0.1:6380", 1, 1, 1, 1, True, True, ("http://10.0.0.1:8000/v1",), mcp="http://10.0.0.1:9000/mcp"
    )


def test_the_newer_shape() -> None:
    group = merged(NEW)["glm"]
    assert group == Announced(
        "glm",
        "10.0.0.1:6380",
        1,
        1,
        1,
        1,
        False,
        True,
        ("http://10.0.0.1:8000/v1", "http://192.168.1.11:8000/v1"),
        provider="vllm",
        mcp="http://10.0.0.1:9000/mcp",
    )


@pytest.mark.parametrize(
    ("row", "service"),
    [
        ({"services": {"openai": "http://box:8000/v1"}}, Service("http://box:8000/v1")),
        ({"services": {"openai": "https://box/v1"}, "provider": "VLLM"}, Service("https://box/v1", provider="vllm")),
        ({"services": {"openai": "http://0.0.0.0:8000/v1"}}, Service("", 8000, "/v1")),
        ({"services": {"openai": "8000/v1"}}, Service("", 8000, "/v1")),
        ({"services": {"openai": "box:8000/v1"}}, Service("http://box:8000/v1")),
        ({"services_ports": {"openai": {"port": 8000, "path": "v1"}}}, Service("", 8000, "/v1")),
        (
            {"services": {}, "services_ports": {"openai": {"port": 1}}, "service_notes": {"openai": "n"}},
            Service("", 1, "", "", "n"),
        ),
        ({"services": {"openai": {"port": 8000}}}, Service("", 8000, "")),
        ({"services": {"openai": {"host": "::", "port": 8000}}}, Service("", 8000, "")),
        ({"services": {"openai": {"host": "fd00::1", "port": 8, "path": "/v1"}}}, Service("http://[fd00::1]:8/v1")),
        ({"services": {"openai": {"host": "[fd00::1]", "port": 8}}}, Service("http://[fd00::1]:8")),
        ({"services": {"openai": {"port": "8000"}}}, None),
        ({"services": {"openai": {"port": 70000}}}, None),
        ({"services": {"openai": {"port": True}}}, None),
        ({"services": {"openai": "ftp://x"}}, None),
        ({"services": {"openai": "http://me:pw@x:1"}}, None),
        ({"services": {"openai": "http://x:99999"}}, None),
        ({"services": {"openai": "http://0.0.0.0/v1"}}, None),
        ({"services": []}, None),
        ({"services": {"openai": "http://x:1/a b"}}, None),
        ({"services": {"openai": "http://x:1/v1?k=v"}}, None),
        ({"services": {"openai": "http://x y:1/v1"}}, None),
        ({"services": {"openai": {"port": 1, "path": "/v1\r\nx: y"}}}, None),
        ({"services": {"openai": {"port": 1, "path": "/v1 HTTP/1.1"}}}, None),
        ({"services": {"openai": {"port": 1, "host": "h/evil", "path": "/v1"}}}, None),
        ({}, None),
    ],
)
def test_services_of_every_form(row: dict[str, Any], service: Service | None) -> None:
    view = read_view(document({"g": {"agents": {"a": agent(**row)}}}))
    assert view.groups["g"].agents[0].openai == service


@pytest.mark.parametrize("wrong", [None, [], "x", {}, {"groups": []}, {"groups": None}])
def test_what_is_no_document(wrong: Any) -> None:
    with pytest.raises(NotAView):
        read_view(wrong)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [each for key, item in items for each in places(item, (*path, key))]


@given(st.sampled_from([SEED, NEW]), st.data())
def test_no_odd_value_hides_the_rest(whole: dict[str, Any], data: st.DataObject) -> None:
    """One value of a document is anything at all: the document is read, and other groups are what they were."""
    broken = copy.deepcopy(whole)
    broken["groups"]["other"] = copy.deepcopy(whole["groups"]["glm"])
    path = data.draw(
        st.sampled_from([each for each in places(broken) if each[:2] != ("groups", "other") and len(each) > 1])
    )
    target = broken
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = data.draw(JUNK)
    other = merged(broken)["other"]
    assert (other.agents_alive, other.actors_running, other.announces) == (1, 1, True)


@pytest.mark.parametrize("name", ["", " a", "a\nb", "x" * 201, "\x1b[31m"])
def test_names_that_no_log_could_hold(name: str) -> None:
    assert read_view(document({name: {}, "ok": {}})).groups.keys() == {"ok"}


def test_replicas_that_want_a_key_are_left_out() -> None:
    groups = {"r.1": {"agents": {"a": agent(services={"openai": "http://h:1/v1"})}}, "own": {"agents": {}}}
    own = {"control": {"url": "wss://x"}, "shards": {"r.1-0": {"replica": "r.1"}}}
    assert set(read_view(document(groups, appliance=own)).groups) == {"own"}
    assert set(read_view(document(groups, appliance={**own, "control": None})).groups) == {"r.1", "own"}


# -- many documents ----------------------------------------------------------------------------------------------------


def test_the_daemon_that_knows_most_counts() -> None:
    def says(running: int, alive: int, port: int) -> dict[str, Any]:
        agents = {f"a{i}": agent(services={"openai": f"http://h:{port}/v1"}) for i in range(alive)}
        actors = {f"x{i}": {"state": "running"} for i in range(running)}
        return document({"g": {"agents": agents, "actors": actors}})

    assert merged(says(0, 3, 1), says(1, 1, 2))["g"].candidates == ("http://h:2/v1",)
    assert merged(says(1, 1, 1), says(1, 2, 2))["g"].candidates == ("http://h:2/v1",)
    assert merged(says(1, 1, 1), says(1, 1, 2))["g"].candidates == ("http://h:1/v1",)
    assert merged(says(1, 1, 1), says(1, 1, 2))["g"].daemon == "10.0.0.1:6380"


def test_the_lexically_first_rank_serves() -> None:
    group = only(
        {
            "agents": {
                "b": agent(services={"openai": "http://h:9/v1", "mcp": "http://h:1/mcp"}, provider="x"),
                "a": agent(services={"openai": "http://h:80/v1", "mcp": "http://h:2/mcp"}, provider="y"),
                "c": agent(services={"mcp": "http://h:0/mcp"}),
                "d": agent(services={"openai": "http://h:1/v1"}, alive=False),
            }
        }
    )
    assert (group.candidates, group.provider) == (("http://h:80/v1",), "y")
    assert group.mcp == "http://h:1/mcp"  # of an agent that serves too
    assert group.agents_alive == 3


def test_addresses_of_a_node_are_the_longest_list_that_anybody_tells() -> None:
    group = {"agents": {"a": agent(node_ip="10.0.0.2", services={"openai": {"port": 8, "path": "/v1"}})}}
    peers = {"N2": {"node_ip": "10.0.0.2", "addrs": ["192.168.1.2", "10.0.0.2", "10.0.0.2"], "http_port": 6380}}
    assert only(group).candidates == ("http://10.0.0.2:8/v1",)
    assert only(group, peers=peers).candidates == ("http://10.0.0.2:8/v1", "http://192.168.1.2:8/v1")
    first = document({"g": group}, peers=peers)
    second = {"node_ip": "10.0.0.2", "addrs": ["10.0.0.2"], "groups": {}}
    assert len(merged(first, second)["g"].candidates) == 2


def test_loopback_comes_last_and_only_where_it_is_ours() -> None:
    own = [*OWN, ipaddress.ip_network("127.0.0.0/8")]
    group = {"agents": {"a": agent(services={"openai": {"port": 8}})}}
    view = read_view(document({"g": group}, addrs=["127.0.0.1", "192.168.1.2", "10.0.0.1"]))
    (found,) = merge({"127.0.0.1:6380": view}, ALL, own).values()
    assert found.candidates == ("http://10.0.0.1:8", "http://192.168.1.2:8", "http://127.0.0.1:8")
    (found,) = merge({"10.0.0.1:6380": view}, ALL, own).values()
    assert found.candidates == ("http://10.0.0.1:8", "http://192.168.1.2:8")


def test_no_address_passes() -> None:
    group = {"agents": {"a": agent(services={"openai": {"port": 8, "path": "/v1"}})}}
    (found,) = merged(document({"g": group}), sources=Sources(["10.9."])).values()
    assert (found.candidates, found.announces) == ((), True)
    assert found.unreachable == (
        "announced port 8/v1 on node 10.0.0.1, and no address of that node passes ALLOWED_SOURCES"
    )


def test_ranks_of_our_own_agents_are_one_group() -> None:
    """Each agent of ours tells of itself alone; the one with the lexically smaller address may not serve."""
    tools = document({"g": {"agents": {"a": agent(services={"mcp": "http://h:2/mcp"})}}}, appliance={})
    serves = document({"g": {"agents": {"b": agent(services={"openai": "http://h:1/v1"})}}}, appliance={})
    (group,) = merged(tools, serves).values()
    assert (group.candidates, group.mcp, group.agents_alive) == (("http://h:1/v1",), "http://h:2/mcp", 2)
    del tools["appliance"]
    (group,) = merged(tools, serves).values()
    assert group.candidates == ()


# -- gates -------------------------------------------------------------------------------------------------------------

SERVES = Announced("g", "d", 1, 1, 1, 1, False, True, ("http://a/v1", "http://b/v1"))


def test_gates_in_order() -> None:
    """All are shut; each one opened shows the next."""
    standing = Standing(0.0)
    standing.failed([("http://a/v1", "x"), ("http://b/v1", "timeout after 3.0s")])
    group = Announced("g", "d", 1, 0, 1, 1, unreachable="no way", note="bound narrowly")
    assert why_not(group, standing, 0, 18) == "no announced OpenAI endpoint"
    group = attrs.evolve(group, announces=True)
    assert why_not(group, standing, 0, 18) == "no way"
    group = attrs.evolve(group, candidates=SERVES.candidates)
    assert why_not(group, standing, 0, 18) == "no running actors"
    group = attrs.evolve(group, actors_running=1)
    failed = "endpoint probe failed: http://a/v1: x; http://b/v1: timeout after 3.0s"
    assert why_not(group, standing, 0, 18) == f"{failed} (agent reports: bound narrowly)"
    assert why_not(attrs.evolve(group, note=""), standing, 0, 18) == failed
    standing = Standing(0.0)
    assert why_not(group, standing, 0, 18) == "not probed yet"
    standing.answered(group, "http://a/v1", {"m": {}}, 0)
    assert why_not(group, standing, 18.1, 18) == "endpoint probe stale"
    assert why_not(group, standing, 18, 18) == ""


@pytest.mark.parametrize(
    ("actors", "running", "gpus", "lists", "shut"),
    [
        (0, 0, 1, True, True),
        (0, 0, 0, True, False),
        (0, 0, 1, False, False),
        (1, 0, 0, False, True),
        (1, 0, 0, True, True),
        (2, 1, 0, True, False),
    ],
)
def test_actors(actors: int, running: int, gpus: int, lists: bool, shut: bool) -> None:
    group = attrs.evolve(SERVES, actors=actors, actors_running=running, gpus_total=gpus, list_shaped=lists)
    standing = Standing(0.0)
    standing.answered(group, "http://a/v1", {}, 0)
    assert (why_not(group, standing, 0, 18) == "no running actors") is shut


def test_the_order_of_probes() -> None:
    a, b = SERVES.candidates
    standing = Standing(0.0)
    assert standing.order(SERVES, 0, 30) == (a, b)
    standing.answered(SERVES, b, {}, 0)
    assert standing.order(SERVES, 29, 30) == (b, a)  # kept while it answers
    assert standing.order(SERVES, 30, 30) == (a, b)  # the best is tried again
    standing.answered(SERVES, b, {}, 30)
    assert standing.order(SERVES, 59, 30) == (b, a)
    standing.failed([(b, "x"), (a, "y")])
    assert standing.order(SERVES, 59, 30) == (a, b)  # cleared
    assert standing.order(attrs.evolve(SERVES, candidates=()), 59, 30) == ()


def test_a_result_for_another_address_is_none() -> None:
    standing = Standing(0.0)
    standing.answered(SERVES, "http://a/v1", {"m": {}}, 0)
    moved = attrs.evolve(SERVES, candidates=("http://c/v1",))
    standing.seen(moved, 1)
    assert why_not(moved, standing, 1, 18) == "not probed yet"
    assert standing.names == ("m",)  # what it served is known still


def test_retirement() -> None:
    standing = Standing(10.0)
    assert not standing.retired(60, 50)
    assert standing.retired(60.1, 50)
    standing.judged(SERVES, "", 100)
    assert not standing.retired(150, 50)
    standing.judged(SERVES, "no running actors", 151)
    assert standing.retired(151, 50)
    tools = Announced("g", "d", 1, mcp="http://h/mcp")
    standing.judged(tools, "no announced OpenAI endpoint", 200)
    assert not standing.retired(201, 50)
    standing.judged(attrs.evolve(tools, agents_alive=0), "no announced OpenAI endpoint", 300)
    assert standing.retired(300, 50)


# -- what is published -------------------------------------------------------------------------------------------------


def test_published() -> None:
    groups = {
        "one": attrs.evolve(SERVES, name="one", provider="llama.cpp"),
        "two": attrs.evolve(SERVES, name="two"),
        "shut": attrs.evolve(SERVES, name="shut"),
        "new": attrs.evolve(SERVES, name="new"),
        "tools": Announced("tools", "d", 1, mcp="http://h/mcp"),
    }
    standings = {name: Standing(0.0) for name in groups}
    standings["one"].answered(groups["one"], "https://h/x/v1", {"m": {"root": "r", "owned_by": "engine"}}, 0)
    standings["two"].answered(groups["two"], "http://h:8000", {}, 0)
    standings["shut"].answered(groups["shut"], "http://a/v1", {"m": {}, "n": {}}, 0)
    why = {"one": "", "two": "", "shut": "why", "new": "not probed yet", "tools": "no announced OpenAI endpoint"}
    found = publish(groups, standings, why, 7.0)
    one, two = found.endpoints
    assert (one.id, one.url, one.port, one.models, one.engine) == (
        "group:one",
        "https://h:443/x",
        443,
        ("m",),
        "llamacpp",
    )
    assert (two.url, two.models, two.engine) == ("http://h:8000", ("two",), "openai")
    assert (one.total_s, one.retries, one.announced) == (7.0, False, True)
    assert found.listed == {
        "group:one": {"m": {"root": "r", "owned_by": "one"}},
        "group:two": {"two": {"owned_by": "two"}},
    }
    assert found.gated == {"n": "why", "new": "not probed yet"}  # m is served by another


# -- daemons -----------------------------------------------------------------------------------------------------------


def test_a_seed_is_the_daemon_that_announces_itself() -> None:
    daemons = Daemons(["10.0.0.1:6380"], ALL, 0)
    (seed,) = daemons
    daemons.read(seed, View("N1"), 1)
    daemons.announced(Heard("N1", ("10.0.0.9:6380", "10.0.0.1:6380")), 2)
    (one,) = daemons
    assert (one.addresses, one.seed) == (["10.0.0.1:6380", "10.0.0.9:6380"], True)
    daemons.failed(one, "x")
    assert one.address == "10.0.0.9:6380"


def test_what_moved_is_tried_at_its_newest_address_next() -> None:
    daemons = Daemons([], ALL, 0)
    for place in range(MOST_ADDRESSES + 5):
        daemons.announced(Heard("N1", (f"10.0.0.{place}:6380",)), place)
    (one,) = daemons
    assert len(one.addresses) == MOST_ADDRESSES
    assert one.addresses[:2] == ["10.0.0.0:6380", f"10.0.0.{MOST_ADDRESSES + 4}:6380"]


def test_an_unnamed_sender_is_known_by_its_address() -> None:
    daemons = Daemons([], ALL, 0)
    for _ in range(3):
        daemons.announced(Heard("", ("10.0.0.1:6380",)), 0)
    daemons.announced(Heard("N1", ("10.0.0.1:6380",)), 0)
    assert [each.address for each in daemons] == ["10.0.0.1:6380"]


def test_two_that_are_one_node_become_one() -> None:
    daemons = Daemons(["a:1", "b:1"], ALL, 0)
    first, second = daemons
    assert daemons.read(first, View("N1"), 0)
    assert not daemons.read(second, View("N1"), 0)
    assert list(daemons) == [first]
    assert first.addresses == ["a:1", "b:1"]


def test_a_node_that_answers_in_anothers_name() -> None:
    daemons = Daemons([], ALL, 0)
    daemons.announced(Heard("N1", ("a:1", "b:1")), 0)
    (one,) = daemons
    assert not daemons.read(one, View("N2"), 0)
    assert (one.error, one.address, one.view) == ("a:1 answers as another node", "b:1", None)
    assert daemons.read(one, View("N1"), 0)


def test_a_peers_addresses() -> None:
    own = [*OWN, ipaddress.ip_network("127.0.0.0/8")]
    view = read_view(
        document(
            {},
            peers={
                "N2": {"link_ip": "127.0.0.1", "addrs": ["192.168.1.2", "10.0.0.2"], "http_port": 6380, "alive": True},
                "N3": {"node_ip": "172.16.0.1", "http_port": 6380, "alive": True},
                "N4": {"node_ip": "10.0.0.4", "alive": True},
                "N5": {"node_ip": "10.0.0.5", "http_port": 6380, "alive": False},
                "N6": {"node_ip": "10.0.0.6", "http_port": 1},
            },
        )
    )
    daemons = Daemons(["10.0.0.1:6380"], Sources(["local", "192.168.1."]), 0)
    (seed,) = daemons
    daemons.read(seed, view, 0)
    daemons.follow_peers(0, 30, own)
    assert [each.addresses for each in daemons][1:] == [
        ["10.0.0.2:6380", "192.168.1.2:6380", "127.0.0.1:6380"],
        ["10.0.0.6:1"],
    ]
    daemons = Daemons(["10.0.0.1:6380"], ALL, 0)
    (seed,) = daemons
    daemons.read(seed, view, 0)
    daemons.follow_peers(31, 30, own)
    assert len(daemons.all) == 1  # a stale document names nobody


def test_forgetting() -> None:
    daemons = Daemons(["s:1"], ALL, 0)
    daemons.announced(Heard("N1", ("a:1",)), 0)
    daemons.announced(Heard("N2", ("b:1",)), 0)
    daemons.read(daemons.all[1], View("N1"), 60)
    daemons.forget(100, 50)
    assert [each.address for each in daemons] == ["s:1", "a:1"]
    daemons.forget(111, 50)
    assert [each.address for each in daemons] == ["s:1"]


def test_documents_are_believed_for_a_while() -> None:
    daemons = Daemons(["s:1"], ALL, 0)
    (seed,) = daemons
    assert daemons.views(0, 30) == {}
    daemons.read(seed, View("N1"), 5)
    daemons.failed(seed, "x")
    assert daemons.views(35, 30) == {"s:1": View("N1")}
    assert daemons.views(35.1, 30) == {}
    assert daemons.rows(36)["s:1"] == {
        "connected": True,
        "age_s": 31,
        "error": "x",
        "node_id": "N1",
        "seed": True,
        "alternates": None,
    }


# -- what an agent registers -------------------------------------------------------------------------------------------


def service(host: str, port: int, path: str, provider: str = "") -> dict[str, object]:
    return {"host": host, "port": port, "path": path, "provider": provider, "note": ""}


def test_registered() -> None:
    assert registered({}) is None
    assert registered({"MENTAT_GROUP": " g "}) == Registered("g")
    whole = registered(
        {
            "MENTAT_GROUP": "g",
            "MENTAT_OPENAI_API": "8000/v1",
            "MENTAT_MCP_API": "http://10.0.0.1:9000/mcp",
            "MENTAT_MODEL_PROVIDER": "VLLM",
        }
    )
    assert whole == Registered("g", service("", 8000, "/v1", "vllm"), service("10.0.0.1", 9000, "/mcp"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8000", service("", 8000, "")),
        ("http://0.0.0.0:8000/v1/", service("", 8000, "/v1")),
        ("http://[::]:8000/v1", service("", 8000, "/v1")),
        ("http://[fd00::1]:8000/v1", service("[fd00::1]", 8000, "/v1")),
        ("http://box:8000/v1", service("box", 8000, "/v1")),
    ],
)
def test_registered_addresses(text: str, found: dict[str, object]) -> None:
    made = registered({"MENTAT_GROUP": "g", "MENTAT_OPENAI_API": text})
    assert made is not None and made.openai == found


@pytest.mark.parametrize("text", ["http://box/v1", "https://box:1/v1", "box", "99999/v1", "http://box:1/?x", "0/v1"])
def test_addresses_that_no_router_could_use(text: str) -> None:
    with pytest.raises(Unregistered, match="MENTAT_OPENAI_API: expected a port and a path"):
        registered({"MENTAT_GROUP": "g", "MENTAT_OPENAI_API": text})


@pytest.mark.parametrize("environ", [{"MENTAT_OPENAI_API": "8000/v1"}, {"MENTAT_GROUP": "a__b"}])
def test_variables_that_make_no_sense_together(environ: dict[str, str]) -> None:
    with pytest.raises(Unregistered, match="MENTAT_GROUP"):
        registered(environ)


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("endpoint probe failed: http://10.0.0.1:8000/v1: timeout after 3.0s", "endpoint probe failed"),
        (
            "announced port 8000/v1 on node 10.0.0.1, and no address of that node passes ALLOWED_SOURCES",
            "the router does not reach the address it announces",
        ),
        (
            "announced http://127.0.0.1:8000/v1 on node 10.0.0.1, and no other machine reaches that address",
            "the router does not reach the address it announces",
        ),
        *((why, why) for why in (NO_ENDPOINT, NO_ACTORS, NOT_PROBED, PROBE_STALE, "it is loading on node-a", "")),
    ],
)
def test_clients_are_told_the_gate_and_no_address(why: str, told: str) -> None:
    assert for_clients(why) == told

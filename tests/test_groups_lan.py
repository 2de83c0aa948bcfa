"""Our own agents and router on a network of their own: found by broadcast, lost with a cable, found again elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lan import Host, lan, until

QUICK = {"PROBE_INTERVAL_S": "0.5", "PROBE_TIMEOUT_S": "0.7", "PROBE_FRESH_S": "4", "PROBE_PROMOTE_S": "3"}
SECRET = "s3cret"


@pytest.fixture
def net(tmp_path: Path) -> Iterator[dict[str, Host]]:
    with lan(tmp_path, "router", "a", "b") as hosts:
        yield hosts


def models(router: Host) -> set[str]:
    return {row["id"] for row in router.get("/v1/models")["data"]}


def engine(host: Host, model: str) -> None:
    host.start("sim", "--host", "0.0.0.0", "--port", "8000", "--model", model)


def answers(router: Host, model: str) -> bool:
    ask = {"model": model, "stream": True, "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    status, body = router.ask("POST", "/v1/chat/completions", ask)
    return status == 200 and "data: [DONE]" in body


@pytest.mark.parametrize("secret", ["", SECRET])
def test_two_agents_are_found_by_broadcast(net: dict[str, Host], secret: str) -> None:
    router, a, b = net["router"], net["a"], net["b"]
    engine(a, "first")
    engine(b, "second")
    key = {"MENTAT_SECRET": secret}
    a.start("agent", MENTAT_GROUP="one", MENTAT_OPENAI_API="8000/v1", MENTAT_MODEL_PROVIDER="sim", **key)
    b.start("agent", "register", MENTAT_GROUP="two", MENTAT_OPENAI_API="http://0.0.0.0:8000/v1", **key)
    log = router.start("serve", **QUICK, **key)
    until("both models are listed", lambda: models(router) == {"first", "second"})
    assert answers(router, "first")
    assert answers(router, "second")
    document = router.get("/status.json")
    assert set(document["groups"]) == {"one", "two"}
    assert document["groups"]["one"]["openai"] == f"http://{a.address}:8000/v1"
    assert document["groups"]["one"]["provider"] == "sim"
    assert {f"{a.address}:6380", f"{b.address}:6380"} <= set(document["daemons"])
    assert document["verify"] is bool(secret)
    assert ("without a signature" in log.read_text()) is not bool(secret)


def test_a_cable_and_an_address(net: dict[str, Host]) -> None:
    router, a, b = net["router"], net["a"], net["b"]
    for host, model in ((a, "first"), (b, "second")):
        engine(host, model)
        host.start("agent", "register", MENTAT_GROUP=host.name, MENTAT_OPENAI_API="8000/v1")
    log = router.start("serve", **QUICK)
    until("both models are listed", lambda: models(router) == {"first", "second"})

    a.pull_the_cable()
    until("the model is gone", lambda: models(router) == {"second"})
    ask = {"model": "first", "messages": []}
    status, body = until("it is refused", lambda: router.ask("POST", "/v1/chat/completions", ask))
    assert status == 503
    assert "is not ready: endpoint probe failed" in body
    assert answers(router, "second")
    a.plug_the_cable_in()
    until("it is back", lambda: models(router) == {"first", "second"})
    assert answers(router, "first")

    moved = b.address.rpartition(".")[0] + ".99"
    b.ip("addr", "del", f"{b.address}/24", "dev", "lan0")
    b.ip("addr", "add", f"{moved}/24", "broadcast", "+", "dev", "lan0")
    until(
        "it is found at its new address",
        lambda: (
            router.get("/status.json")["groups"]["b"]["openai"] == f"http://{moved}:8000/v1"
            and models(router) == {"first", "second"}
        ),
    )
    assert answers(router, "second")
    assert log.read_text().count('event="group does not serve" group=a') <= 1


def test_another_universe_and_another_key_are_not_found(net: dict[str, Host]) -> None:
    router, a, b = net["router"], net["a"], net["b"]
    for host, model in ((a, "first"), (b, "second")):
        engine(host, model)
    a.start(
        "agent",
        "register",
        MENTAT_GROUP="one",
        MENTAT_OPENAI_API="8000/v1",
        MENTAT_UNIVERSE="blue",
        MENTAT_SECRET=SECRET,
    )
    b.start(
        "agent",
        "register",
        MENTAT_GROUP="two",
        MENTAT_OPENAI_API="8000/v1",
        MENTAT_UNIVERSE="red",
        MENTAT_SECRET="other",
    )
    red = b.start(
        "agent",
        "register",
        MENTAT_GROUP="three",
        MENTAT_OPENAI_API="8000/v1",
        APPLIANCE_AGENT__LISTEN="0.0.0.0:6390",
        MENTAT_UNIVERSE="blue",
        MENTAT_SECRET="other",
    )
    log = router.start("serve", MENTAT_UNIVERSE="blue", MENTAT_SECRET=SECRET, **QUICK)
    until("the right one is found", lambda: models(router) == {"first"})
    until("the wrong key is told", lambda: "announce_rejected" in log.read_text())
    lines = log.read_text()
    assert lines.count("announce_rejected") == 1
    assert "red" not in lines
    assert red.read_text().count("registered") == 1


def test_the_local_daemon_is_found_without_a_word(net: dict[str, Host]) -> None:
    """Nothing set: 127.0.0.1:6380 is asked. No announcement is heard here."""
    router = net["router"]
    engine(router, "local")
    router.start("agent", "register", MENTAT_GROUP="g", MENTAT_OPENAI_API="8000/v1", MENTAT_ANNOUNCE_PORT="0")
    router.start("serve", MENTAT_ANNOUNCE_PORT="0", **QUICK)
    until("the model is listed", lambda: models(router) == {"local"})
    assert answers(router, "local")
    assert list(router.get("/status.json")["daemons"]) == ["127.0.0.1:6380"]


def test_nodes_with_two_addresses(net: dict[str, Host]) -> None:
    """Each node prefers its fabric, where the router has no leg: the address that they share is taken."""
    router, nodes = net["router"], (net["a"], net["b"])
    for place, host in enumerate(nodes, 1):
        fabric = f"10.77.0.{place}"
        host.ip("addr", "add", f"{fabric}/24", "dev", "lan0")
        engine(host, f"m{place}")
        host.start(
            "agent", "register",
            MENTAT_GROUP=host.name, MENTAT_OPENAI_API="8000/v1", MENTAT_MCP_API="9000/mcp",
            APPLIANCE_AGENT__ADDRESS=fabric,
        )  # fmt: skip
    router.start("serve", ALLOWED_SOURCES="local,10.77.", **QUICK)
    until("both models are listed", lambda: models(router) == {"m1", "m2"})
    for place, host in enumerate(nodes, 1):
        assert answers(router, f"m{place}")
        row = router.get("/status.json")["groups"][host.name]
        wanted = [f"http://{address}:8000/v1" for address in (host.address, f"10.77.0.{place}")]
        assert (row["openai"], row["openai_candidates"]) == (wanted[0], wanted)
        assert row["mcp"] == f"http://{host.address}:9000/mcp"
    daemons = router.get("/status.json")["daemons"]
    assert sorted(daemons) == sorted([*(f"{host.address}:6380" for host in nodes), "127.0.0.1:6380"])
    nodes[0].started[0].kill()  # the engine
    why = until("it is missed", lambda: router.get("/status.json")["groups"]["a"]["why_not"])
    assert why.startswith(f"endpoint probe failed: http://{nodes[0].address}:8000/v1: "), why
    assert "; http://10.77.0.1:8000/v1: " in why
    assert models(router) == {"m2"}

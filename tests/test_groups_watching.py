"""Announced groups over real sockets: daemons of each version appear, are read, and go; groups open and shut."""

from __future__ import annotations

import ipaddress
import json

import pytest
import trio

from appliance.groups import watch
from tests.fake_daemon import engine_at, fake_daemon, ok
from tests.groups_scene import scene, until
from tests.lan import free_port

SHAPES = ("seed", "mid", "new")


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_group_appears_serves_and_goes(shape: str) -> None:
    async with (
        engine_at("m", "n") as engine,
        fake_daemon(shape=shape) as daemon,
        scene(daemons=[daemon.address]) as found,
    ):
        await until("the daemon is read", lambda: found.told("daemon is watched"))
        assert found.models == []
        daemon.group("glm", openai=engine.url, actors=["spawning"], provider="vllm")
        await daemon.tell()
        await found.gated("glm", "no running actors")
        assert set(found.groups.gated().values()) == {"no running actors"}
        daemon.groups[0].actors = ["dead (exit 1)", "running"]
        await daemon.tell()
        await found.serving("m", "n")
        row = found.status["groups"]["glm"]
        assert (row["healthy"], row["why_not"], row["models"]) == (True, None, ["m", "n"])
        assert (row["daemon"], row["agents_alive"], row["actors_running"]) == (daemon.address, 1, 1)
        assert row["openai"] == engine.url
        (endpoint,) = found.groups.endpoints()
        assert (endpoint.id, endpoint.models, endpoint.url) == (
            "group:glm",
            ("m", "n"),
            engine.url.removesuffix("/v1"),
        )
        assert endpoint.engine == ("openai" if shape == "seed" else "vllm")
        assert (endpoint.retries, endpoint.announced) == (False, True)
        listed = found.groups.listed()["group:glm"]["m"]
        assert (listed["owned_by"], listed["max_model_len"]) == ("glm", 7)
        daemon.groups.clear()
        await daemon.tell()
        await found.serving()
        assert found.groups.endpoints() == ()
        assert [line["log_level"] for line in found.told("group is gone")] == ["warning"]


@pytest.mark.parametrize("shape", ["mid", "new"])
async def test_a_port_is_looked_for_at_every_address_of_its_node(shape: str) -> None:
    own = [ipaddress.ip_network("127.0.2.0/24")]
    async with engine_at("m", host="127.0.2.1") as engine, fake_daemon(shape=shape) as daemon:
        daemon.addrs = ["127.0.1.1", "127.0.9.9", "127.0.2.1"]
        daemon.group("glm", openai=(engine.port, "/v1"), mcp=(9000, "/mcp"), note="bound to 127.0.2.1 only")
        async with scene(daemons=[daemon.address], allowed_sources=["local", "127.0.1."], own=lambda: own) as found:
            await found.serving("m")
            row = found.status["groups"]["glm"]
            wanted = [f"http://127.0.2.1:{engine.port}/v1", f"http://127.0.1.1:{engine.port}/v1"]
            assert (row["openai"], row["openai_candidates"]) == (wanted[0], wanted)
            assert row["openai_note"] == "bound to 127.0.2.1 only"
            assert row["mcp"] == "http://127.0.2.1:9000/mcp"
            engine.answer = lambda _: ok(b"", "503 Service Unavailable")
            why = await found.gated("glm", "endpoint probe failed: ")
            assert why == (
                f"endpoint probe failed: {wanted[0]}: HTTP 503 Service Unavailable; "
                f"{wanted[1]}: cannot connect: Connection refused (agent reports: bound to 127.0.2.1 only)"
            )
            daemon.addrs = ["127.0.9.9"]
            await daemon.tell()
            why = await found.gated("glm", "announced port")
            assert why == (
                f"announced port {engine.port}/v1 on node 127.0.0.1, and no address of that node passes ALLOWED_SOURCES"
            )


async def test_the_gates_in_their_order() -> None:
    async with engine_at("m") as engine, fake_daemon(shape="seed") as daemon:
        group = daemon.group("glm", actors=["spawning"])
        async with scene(daemons=[daemon.address]) as found:
            await found.gated("glm", "no announced OpenAI endpoint")
            group.openai = engine.url
            group.alive = False
            await daemon.tell()
            await found.gated("glm", "no announced OpenAI endpoint")
            group.alive = True
            await daemon.tell()
            await found.gated("glm", "no running actors")
            engine.answer = lambda _: ok(b"", "500 Internal Server Error")
            group.actors = ["running"]
            await daemon.tell()
            await found.gated("glm", f"endpoint probe failed: {engine.url}: HTTP 500 Internal Server Error")
            engine.answer = None
            await found.serving("m")
            engine.answer = lambda _: None
            await until("a probe hangs", lambda: engine.hits)
            found.later(31)
            await found.gated("glm", "endpoint probe stale")
            assert found.groups.gated() == {"m": "endpoint probe stale"}


async def test_a_group_that_never_served_is_told_of_once_with_its_reason() -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon:
        group = daemon.group("glm", openai=engine.url, actors=["spawning"])
        daemon.group("only-tools", mcp="http://127.0.0.1:9/mcp")
        async with scene(daemons=[daemon.address]) as found:
            await found.gated("glm", "no running actors")
            group.actors = ["running"]
            engine.answer = lambda _: ok(b"", "503 Service Unavailable")
            await daemon.tell()
            await found.gated("glm", "endpoint probe failed")
            hits = engine.hits
            await until("it is probed again", lambda: engine.hits > hits + 3)
            engine.answer = None
            await found.serving("m")
            told = [line for line in found.log if line["event"].startswith("group ")]
            assert [(line["event"], line["group"]) for line in told] == [
                ("group does not serve yet", "glm"),
                ("group serves", "glm"),
            ]
            assert told[0]["reason"] == "no running actors"


async def test_not_probed_yet() -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon:
        engine.answer = lambda _: None
        daemon.group("glm", openai=engine.url)
        async with scene(daemons=[daemon.address]) as found:
            await found.gated("glm", "not probed yet")
            assert found.groups.gated() == {"glm": "not probed yet"}


@pytest.mark.parametrize("shape", SHAPES)
async def test_no_actors_at_all(shape: str) -> None:
    """Older documents list an actor wherever a GPU is used; elsewhere the probe alone decides."""
    async with engine_at("m") as engine, fake_daemon(shape=shape) as daemon:
        group = daemon.group("glm", openai=engine.url, gpus=1)
        async with scene(daemons=[daemon.address]) as found:
            if shape == "new":
                await found.serving("m")
            else:
                await found.gated("glm", "no running actors")
                group.gpus = 0
                await daemon.tell()
                await found.serving("m")


async def test_an_engine_that_names_no_model_serves_its_groups_name() -> None:
    async with engine_at() as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=engine.url)
        async with scene(daemons=[daemon.address]) as found:
            await found.serving("glm")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ok(b"<html>"), "the answer is not JSON"),
        (b"hello\r\n\r\n", "the answer is not HTTP"),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", "HTTP 302 Found"),
    ],
)
async def test_what_a_probe_may_get_instead(answer: bytes, error: str) -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon:
        engine.answer = lambda _: answer
        daemon.group("glm", openai=engine.url)
        async with scene(daemons=[daemon.address]) as found:
            await found.gated("glm", f"endpoint probe failed: {engine.url}: {error}")


async def test_a_broken_connection_is_asked_once_more_and_no_oftener() -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon:
        good = ok(json.dumps({"data": [{"id": "m"}]}).encode())
        engine.answer = lambda number: b"" if number % 2 else good
        daemon.group("glm", openai=engine.url)
        async with scene(daemons=[daemon.address]) as found:
            await found.serving("m")
            engine.answer = lambda _: b""
            why = await found.gated("glm", "endpoint probe failed: ")
            assert why.endswith(
                "connection closed without an answer (and before that: connection closed without an answer)"
            )


async def test_a_timeout_is_not_asked_again() -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon:
        engine.answer = lambda _: None
        daemon.group("glm", openai=engine.url)
        async with scene(daemons=[daemon.address], probe_timeout_s=0.2, probe_interval_s=60.0) as found:
            await found.gated("glm", f"endpoint probe failed: {engine.url}: timeout after 0.2s")
            assert engine.hits == 1


async def test_the_status_is_asked_once_more_when_its_connection_breaks() -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=engine.url)
        broken = iter([True])

        def answer() -> bytes:
            if next(broken, False):
                raise trio.BrokenResourceError
            return json.dumps(daemon.document()).encode()

        daemon.answer = answer
        async with scene(daemons=[daemon.address]) as found:
            await found.serving("m")
            assert found.told("daemon does not answer") == []


async def test_a_stream_of_events_without_end_is_read_all_the_same() -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon, trio.open_nursery() as nursery:
        async with scene(daemons=[daemon.address]) as found:
            await until("events are held open", lambda: daemon.listeners)
            nursery.start_soon(daemon.tell_for_ever)
            before = daemon.reads
            await until("it is read while it talks", lambda: daemon.reads > before + 2)
            events = daemon.seq
            daemon.group("glm", openai=engine.url)
            await found.serving("m")
            assert daemon.reads - before < events  # gathered
        nursery.cancel_scope.cancel()


async def test_a_daemon_that_goes_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PAUSE_S", 0.02)
    async with engine_at("m") as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=engine.url)
        async with scene(daemons=[daemon.address]) as found:
            await found.serving("m")
            daemon.answer = lambda: b"not a document"
            await daemon.tell()
            await until("it is missed", lambda: found.told("daemon does not answer"))
            reads = daemon.reads
            await until("it is asked again", lambda: daemon.reads > reads + 3)
            assert len(found.told("daemon does not answer")) == 1
            assert found.models == ["m"]  # its document is believed for a while, and the engine answers
            found.later(100)
            await found.serving()
            row = found.status["daemons"][daemon.address]
            assert (row["connected"], row["error"], row["seed"]) == (True, "the answer is not JSON", True)
            daemon.answer = None
            await found.serving("m")
            assert len(found.told("daemon is watched")) == 2
            assert found.status["daemons"][daemon.address]["error"] is None


async def test_a_document_that_is_none_is_said_so() -> None:
    async with fake_daemon() as daemon:
        daemon.answer = lambda: b"[]"
        async with scene(daemons=[daemon.address]) as found:
            (line,) = await until("it is told", lambda: found.told("daemon does not answer"))
            assert line["reason"] == "/status is no daemon's document: no object with groups"


async def test_a_local_daemon_that_nobody_named_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr("appliance.groups.groups.LOCAL_DAEMON", address)
    async with scene(daemons=[address]) as found:
        await until("it was asked", lambda: found.status["daemons"][address]["error"])
        assert found.told("daemon does not answer") == []


async def test_peers_are_watched_too() -> None:
    async with engine_at("m") as engine, fake_daemon(node_id="N2") as second, fake_daemon() as first:
        second.group("glm", openai=engine.url)
        peer = {"node_ip": "127.0.0.1", "link_ip": "127.0.0.1", "addrs": ["127.0.0.1"], "http_port": second.port}
        first.peers = {"N2": {**peer, "alive": False}, "N3": {"node_ip": "127.0.0.1", "http_port": 0, "alive": True}}
        async with scene(daemons=[first.address]) as found:
            await until("the first is read", lambda: found.told("daemon is watched"))
            assert list(found.status["daemons"]) == [first.address]
            first.peers["N2"]["alive"] = True
            await first.tell()
            await found.serving("m")
            assert found.status["daemons"][second.address]["seed"] is False
        async with scene(daemons=[first.address], discover_peers=False) as found:
            await until("the first is read", lambda: found.told("daemon is watched"))
            assert list(found.status["daemons"]) == [first.address]


async def test_one_node_under_two_addresses_is_one_daemon() -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=engine.url)
        seeds = [daemon.address, f"localhost:{daemon.port}"]
        async with scene(daemons=seeds) as found:
            await found.serving("m")
            (row,) = await until(
                "they are one", lambda: len(found.status["daemons"]) == 1 and [*found.status["daemons"].values()]
            )
            assert len(row["alternates"]) == 1


async def test_who_answers_in_anothers_name_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is listed under a loopback address would be this machine's own daemon."""
    monkeypatch.setattr(watch, "PAUSE_S", 0.02)
    async with fake_daemon() as first:
        first.peers = {"N9": {"node_ip": "127.0.0.1", "link_ip": "127.0.0.1", "http_port": first.port, "alive": True}}
        async with scene(daemons=[f"localhost:{first.port}"]) as found:
            row = await until(
                "the other one is refused",
                lambda: next(
                    (r for r in found.status["daemons"].values() if r["node_id"] == "N9" and r["error"]), None
                ),
            )
            assert row["error"] == f"127.0.0.1:{first.port} answers as another node"
            assert row["connected"] is False


async def test_groups_without_use_retire_and_return() -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon:
        engine.answer = lambda _: ok(b"", "503 Service Unavailable")
        daemon.group("glm", openai=engine.url)
        daemon.group("tools", mcp="http://127.0.0.1:9/mcp")
        async with scene(daemons=[daemon.address], model_ttl_s=50.0, poll_interval_s=1000.0) as found:
            await found.gated("glm", "endpoint probe failed")
            found.later(51)
            await until("it is not shown", lambda: "glm" not in found.status["groups"])
            assert "tools" in found.status["groups"]
            assert [source.group for source in found.groups.tool_servers()] == ["tools"]
            assert found.groups.gated() == {}
            engine.answer = None
            await found.serving("m")


async def test_tools_are_there_while_their_engine_is_not() -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=engine.url, mcp="http://127.0.0.1:9/mcp", actors=["spawning"])
        async with scene(daemons=[daemon.address]) as found:
            await found.gated("glm", "no running actors")
            assert [(each.group, each.url) for each in found.groups.tool_servers()] == [
                ("glm", "http://127.0.0.1:9/mcp")
            ]


async def test_the_better_address_is_tried_again_in_time() -> None:
    """The one that answered is kept while it answers, so that its caches are; the best one is tried now and then."""
    own = [ipaddress.ip_network("127.0.1.0/24")]
    async with engine_at("m", host="127.0.0.1") as engine, fake_daemon() as daemon:
        daemon.addrs = ["127.0.0.1", "127.0.1.1"]
        daemon.group("glm", openai=(engine.port, "/v1"))
        best, other = f"http://127.0.1.1:{engine.port}/v1", f"http://127.0.0.1:{engine.port}/v1"
        settings = {"allowed_sources": ["127."], "own": lambda: own, "probe_promote_s": 60.0}
        async with scene(daemons=[daemon.address], **settings) as found:
            await found.serving("m")
            assert found.status["groups"]["glm"]["openai"] == other
            async with engine_at("m", host="127.0.1.1", port=engine.port) as better:
                hits = engine.hits
                await until("the one that answered is asked again", lambda: engine.hits > hits + 3)
                assert better.hits == 0
                found.later(61)
                await until("the best is used", lambda: found.status["groups"]["glm"]["openai"] == best)


LISTED = json.dumps({"data": [{"id": "m"}]}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(LISTED), LISTED),
        b"HTTP/1.1 200 OK\r\n\r\n" + LISTED,
        b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + LISTED,
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b"
        % (len(LISTED), LISTED),
    ],
)
async def test_answers_of_every_length(answer: bytes) -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon:
        engine.answer = lambda _: answer
        daemon.group("glm", openai=engine.url)
        async with scene(daemons=[daemon.address]) as found:
            await found.serving("m")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ok(b"[" + b" " * 5000 + b"]"), "more than 4096 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 5000, "more than 4096 bytes"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, "the answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}", "connection closed within the answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "the answer is not HTTP"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50, "nothing but interim answers"),
    ],
)
async def test_answers_are_bounded(answer: bytes, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.groups.ask.MOST_BYTES", 4096)
    async with engine_at("m") as engine, fake_daemon() as daemon:
        engine.answer = lambda _: answer
        daemon.group("glm", openai=engine.url)
        async with scene(daemons=[daemon.address]) as found:
            await found.gated("glm", f"endpoint probe failed: {engine.url}: {error}")


async def test_an_engine_cannot_fill_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.rules.groups.skim.MOST_MODELS", 3)
    async with engine_at("a", "x" * 501, "b", "c") as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=engine.url)
        async with scene(daemons=[daemon.address]) as found:
            await found.serving("a", "b")


async def test_a_fault_of_ours_ends_neither_the_router_nor_the_other_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.groups.groups.PAUSE_S", 0.02)
    read_view = watch.read_view

    def breaks(document: object) -> object:
        if isinstance(document, dict) and document.get("node_id") == "bad":
            raise ZeroDivisionError("an odd document")
        return read_view(document)

    monkeypatch.setattr(watch, "read_view", breaks)
    async with engine_at("m") as engine, fake_daemon(node_id="bad") as bad, fake_daemon() as daemon:
        daemon.group("glm", openai=engine.url)
        async with scene(daemons=[bad.address, daemon.address]) as found:
            await found.serving("m")
            await until("it is read again and again", lambda: bad.reads > 3)
            assert len(found.told("fault while finding groups")) == 1

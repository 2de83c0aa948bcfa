"""What an agent tells over HTTP: the document, its changes as patches, and who may see what."""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio_websocket import ConnectionClosed, HandshakeError, open_websocket_url

import appliance.agent.web as web
from appliance.agent.events import BEHIND, Board
from appliance.agent.measures import renderer
from appliance.agent.status import Identity, Seen, document, one_group, without_tails
from appliance.agent.web import Site
from appliance.facts.hardware import Inventory
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.rules.fleet.alone import Waiting
from tests.agent_scene import NODE, SIM, gpu, hindered

ME = Identity("box", "10.0.0.1", "6d6474919bbe7beb", 1000.0, "host")
ON_GPU = attrs.evolve(NODE, gpus=(gpu(0), gpu(3)))


def report(replica: str = "llama.1", state: str = "ready", rank: int = 0, **more: Any) -> Report:
    shard = Shard(
        replica, replica.rpartition(".")[0], SIM, rank=rank, address="10.0.0.1", gpus=("GPU-3",), key="s3cret-key"
    )
    given: dict[str, Any] = {"pid": 77, "port": 20000, "url": "http://10.0.0.1:20000"} | more
    return Report(attrs.evolve(shard, profile=attrs.evolve(SIM, env={"TOKEN": "s3cret-env"})), state, 5.0, **given)  # type: ignore[arg-type]


def seen(*reports: Report, inventory: Inventory = ON_GPU, waiting: tuple[Waiting, ...] = ()) -> Seen:
    return Seen(ME, inventory, {each.shard.id: each for each in reports}, waiting, {"llama": 2})


def plain(now: Seen, seq: int) -> dict[str, Any]:
    """The document as it comes out of JSON."""
    made: dict[str, Any] = json.loads(json.dumps(document(now) | {"seq": seq}))
    return made


# -- the document ------------------------------------------------------------------------------------------------------


def test_a_ready_replica_is_a_group_with_a_running_actor_and_an_endpoint() -> None:
    whole = document(seen(report()))
    group = whole["groups"]["llama.1"]
    (actor,) = group["actors"].values()
    assert actor == {
        "name": "rank0",
        "node_id": whole["node_id"],
        "gpu_ids": [3],
        "state": "running",
        "reason": "",
        "pid": 77,
    }
    ((name, agent),) = group["agents"].items()
    assert name == "llama.1/0@box"
    assert agent["alive"] is True
    assert agent["node_ip"] == "10.0.0.1"
    assert agent["services"] == {
        "openai": {"host": "10.0.0.1", "port": 20000, "path": "/v1", "provider": "sim", "note": ""}
    }
    assert (group["gpus_total"], group["gpus_used"], group["placement_groups"]) == (1, 1, {})


def test_a_host_can_be_put_into_a_url_as_it_is() -> None:
    shard = attrs.evolve(report().shard, address="fd00::1")
    group = document(seen(attrs.evolve(report(), shard=shard)))["groups"]["llama.1"]
    assert [agent["services"]["openai"]["host"] for agent in group["agents"].values()] == ["[fd00::1]"]


def test_the_head_of_the_document() -> None:
    whole = document(seen())
    assert whole["proto"] == "0.99"
    assert (whole["node_ip"], whole["hostname"], whole["boot_id"]) == ("10.0.0.1", "host", "6d6474919bbe7beb")
    assert whole["addrs"] == ["10.0.0.1", "fd00::1", "192.168.5.1"]
    assert whole["peers"] == whole["clients"] == whole["counters"] == whole["groups"] == {}
    assert len(whole["node_id"]) == 56
    assert whole["node_id"] == attrs.evolve(ME, boot_id="other", started_at=9.0).node_id
    assert whole["node_id"] != attrs.evolve(ME, node="other").node_id


@pytest.mark.parametrize(
    ("state", "actor"),
    [
        ("fetching", "spawning"), ("starting", "spawning"), ("loading", "spawning"), ("ready", "running"),
        ("draining", "draining"), ("stopping", "stopping"), ("failed", "dead"), ("stopped", None),
    ],
)  # fmt: skip
def test_only_a_ready_shard_is_running(state: str, actor: str | None) -> None:
    groups = document(seen(report(state=state)))["groups"]
    found = [each["state"] for group in groups.values() for each in group["actors"].values()]
    assert found == ([actor] if actor else [])


def test_an_ended_shard_announces_nothing_and_uses_nothing() -> None:
    group = document(seen(report(state="failed", reason="it exited", pid=0)))["groups"]["llama.1"]
    assert [agent["services"] for agent in group["agents"].values()] == [{}]
    assert (group["gpus_total"], group["gpus_used"]) == (1, 0)
    assert [actor["reason"] for actor in group["actors"].values()] == ["it exited"]


def test_all_shards_of_a_replica_are_one_group_and_one_of_them_announces() -> None:
    group = document(seen(report(), report(rank=1, port=0, url="")))["groups"]["llama.1"]
    assert sorted(actor["name"] for actor in group["actors"].values()) == ["rank0", "rank1"]
    assert [bool(agent["services"]) for agent in group["agents"].values()] == [True, False]


def test_our_own_part_says_why() -> None:
    waiting = Waiting("big.1", "big", "it needs 2 GPUs", 12.5)
    own = document(seen(report(exit="signal SIGKILL", tail=("boom",)), waiting=(waiting,)))["appliance"]
    assert own["waiting"] == {"big.1": {"model": "big", "reason": "it needs 2 GPUs", "again_at": 12.5}}
    assert (
        own["shards"]["llama.1/0"] | {"exit": "signal SIGKILL", "tail": ["boom"], "profile": "cpu"}
        == (own["shards"]["llama.1/0"])
    )
    assert [each["index"] for each in own["inventory"]["gpus"]] == [0, 3]
    assert own["failures"] == {"llama": 2}


def test_no_secret_is_in_it_and_others_see_no_logs() -> None:
    whole = document(seen(report(tail=("a prompt",))))
    assert "s3cret" not in json.dumps(whole)
    assert "a prompt" in json.dumps(whole)
    assert "a prompt" not in json.dumps(without_tails(whole))
    assert whole["appliance"]["shards"]["llama.1/0"]["tail"] == ["a prompt"]


def test_one_group_of_several() -> None:
    whole = document(seen(report("a.1"), report("b.1")))
    assert set(one_group(whole, "a.1")["groups"]) == {"a.1"}
    assert one_group(whole, "nope")["groups"] == {}


# -- events ------------------------------------------------------------------------------------------------------------


def apply(held: dict[str, Any], event: dict[str, Any]) -> None:
    for entry in event["patch"]:
        *above, last = entry["at"]
        at = held
        for key in above:
            at = at.setdefault(key, {})
        if "value" in entry:
            at[last] = entry["value"]
        else:
            at.pop(last, None)
    held["seq"] = event["seq"]


STATES = st.sampled_from(["starting", "loading", "ready", "draining", "stopping", "stopped", "failed"])
MOMENTS = st.builds(
    lambda states, bad, address, waits: seen(
        *(report(name, state) for name, state in states.items()),
        inventory=attrs.evolve(
            ON_GPU,
            gpus=(hindered(0, "ecc", "bad") if bad else gpu(0, used_bytes=len(states)),),
            interfaces=NODE.interfaces[: 1 + address],
        ),
        waiting=tuple(Waiting(f"w.{number}", "w", "no room") for number in range(waits)),
    ),
    st.dictionaries(st.sampled_from(["a.1", "a.2", "b.1"]), STATES),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 2),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(MOMENTS, min_size=1, max_size=8))
def test_who_applies_every_patch_holds_the_document(moments: list[Seen]) -> None:
    now = moments[0]
    board = Board(lambda: now, lambda: 7.0)
    with board.subscribed() as (snapshot, news):
        held = copy.deepcopy(snapshot)
        for moment in moments:
            now = moment
            whole = board.read()
            numbers = []
            while True:
                try:
                    event = news.receive_nowait()
                except trio.WouldBlock:
                    break
                numbers.append(event["seq"])
                apply(held, event)
                assert (event["node"], event["ts_ms"]) == (ME.node_id, 7000)
            assert numbers == list(range(whole["seq"] - len(numbers) + 1, whole["seq"] + 1))
            assert held["groups"] == whole["groups"]
            assert held["addrs"] == whole["addrs"]
            for part in ("shards", "waiting"):
                assert held["appliance"][part] == whole["appliance"][part]


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        ((), (report(state="starting", port=0),), "actor_spawning"),
        ((report(state="loading"),), (report(),), "actor_running"),
        ((report(),), (report(state="failed"),), "actor_dead"),
        ((report(),), (), "agent_lost"),
    ],
)
def test_the_word_for_a_change(before: tuple[Report, ...], now: tuple[Report, ...], kind: str) -> None:
    looks = iter([seen(*before), seen(*before), seen(*now)])
    board = Board(lambda: next(looks), lambda: 0.0)
    with board.subscribed() as (_, news):
        board.read()
        assert [news.receive_nowait()["type"], news.receive_nowait()["type"]] == [kind, "appliance_shards"]


def test_figures_that_change_all_the_time_are_no_event() -> None:
    now = seen(inventory=attrs.evolve(ON_GPU, gpus=(gpu(0, used_bytes=1),)))
    board = Board(lambda: now, lambda: 0.0)
    now = seen(inventory=attrs.evolve(ON_GPU, gpus=(gpu(0, used_bytes=2),)))
    whole = board.read()
    assert whole["seq"] == 0
    assert whole["appliance"]["inventory"]["gpus"][0]["used_bytes"] == 2


async def test_who_falls_behind_is_cut_off_and_the_others_are_not() -> None:
    now = seen()
    board = Board(lambda: now, lambda: 0.0)
    with board.subscribed() as (_, slow), board.subscribed() as (_, quick):
        heard = 0
        for number in range(BEHIND):
            now = seen(report(state="ready" if number % 2 else "loading"))
            board.read()
            while quick.statistics().current_buffer_used:
                heard = (await quick.receive())["seq"]
        assert heard == board.read()["seq"] > BEHIND
        with pytest.raises(trio.EndOfChannel), trio.fail_after(10):
            for _ in range(BEHIND + 1):
                await slow.receive()
    assert board.subscribers == 0


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@attrs.define
class Scene:
    now: Seen
    port: int = 0
    board: Board | None = None

    def become(self, now: Seen) -> None:
        self.now = now
        assert self.board is not None
        self.board.read()

    @property
    def events(self) -> str:
        return f"ws://127.0.0.1:{self.port}/events"


@asynccontextmanager
async def serving(now: Seen | None = None) -> AsyncIterator[Scene]:
    scene = Scene(now or seen(report(tail=("a prompt",))))
    board = scene.board = Board(lambda: scene.now, lambda: 7.0)
    site = Site(board, lambda: renderer(lambda: scene.now))
    listener = socket.create_server(("127.0.0.1", 0))
    scene.port = listener.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(site.serve, [listener])
        yield scene
        nursery.cancel_scope.cancel()


async def ask(port: int, sent: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, fields and body of the answer to these bytes; read until the server closes."""
    with trio.fail_after(10):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            await stream.send_all(sent)
            got = b"".join([chunk async for chunk in stream])
    head, _, body = got.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    fields = dict(line.split(b": ", 1) for line in lines)
    assert fields.get(b"connection") == b"close"
    return int(status.split()[1]), fields, body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


async def test_status() -> None:
    async with serving() as scene:
        status, fields, body = await ask(scene.port, get("/status"))
        assert (status, fields[b"content-type"]) == (200, b"application/json")
        assert int(fields[b"content-length"]) == len(body)
        assert json.loads(body) == plain(scene.now, 0)
        assert (await ask(scene.port, get("/status/")))[2] == body
        one = json.loads((await ask(scene.port, get("/status?group=no%2Fsuch")))[2])
        assert one["groups"] == {}
        _, fields, empty = await ask(scene.port, get("/status", "HEAD"))
        assert (int(fields[b"content-length"]), empty) == (len(body), b"")


async def test_another_machine_sees_no_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_is_loopback", lambda stream: False)
    async with serving() as scene:
        body = (await ask(scene.port, get("/status")))[2]
        assert json.loads(body)["appliance"]["shards"]["llama.1/0"]["tail"] is None
        async with open_websocket_url(scene.events) as client:
            scene.become(seen(report(state="failed", tail=("a prompt",))))
            told = [await client.get_message() for _ in range(3)]
        assert json.loads(told[2])["type"] == "appliance_shards"
        assert not any("a prompt" in each for each in told)


async def test_health_and_metrics() -> None:
    async with serving(seen(report(), waiting=(Waiting("b.1", "b", "no room"),))) as scene:
        status, fields, body = await ask(scene.port, get("/healthz"))
        assert (status, fields[b"content-type"], body) == (200, b"text/plain; charset=utf-8", b"ok\n")
        status, fields, body = await ask(scene.port, get("/metrics"))
        assert (status, fields[b"content-type"].split(b";")[0]) == (200, b"text/plain")
        lines = body.decode().splitlines()
        for wanted in (
            'appliance_shards{model="llama",state="ready"} 1.0',
            'appliance_replicas_waiting{model="b"} 1.0',
            'appliance_shard_failures_total{model="llama"} 2.0',
            'appliance_gpu_free{gpu="3",gpu_class="l40s-45g"} 1.0',
        ):
            assert wanted in lines
        assert not any(line.startswith("appliance_gpu_memory_used_bytes{") for line in lines)


@pytest.mark.parametrize(
    ("sent", "status", "told"),
    [
        (get("/nope"), 404, "here are /status, /events, /metrics, /healthz"),
        (get("/status", "POST"), 405, "/status takes GET, HEAD"),
        (get("/events"), 426, "/events is a WebSocket; /status is the document"),
        (b"GET /status HTTP/1.1\r\n\r\n", 400, "a Host header is required"),
        (b"\x16\x03\x01\x02\x00\x01", 400, "this is TLS, and plain HTTP is spoken here"),
        (b"GET /" + b"a" * 70000, 431, "header larger than 65536 bytes"),
    ],
)
async def test_refusals(sent: bytes, status: int, told: str) -> None:
    async with serving() as scene:
        got, fields, body = await ask(scene.port, sent)
        assert (got, json.loads(body)) == (status, {"error": told})
        assert (status != 405) or fields[b"allow"] == b"GET, HEAD"
        assert (await ask(scene.port, get("/healthz")))[0] == 200


async def test_events_begin_with_the_document_and_go_on_with_patches() -> None:
    async with serving(seen(report(state="loading"))) as scene:
        with trio.fail_after(10):
            async with open_websocket_url(scene.events) as client:
                first = json.loads(await client.get_message())
                assert (first["type"], first["seq"]) == ("snapshot", 0)
                held = first["data"]
                assert held == plain(scene.now, 0)
                scene.become(seen(report()))
                for kind in ("actor_running", "appliance_shards"):
                    event = json.loads(await client.get_message())
                    assert event["type"] == kind
                    apply(held, event)
        assert held == plain(scene.now, 2)


async def test_a_client_that_leaves_takes_nothing_with_it() -> None:
    async with serving() as scene:
        assert scene.board is not None
        async with open_websocket_url(scene.events) as client:
            await client.get_message()
            assert scene.board.subscribers == 1
        await until(lambda: scene.board is not None and scene.board.subscribers == 0)
        stream = await trio.open_tcp_stream("127.0.0.1", scene.port)
        await stream.send_all(b"GET /sta")
        await stream.aclose()
        assert (await ask(scene.port, get("/healthz")))[0] == 200


async def test_a_quiet_client_is_pinged_and_a_dead_one_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PING_S", 0.01)
    monkeypatch.setattr(web, "PONG_S", 0.05)
    async with serving() as scene:
        assert scene.board is not None
        async with open_websocket_url(scene.events) as client:
            await client.get_message()
            await until(lambda: scene.board is not None and scene.board.subscribers == 1)
        stream = await trio.open_tcp_stream("127.0.0.1", scene.port)
        async with stream:
            await stream.send_all(
                b"GET /events HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
                b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            with trio.fail_after(10):
                got = b"".join([chunk async for chunk in stream])
        assert got.startswith(b"HTTP/1.1 101")
        await until(lambda: scene.board is not None and scene.board.subscribers == 0)


async def test_a_handshake_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HEAD_S", 0.2)
    async with serving() as scene:
        stream = await trio.open_tcp_stream("127.0.0.1", scene.port)
        async with stream:
            await stream.send_all(
                b"GET /events HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n"
                b"sec-websocket-version: 7\r\n\r\n"
            )
            with trio.fail_after(10):
                got = b"".join([chunk async for chunk in stream])
        assert not got.startswith(b"HTTP/1.1 101")
        with pytest.raises((HandshakeError, ConnectionClosed)):
            async with open_websocket_url(f"ws://127.0.0.1:{scene.port}/nope"):
                raise AssertionError("there is no such WebSocket")
        assert (await ask(scene.port, get("/healthz")))[0] == 200


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - sockets lie between
            await trio.sleep(0.002)

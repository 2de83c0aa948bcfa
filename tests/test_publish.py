"""Replicas beside the endpoints of the file: what stays when either changes, and what is never shown."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from appliance.facts.choice import Outcome
from appliance.facts.endpoint import Endpoint
from tests.collector import collector
from tests.fake_engine import DONE, LAST, Asked, Peer, chunk, event, fake_engine, says, streamed, whole
from tests.gate_scene import Group, held, records, waiting
from tests.raw_client import Client, chat
from tests.routers import Running, router
from tests.waking_scene import AT_ZERO, Plane, replica

KEY = "sk-replica-4f1d9a7c"


def ids(door: Running) -> list[str]:
    return list(door.app.gateway.table.members)


async def page(door: Running) -> str:
    answer = await door.ask(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", port=door.metrics)
    return answer.body.decode()


# -- one table ---------------------------------------------------------------------------------------------------------


async def test_replicas_and_endpoints_of_the_file_serve_a_model_together(tmp_path: Path) -> None:
    async with (
        fake_engine(id="file") as a,
        fake_engine() as b,
        router(tmp_path, a, config=AT_ZERO) as door,
    ):
        Plane(door).publish(replica(b))
        for _ in range(40):
            assert (await door.ask(chat())).status == 200
        assert a.asked and b.asked


async def test_what_survives_keeps_its_live_state(tmp_path: Path) -> None:
    async with (
        held(4, id="file") as a,
        held(4) as b,
        router(tmp_path, a.engine, config=AT_ZERO) as door,
        trio.open_nursery() as nursery,
    ):
        plane = Plane(door)
        plane.publish(replica(b.engine))
        group = Group(door, nursery)
        group.begin(4)
        await door.until("all run", lambda: len(a.inside) + len(b.inside) == 4)
        members = dict(door.app.gateway.table.members)
        upstreams = dict(door.app.gateway.upstreams)
        members["llama.abcde"].begin(1.0).finish(Outcome.FAILURE, 1.0, door.app.gateway.rng)
        watched = {identity: watch[2] for identity, watch in door.app.watches._watched.items()}
        plane.publish(replica(b.engine), replica(a.engine, "llama.bbbbb"))
        assert ids(door) == ["file", "llama.abcde", "llama.bbbbb"]
        for identity, member in members.items():
            assert door.app.gateway.table.members[identity] is member
            assert door.app.gateway.upstreams[identity] is upstreams[identity]
            assert door.app.watches._watched[identity][2] is watched[identity]
        assert sum(member.in_flight for member in members.values()) == 4
        assert members["llama.abcde"].breaker.known == 1
        assert members["llama.abcde"].penalty
        a.let_all_go()
        b.let_all_go()
        await door.until("all have their answer", lambda: group.statuses() == {200: 4})
        nursery.cancel_scope.cancel()


async def test_a_reload_keeps_replicas_and_publishing_keeps_the_file(tmp_path: Path) -> None:
    async with fake_engine(id="file") as a, fake_engine() as b, router(tmp_path, a, config=AT_ZERO) as door:
        plane = Plane(door)
        plane.publish(replica(b), waking={"llama": "x"})
        member = door.app.gateway.table.members["llama.abcde"]
        door.file.write_text(AT_ZERO)
        assert door.app.reload() == ""
        assert ids(door) == ["llama.abcde"]
        assert door.app.gateway.table.members["llama.abcde"] is member
        assert door.app.gateway.table.waking == {"llama": "x"}
        door.file.write_text(AT_ZERO + a.toml)
        assert door.app.reload() == ""
        plane.publish()
        assert ids(door) == ["file"]
        assert set(door.app.gateway.upstreams) == {"file"}
        assert (await door.ask(chat())).status == 200


async def test_a_replica_of_a_model_that_the_file_has_dropped_serves_nobody(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=AT_ZERO) as door:
        Plane(door).publish(replica(engine))
        door.file.write_text('[[models]]\nname = "other"\n')
        assert door.app.reload() == ""
        answer = await door.ask(chat())
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        door.file.write_text(AT_ZERO)
        assert door.app.reload() == ""
        assert (await door.ask(chat())).status == 200


async def test_the_file_wins_where_both_use_an_id(tmp_path: Path) -> None:
    async with (
        fake_engine(id="llama.abcde") as a,
        fake_engine() as b,
        router(tmp_path, a, config=AT_ZERO) as door,
    ):
        plane = Plane(door)
        plane.publish(replica(b), replica(b, "llama.ccccc"))
        assert door.app.gateway.unplaced == ("llama.abcde",)
        assert door.app.gateway.table.members["llama.abcde"].endpoint.port == a.port
        door.file.write_text(AT_ZERO)
        assert door.app.reload() == ""
        assert door.app.gateway.unplaced == ()
        assert door.app.gateway.table.members["llama.abcde"].endpoint.port == b.port


async def test_nothing_is_rebuilt_when_only_the_words_change(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=AT_ZERO + '[[models]]\nname = "m"\n') as door:
        plane = Plane(door)
        plane.publish(replica(engine), waking={"m": "it is to be started"})
        before = door.app.gateway.table.entries
        plane.publish(replica(engine), waking={"m": "it is loading"})
        assert door.app.gateway.table.entries is before
        assert before["m"].waking == "it is loading"
        plane.publish(replica(engine))
        assert before["m"].waking == ""


# -- how much is asked for ---------------------------------------------------------------------------------------------


async def test_demand_counts_who_waits_who_runs_and_what_there_is_room_for(tmp_path: Path) -> None:
    async with held(2) as engine, router(tmp_path, config=AT_ZERO) as door, trio.open_nursery() as nursery:
        plane = Plane(door)
        plane.publish(replica(engine.engine))
        group = Group(door, nursery)
        group.begin(5, band="gold")
        await waiting(door, 3)
        told = door.app.gateway.demand()["llama"]
        assert (told.waiting, told.running, told.slots) == (3, 2, 2)
        # one more, whose batch nobody knows: it is taken to be like the other
        unknown = attrs.evolve(replica(engine.engine, "llama.bbbbb"), capacity=0)
        plane.publish(replica(engine.engine), unknown)
        assert door.app.gateway.demand()["llama"].slots == 4
        door.app.gateway.table.members["llama.bbbbb"].set_failing("unreachable")
        assert door.app.gateway.demand()["llama"].slots == 2
        nursery.cancel_scope.cancel()


async def test_a_model_never_asked_for_says_so(tmp_path: Path) -> None:
    async with router(tmp_path, config=AT_ZERO) as door:
        assert door.app.gateway.demand()["llama"].asked_at == float("-inf")


# -- leaving -----------------------------------------------------------------------------------------------------------


async def test_a_stream_on_a_replica_that_leaves_ends_well(tmp_path: Path) -> None:
    go_on = trio.Event()

    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(*streamed(event("a"), end=b""))
        await go_on.wait()
        await peer.send(chunk(event("b")), chunk(DONE), LAST)

    async with fake_engine(script) as old, fake_engine() as new, router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door)
        plane.publish(attrs.evolve(replica(old), engine="vllm"))
        await door.until("it is watched", lambda: door.app.gateway.contracts)
        client = await door.connect()
        await client.send(chat(stream=True))
        await client.until(event("a"))
        assert 'appliance_endpoint_inflight{endpoint="llama.abcde"} 1.0' in await page(door)
        plane.publish(replica(new, "llama.bbbbb"))
        assert (await door.ask(chat())).status == 200
        assert [asked.method for asked in (*old.asked, *new.asked)].count("POST") == 2
        assert new.asked
        assert "llama.abcde" not in await page(door)
        gateway = door.app.gateway
        assert "llama.abcde" not in {*gateway.upstreams, *gateway.contracts, *gateway.listed}
        assert gateway.gate.rules.loads["llama.abcde"].inflight == 1  # counted until it ends
        go_on.set()
        rest = await client.until(DONE)
        assert event("b") in rest
        await door.until("nothing of it is left", lambda: set(gateway.gate.rules.loads) == {"llama.bbbbb"})


async def test_a_replica_that_goes_before_it_was_looked_at_leaves_no_series(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door)
        plane.publish(attrs.evolve(replica(engine), engine="vllm"))
        plane.publish()  # in the same step: its tasks have not begun
        await trio.testing.wait_all_tasks_blocked()
        assert door.app.gateway.contracts == {}


# -- keys --------------------------------------------------------------------------------------------------------------

PAGES = (
    "/status", "/endpoints", "/models", "/models/llama", "/bands", "/requests", "/requests/r-1", "/config",
    "/debug/tasks", "/debug/memory",
)  # fmt: skip


async def administration(door: Running, path: str) -> bytes:
    client = Client(await trio.open_unix_socket(door.app.settings.server.admin_socket))
    await client.send(f"GET {path} HTTP/1.1\r\nhost: admin\r\n\r\n".encode())
    answer = await client.answer()
    await client.close()
    assert answer.status == 200, (path, answer)
    return answer.body


async def test_the_key_of_a_replica_reaches_its_engine_and_nobody_else(tmp_path: Path) -> None:
    refuses = whole(401, {"error": {"message": f"wrong key {KEY}", "type": "x", "param": None, "code": "x"}})
    async with (
        fake_engine() as engine,
        fake_engine(says(refuses)) as angry,
        collector() as to,
        router(tmp_path, config=f'[tracing]\nendpoint = "{to.url}"\n[logging]\nlevel = "debug"\n{AT_ZERO}') as door,
    ):
        plane = Plane(door)
        plane.publish(replica(engine, key=KEY))
        answer = await door.ask(chat("x-request-id: r-1", "authorization: Bearer mine"))
        assert answer.status == 200
        assert engine.asked[0].by_name["authorization"] == f"Bearer {KEY}"
        found = {path: await administration(door, path) for path in PAGES}
        assert b"llama.abcde" in found["/endpoints"] and b"llama.abcde" in found["/requests/r-1"]
        found["metrics"] = (await page(door)).encode()
        found["answer"] = answer.body + repr(answer.fields).encode()
        plane.publish(replica(angry, key=KEY))
        answer = await door.ask(chat())
        assert answer.status == 502
        found["refused"] = answer.body
        unreachable = Endpoint("llama.ccccc", "127.0.0.1", 1, models=("llama",), api_key=KEY)
        plane.publish(unreachable)
        found["unreachable"] = (await door.ask(chat("x-request-id: r-1"))).body
        found["after"] = await administration(door, "/requests/r-1")
        await door.until("the spans are here", lambda: len(to.trace_of("r-1")) >= 3)
        found["spans"] = b"".join(asked.body for asked in to.asked)
        found["log"] = door._log.getvalue().encode()
        found["repr"] = repr((unreachable, door.app.gateway.demand())).encode()
        assert [where for where, text in found.items() if KEY.encode() in text] == []
        assert b"llama.abcde" in found["spans"]


async def test_an_engine_with_a_key_is_watched_with_it(tmp_path: Path) -> None:
    keys: dict[str, str] = {}

    async def guarded(stream: trio.SocketStream) -> None:
        peer = Peer(stream)
        async with stream:
            while peer.open and (asked := await peer.request()) is not None:
                keys[asked.target] = asked.by_name.get("authorization", "")
                await peer.send(whole(200, {"object": "list", "data": [{"id": "llama", "owned_by": "it"}]}))

    async with router(tmp_path, config=AT_ZERO) as door, trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, guarded, [listener])
        port = listener.socket.getsockname()[1]
        Plane(door).publish(Endpoint("llama.abcde", "127.0.0.1", port, models=("llama",), engine="vllm", api_key=KEY))
        await door.until("it was asked for both", lambda: len(keys) == 2)
        nursery.cancel_scope.cancel()
    assert keys == {"/v1/models": f"Bearer {KEY}", "/metrics": f"Bearer {KEY}"}


@pytest.mark.parametrize("key", ["two words", "line\r\nx-more: 1", "schlüssel"])
async def test_a_key_that_cannot_stand_in_a_header_is_sent_nowhere(tmp_path: Path, key: str) -> None:
    async with fake_engine() as engine, router(tmp_path, config=AT_ZERO) as door:
        Plane(door).publish(replica(engine, key=key))
        answer = await door.ask(chat())
        assert answer.status == 502
        (record,) = records(door)
        assert [key in told for told in (answer.body.decode(), repr(record.attempts))] == [False, False]
        assert engine.asked == []


async def test_another_key_takes_over_and_keeps_the_state(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door)
        plane.publish(replica(engine, key="one"))
        assert (await door.ask(chat())).status == 200
        member = door.app.gateway.table.members["llama.abcde"]
        plane.publish(replica(engine, key="two"))
        assert (await door.ask(chat())).status == 200
        assert door.app.gateway.table.members["llama.abcde"] is member
        assert [asked.by_name["authorization"] for asked in engine.asked] == ["Bearer one", "Bearer two"]

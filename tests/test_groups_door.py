"""A router that finds groups by itself: what its clients get, and what it shows of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.fake_daemon import Daemon, fake_daemon, free_udp_port
from tests.fake_engine import DONE, Asked, FakeEngine, Peer, event, fake_engine, says, streamed
from tests.raw_client import chat, request
from tests.routers import Running, router


@asynccontextmanager
async def found(
    monkeypatch: pytest.MonkeyPatch, folder: Path, daemon: Daemon, config: str = "", **environ: str
) -> AsyncIterator[Running]:
    """A router whose only knowledge is one daemon."""
    for name, value in ({"MENTAT_DAEMONS": daemon.address, "PROBE_INTERVAL_S": "0.05"} | environ).items():
        monkeypatch.setenv(name, value)
    async with router(folder, config=config) as door:
        yield door


def url_of(engine: FakeEngine) -> str:
    return f"http://127.0.0.1:{engine.port}/v1"


async def served(door: Running, model: str = "llama") -> None:
    await door.until(f"{model} is served", lambda: door.app.gateway.table.find(model))


async def body_of(door: Running, path: str) -> Any:
    return json.loads((await door.ask(request("GET", path))).body)


async def test_with_no_configuration_a_model_appears_streams_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_udp_port()
    async with fake_engine(says(*streamed(event("a"), event("b"), DONE))) as engine, fake_daemon() as daemon:
        quiet = {"MENTAT_DAEMONS": "", "MENTAT_ANNOUNCE_PORT": str(port)}
        async with found(monkeypatch, tmp_path, daemon, **quiet) as door:
            answer = await door.ask(chat())
            assert (answer.status, json.loads(answer.body)["error"]["code"]) == (404, "model_not_found")
            daemon.announce(port)
            await door.until("the daemon is watched", lambda: door.told("daemon is watched"))
            daemon.group("glm", openai=url_of(engine), actors=["running"])
            await daemon.tell()
            await served(door)
            answer = await door.ask(chat(stream=True))
            assert answer.status == 200
            assert b"data: [DONE]" in answer.body
            (entry,) = (await body_of(door, "/v1/models"))["data"]
            assert (entry["id"], entry["owned_by"]) == ("llama", "glm")
            daemon.groups.clear()
            await daemon.tell()
            await door.until("it is gone", lambda: not door.app.gateway.table.find("llama"))
            assert (await door.ask(chat())).status == 404
            assert (
                len(
                    door.told(
                        "announcements are believed without a signature: anybody on an allowed network can announce"
                    )
                )
                == 1
            )


async def test_a_model_that_is_not_ready_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_engine(says(*streamed(event("a"), DONE))) as engine, fake_daemon() as daemon:
        group = daemon.group("glm", openai=url_of(engine), actors=["running"])
        async with found(monkeypatch, tmp_path, daemon) as door:
            await served(door)
            group.actors = ["dead"]
            await daemon.tell()
            await door.until("it is gated", lambda: door.app.gateway.table.gated)
            answer = await door.ask(chat())
            error = json.loads(answer.body)["error"]
            assert (answer.status, error["code"]) == (503, "model_not_ready")
            assert error["message"] == "the model 'llama' is not ready: no running actors"
            assert (await body_of(door, "/v1/models"))["data"] == []
            answer = await door.ask(chat(model="glm"))
            assert answer.status == 404  # it is the group's name, and nothing says that a model is called so


async def test_the_status_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_engine(says()) as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine), provider="vllm")
        daemon.group("shut", openai=url_of(engine), actors=["spawning"])
        async with found(monkeypatch, tmp_path, daemon) as door:
            await served(door)
            for path in ("/status.json", "/healthz", "/"):
                document = await body_of(door, path)
                assert document["daemons"][daemon.address]["connected"] is True
                glm, shut = document["groups"]["glm"], document["groups"]["shut"]
                assert (glm["healthy"], glm["models"], glm["provider"]) == (True, ["llama"], "vllm")
                assert (shut["healthy"], shut["models"], shut["why_not"]) == (False, None, "no running actors")
                model = document["models"]["llama"]
                assert (model["group"], model["url"]) == ("glm", url_of(engine))
                assert (document["uptime_s"], document["verify"]) == (0, False)


async def test_a_request_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(asked: Asked, peer: Peer) -> None:
        await peer.reset()

    async with fake_engine(breaks) as engine, fake_engine(breaks) as other, fake_daemon() as daemon:
        daemon.group("one", openai=url_of(engine))
        daemon.group("two", openai=url_of(other))
        async with found(monkeypatch, tmp_path, daemon) as door:
            table = door.app.gateway.table
            await door.until("both serve", lambda: (e := table.find("llama")) and len(e.members) == 2)
            answer = await door.ask(chat())
            assert answer.status == 502
            assert len(engine.asked) + len(other.asked) == 1


async def test_two_groups_of_one_name_share_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = says(*streamed(event("a"), DONE))
    async with fake_engine(script) as engine, fake_engine(script) as other, fake_daemon() as daemon:
        daemon.group("one", openai=url_of(engine))
        daemon.group("two", openai=url_of(other))
        async with found(monkeypatch, tmp_path, daemon) as door:
            table = door.app.gateway.table
            await door.until("both serve", lambda: (e := table.find("llama")) and len(e.members) == 2)
            for _ in range(30):
                assert (await door.ask(chat(stream=True))).status == 200
            assert engine.asked and other.asked
            # one that refuses connections was sent nothing, so the other may be asked
    assert len(engine.asked) + len(other.asked) == 30


@pytest.mark.parametrize("key", ["", "s3cret"])
async def test_a_group_takes_no_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    script = says(*streamed(event("a"), DONE))
    port = free_udp_port()
    async with fake_engine(script) as ours, fake_engine(script) as thief, fake_daemon() as daemon:
        daemon.group("thief", openai=url_of(thief))
        config = f'[[models]]\nname = "llama"\n[[models]]\nname = "open"\ngroups = true\naliases = ["x"]\n{ours.toml}'
        environ = {"MENTAT_ANNOUNCE_PORT": str(port), "MENTAT_SECRET": key, "MENTAT_DAEMONS": ""}
        async with found(monkeypatch, tmp_path, daemon, config, **environ) as door:
            daemon.announce(port, key.encode())
            await door.until("the theft is told", lambda: any("gets none" in line["event"] for line in door.log))
            for _ in range(20):
                assert (await door.ask(chat(stream=True))).status == 200
            assert (len(ours.asked), thief.asked) == (20, [])
            thief.models = ("open",)
            await door.until("the model that allows it is joined", lambda: door.app.gateway.table.find("open").members)
            assert (await door.ask(chat(model="x", stream=True))).status == 200
            assert thief.asked[-1].json()["model"] == "open"


async def test_with_a_key_an_unsigned_announcement_leads_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_udp_port()
    async with fake_engine(says()) as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        environ = {"MENTAT_ANNOUNCE_PORT": str(port), "MENTAT_SECRET": "s3cret", "MENTAT_DAEMONS": ""}
        async with found(monkeypatch, tmp_path, daemon, **environ) as door:
            for key in (b"", b"wrong"):
                daemon.announce(port, key)
            await door.until("it is told", lambda: door.told("announce_rejected"))
            assert door.app.groups is not None
            assert door.app.groups.groups.status()["daemons"] == {}
            assert daemon.reads == 0
            assert (await body_of(door, "/status.json"))["verify"] is True


async def test_root_paths_go_to_groups_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    async with fake_engine(says(answer)) as engine, fake_engine(says(answer)) as own, fake_daemon() as daemon:
        own.models = ("own",)
        daemon.group("glm", openai=url_of(engine))
        config = own.toml.replace('"llama"', '"own"')
        async with found(monkeypatch, tmp_path, daemon, config) as door:
            await served(door)
            body = json.dumps({"model": "llama"}).encode()
            got = await door.ask(request("POST", "/some/route?x=1", body=body))
            assert got.status == 200
            assert (engine.asked[-1].target, engine.asked[-1].body) == ("/some/route?x=1", body)
            got = await door.ask(request("POST", "/some/route", body=json.dumps({"model": "own"}).encode()))
            assert got.status == 404
            got = await door.ask(request("POST", "/some/route", body=b"{}"))
            assert (got.status, json.loads(got.body)["error"]["code"]) == (400, "model_missing")
            for path in ("/sleep", "/props", "/mcp/x", "/login", "/a/../b"):
                assert (await door.ask(request("POST", path, body=body))).status in (400, 404), path
            assert len(engine.asked) == 1


async def test_a_name_that_was_served_before_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_engine(says(*streamed(event("a"), DONE))) as engine, fake_daemon() as daemon:
        group = daemon.group("glm", openai=url_of(engine), actors=["running"])
        async with found(monkeypatch, tmp_path, daemon, MODEL_WAIT_S="30") as door:
            await served(door)
            group.actors = ["dead"]
            await daemon.tell()
            table = door.app.gateway.table
            await door.until("it is missed", lambda: "llama" in table.missed)
            answers = []
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    answers.append(await door.ask(chat(stream=True)))

                nursery.start_soon(ask)
                await door.until("it waits", lambda: door.app.gateway.gate.depth("llama"))
                assert (await door.ask(chat(model="never"))).status == 404  # a typo does not wait
                group.actors = ["running"]
                await daemon.tell()
            assert answers[0].status == 200


async def test_a_wait_in_vain_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_engine(says(*streamed(event("a"), DONE))) as engine, fake_daemon() as daemon:
        group = daemon.group("glm", openai=url_of(engine), actors=["running"])
        async with found(monkeypatch, tmp_path, daemon, MODEL_WAIT_S="0.3") as door:
            await served(door)
            group.actors = ["dead"]
            await daemon.tell()
            await door.until("it is missed", lambda: "llama" in door.app.gateway.table.missed)
            answer = await door.ask(chat())
            error = json.loads(answer.body)["error"]
            assert answer.status == 503
            assert "no running actors (deadline: groups.model_wait_s)" in error["message"]


@pytest.mark.parametrize(("allowed", "status"), [("10.9.9.", 403), ("local", 200), ("127.", 200)])
async def test_an_allowlist_that_was_set_is_about_clients_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, status: int
) -> None:
    async with fake_daemon() as daemon, found(monkeypatch, tmp_path, daemon, ALLOWED_SOURCES=allowed) as door:
        answer = await door.ask(request("GET", "/healthz"))
        assert answer.status == status
        if status == 403:
            assert json.loads(answer.body)["error"]["code"] == "source_not_permitted"


async def test_serving_timeout_is_the_deadline_of_groups_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(asked: Asked, peer: Peer) -> None:
        await peer.left()

    async with fake_engine(hangs) as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with found(monkeypatch, tmp_path, daemon, SERVING_TIMEOUT_S="7") as door:
            await served(door)
            answers = []
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    answers.append(await door.ask(chat()))

                nursery.start_soon(ask)
                await door.until("it is asked", lambda: engine.asked)
                (record,) = door.app.gateway.books.live.values()
                door.later(8)
            assert answers[0].status == 504
            assert json.loads(answers[0].body)["error"]["message"] == "the answer took longer than total_s"
            assert record.promises.total_s == 7
            assert door.app.gateway.promises.total_s == 1800


async def test_a_group_that_ends_takes_no_other_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = says(*streamed(event("a"), DONE))
    async with fake_engine(script) as engine, fake_engine(script) as other, fake_daemon() as daemon:
        other.models = ("other",)
        killed = daemon.group("one", openai=url_of(engine), actors=["running"])
        daemon.group("two", openai=url_of(other), actors=["running"])
        async with found(monkeypatch, tmp_path, daemon) as door:
            await served(door)
            await served(door, "other")
            killed.actors = ["dead"]
            await daemon.tell()
            await door.until("the one is gated", lambda: door.app.gateway.table.gated)
            assert (await door.ask(chat(stream=True))).status == 503
            assert (await door.ask(chat(model="other", stream=True))).status == 200
            answer = await door.ask(chat(model="neither"))
            assert answer.status == 404
            assert "available: other" in json.loads(answer.body)["error"]["message"]


async def test_comments_keep_a_slow_stream_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SSE_KEEPALIVE_S: the client has its head and comments while the engine still thinks, and then the data; a failure
    after that is an event of the stream, since the status is given away."""
    go = trio.Event()
    fails = False

    async def thinks(asked: Asked, peer: Peer) -> None:
        await go.wait()
        if fails:
            await peer.send(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\nno")
        else:
            await peer.send(*streamed(event("a"), DONE))

    async with fake_engine(thinks) as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with found(monkeypatch, tmp_path, daemon, SSE_KEEPALIVE_S="0.2") as door:
            await served(door)
            for fails in (False, True):
                go = trio.Event()
                client = await door.connect()
                await client.send(chat(stream=True))
                seen = b""
                while seen.count(b"\r\n: ") + seen.count(b"\n: ") < 2:
                    seen += await client.stream.receive_some(65536)
                assert seen.startswith(b"HTTP/1.1 200")
                go.set()
                while chunk := await client.stream.receive_some(65536) if b"0\r\n\r\n" not in seen else b"":
                    seen += chunk
                    if fails and b'"error"' in seen:
                        break
                assert (b"[DONE]" in seen) is not fails
                assert (b'"error"' in seen) is fails


async def test_a_request_never_meets_a_connection_that_is_being_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is sent once must not be lost to an engine that closes idle connections: each gets its own."""
    peers: list[Peer] = []

    async def closes_what_was_idle(asked: Asked, peer: Peer) -> None:
        if peer in peers:
            await peer.reset()
            return
        peers.append(peer)
        await peer.send(*streamed(event("a"), DONE))

    async with fake_engine(closes_what_was_idle) as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with found(monkeypatch, tmp_path, daemon) as door:
            await served(door)
            for _ in range(3):
                assert (await door.ask(chat(stream=True))).status == 200
            assert len(peers) == 3

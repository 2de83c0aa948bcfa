"""Comments that keep a silent stream's connection known to the boxes in between: only where nothing is open, and before
the first event only when asked for, since that gives the status away."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fake_engine import (
    DONE,
    LAST,
    STREAM_HEAD,
    Asked,
    Peer,
    Script,
    chunk,
    event,
    fake_engine,
    in_turn,
    says,
    streamed,
    whole,
)
from tests.raw_client import BrokenOff, Client, chat, request
from tests.routers import Running, router
from tests.test_streams_broken import ERROR

EARLY = "[deadlines]\nsse_ping_before_first_token = true"
PING = b": ping\n\n"
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


async def begun(door: Running, version: str = "1.1") -> Client:
    """A stream whose first event has arrived."""
    client = await door.connect()
    await client.send(chat(stream=True, version=version))
    await client.until(b"\r\n\r\n")
    await client.until(event("a"))
    await wait_all_tasks_blocked()
    client.buffer = b""  # the rest of the first event's framing
    return client


async def heard(client: Client) -> bytes:
    """What has arrived by now."""
    await wait_all_tasks_blocked()
    assert isinstance(client.stream, trio.SocketStream)
    taken, client.buffer = client.buffer, b""
    try:
        while data := os.read(client.stream.socket.fileno(), 1 << 16):
            taken += data
    except BlockingIOError:
        return taken
    raise AssertionError(f"the connection has ended: {taken!r}")


PLACES: dict[str, tuple[bytes, bool]] = {
    "between events": (chunk(event("a")), True),
    "within an event": (chunk(event("a") + event("b")[:30]), False),
    "within a chunk": (b"fff\r\n" + event("a"), False),
    "before the end of a chunk": (chunk(event("a"))[:-1], False),
    "within a size line": (chunk(event("a")) + b"ff", True),
    "after a lone CR": (chunk(event("a") + b"data: b\r\n\r"), True),
}


@pytest.mark.parametrize(("raw", "expected"), PLACES.values(), ids=PLACES.keys())
async def test_a_silent_stream_is_pinged_only_between_complete_events(
    tmp_path: Path, raw: bytes, expected: bool
) -> None:
    async with fake_engine(says(STREAM_HEAD, raw, then="silent")) as engine, router(tmp_path, engine) as door:
        client = await begun(door)
        await heard(client)
        door.later(14)
        assert await heard(client) == b""
        door.later(16)
        assert await heard(client) == (chunk(PING) if expected else b"")
        door.later(17)
        assert await heard(client) == b"", "the silence starts again with a ping"
        door.later(32)
        assert await heard(client) == (chunk(PING) if expected else b"")


FRAMINGS = {
    "with a length": SSE_HEAD + b"content-length: 99999\r\n\r\n" + event("a"),
    "until the end": SSE_HEAD + b"\r\n" + event("a"),
    "chunked": STREAM_HEAD + chunk(event("a")),
}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("raw", FRAMINGS.values(), ids=FRAMINGS.keys())
async def test_pings_speak_the_client_s_framing(tmp_path: Path, raw: bytes, version: str) -> None:
    async with fake_engine(says(raw, then="silent")) as engine, router(tmp_path, engine) as door:
        client = await begun(door, version)
        door.later(16)
        assert await heard(client) == (chunk(PING) if version == "1.1" else PING)


async def test_pings_do_not_put_off_the_deadline_of_a_silent_stream(tmp_path: Path) -> None:
    script = says(*streamed(event("a"), end=b""), then="silent")
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await begun(door)
        for seconds in (16, 32, 48):
            door.later(seconds)
            assert await heard(client) == chunk(PING)
        door.later(121)
        raw, _ = await client.rest()
        assert b"idle_s" in raw and b"upstream_timeout" in raw


async def test_a_full_client_is_not_pinged(tmp_path: Path) -> None:
    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunk(event("a")))
        while peer.open:
            await peer.send(chunk(event("x" * 60_000)))

    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(stream=True))
        await wait_all_tasks_blocked()
        door.later(16)
        await wait_all_tasks_blocked()
        raw = bytearray()
        while len(raw) < 3_000_000:
            piece = await client.stream.receive_some(1 << 20)
            assert piece, "the stream has ended"
            raw += piece
        assert PING not in raw


# -- before the first event --------------------------------------------------------------------------------------------


async def waiting(door: Running) -> Client:
    client = await door.connect()
    await client.send(chat(stream=True))
    await wait_all_tasks_blocked()
    return client


@pytest.mark.parametrize(
    "head", [b"", STREAM_HEAD, STREAM_HEAD + chunk(b": waiting\n\n"), STREAM_HEAD + b"fff\r\ndata: "]
)
async def test_no_comment_comes_before_the_first_event_unasked(tmp_path: Path, head: bytes) -> None:
    async with fake_engine(says(head, then="silent")) as engine, router(tmp_path, engine) as door:
        client = await waiting(door)
        door.later(16)
        assert await heard(client) == b""


@pytest.mark.parametrize(
    "head", [b"", STREAM_HEAD, STREAM_HEAD + chunk(b": waiting\n\n"), STREAM_HEAD + b"fff\r\ndata: "]
)
async def test_comments_come_before_the_first_event_when_asked_for(tmp_path: Path, head: bytes) -> None:
    async with fake_engine(says(head, then="silent")) as engine, router(tmp_path, engine, config=EARLY) as door:
        client = await waiting(door)
        door.later(14)
        assert await heard(client) == b""
        door.later(16)
        begun = await heard(client)
        assert begun.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        assert begun.endswith(b"\r\n\r\n" + chunk(PING))
        door.later(17)
        assert await heard(client) == b""
        door.later(33)
        assert await heard(client) == chunk(PING)
        door.later(601)
        raw, _ = await client.rest()
        error = json.loads(raw.partition(b"data: ")[2].partition(b"\n")[0])["error"]
        assert error["code"] == "upstream_timeout" and "first_token_s" in error["message"]
        assert LAST not in raw


class Mute:
    """A script that says nothing until the test lets it go on as `then`."""

    def __init__(self) -> None:
        self.asked = 0
        self.then: Script = says()
        self._go = trio.Event()

    async def __call__(self, asked: Asked, peer: Peer) -> None:
        self.asked += 1
        await self._go.wait()
        await self.then(asked, peer)

    def go_on(self, then: Script) -> None:
        self.then = then
        self._go.set()


FULL = {"message": "full", "type": "t", "param": None, "code": "c"}
LINES = b'{\n"error":\r\n{"message":"m","type":"t","param":null,"code":1}}'
STORIES: dict[str, tuple[tuple[bytes, ...], bytes]] = {
    "a stream": (streamed(event("a"), DONE), chunk(event("a")) + chunk(DONE) + LAST),
    "a stream with a length": (
        (SSE_HEAD + b"content-length: %d\r\n\r\n" % len(event("a") + DONE) + event("a") + DONE,),
        chunk(event("a") + DONE) + LAST,
    ),
    "a stream that begins with an error": (streamed(ERROR, DONE), chunk(ERROR)),
    "an error with a status": ((whole(503, {"error": FULL}),), b'"message": "full"'),
    "an error in no shape": ((whole(400, b"what?"),), b'"what?"'),
    "an error in lines": ((whole(400, LINES),), b"data: " + LINES.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n\n"),
    "no stream": ((whole(200, {"a": 1}),), b"upstream_failed"),
}  # fmt: skip


@pytest.mark.parametrize(("said", "wanted"), STORIES.values(), ids=STORIES.keys())
async def test_what_comes_after_the_comments_is_told_in_the_stream(
    tmp_path: Path, said: tuple[bytes, ...], wanted: bytes
) -> None:
    script = Mute()
    async with fake_engine(script) as engine, router(tmp_path, engine, config=EARLY) as door:
        client = await waiting(door)
        door.later(16)
        await heard(client)
        script.go_on(says(*said))
        if wanted.endswith(LAST):
            assert await client.until(LAST) == wanted
            await client.send(request("GET", "/v1/models"))
            assert (await client.answer()).json()["object"] == "list", "the connection is out of step"
        else:
            raw, _ = await client.rest()
            assert wanted in raw and raw.startswith(b"%x\r\ndata: " % int(raw.partition(b"\r\n")[0], 16))
            assert LAST not in raw and b"[DONE]" not in raw
            (record,) = door.app.gateway.books.recent(5)
            assert record.outcome == "cut"
        assert len(engine.asked) == 1, "comments have reached the client: nothing may be tried again"


async def test_an_answer_within_the_time_is_as_without_the_setting(tmp_path: Path) -> None:
    script = in_turn(
        says(*streamed(ERROR.replace(b"500", b"400"))), says(*streamed(event("a"), DONE)), says(whole(400, {}))
    )
    async with fake_engine(script) as engine, router(tmp_path, engine, config=EARLY) as door:
        assert (await door.ask(chat(stream=True))).status == 400
        assert (await door.ask(chat(stream=True))).body == event("a") + DONE
        assert (await door.ask(chat(stream=True))).status == 400


async def test_a_body_that_is_no_stream_gets_no_comment(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ntransfer-encoding: chunked\r\n\r\n"
    async with (
        fake_engine(says(head, chunk(b"RIFF"), then="silent")) as engine,
        router(tmp_path, engine, config=EARLY) as door,
    ):
        client = await waiting(door)
        await client.until(b"RIFF")
        await heard(client)
        door.later(16)
        assert await heard(client) == b""


async def test_a_route_without_streams_of_events_gets_none_either(tmp_path: Path) -> None:
    """Speech may be asked for with `stream`, and comments would be its first sound."""
    async with fake_engine(Mute()) as engine, router(tmp_path, engine, config=EARLY) as door:
        client = await door.connect()
        await client.send(chat(target="/v1/audio/speech", stream=True))
        await wait_all_tasks_blocked()
        door.later(16)
        assert await heard(client) == b""


async def test_waiting_for_a_place_is_silence_too(tmp_path: Path) -> None:
    """The queue is where the longest silences are. What it refuses is told in the stream then."""
    async with fake_engine(Mute()) as engine:
        engine.capacity = 1
        async with router(tmp_path, engine, config=EARLY) as door:
            clients = [await waiting(door) for _ in range(8)]
            assert len(engine.asked) < 8
            door.later(16)
            for client in clients:
                assert (await heard(client)).endswith(chunk(PING))


async def test_a_client_without_chunks_gets_them_bare(tmp_path: Path) -> None:
    for said in (streamed(event("a"), DONE), streamed(ERROR, DONE)):
        script = Mute()
        folder = tmp_path / str(len(said[1]))
        folder.mkdir()
        async with fake_engine(script) as engine, router(folder, engine, config=EARLY) as door:
            client = await door.connect()
            await client.send(chat(stream=True, version="1.0"))
            await wait_all_tasks_blocked()
            door.later(16)
            assert (await heard(client)).endswith(b"\r\n\r\n" + PING)
            script.go_on(says(*said))
            raw, how = await client.rest()
            assert (raw, how) in ((event("a") + DONE, "closed"), (ERROR, "reset"))


async def test_a_client_that_leaves_while_it_is_pinged_is_noticed(tmp_path: Path) -> None:
    script = Mute()
    async with fake_engine(script) as engine, router(tmp_path, engine, config=EARLY) as door:
        client = await waiting(door)
        door.later(16)
        await client.reset()
        door.later(32)
        await door.until("the request has ended", lambda: not door.app.gateway.books.live)


async def test_a_stream_that_breaks_after_comments_is_aborted(tmp_path: Path) -> None:
    script = Mute()
    async with fake_engine(script) as engine, router(tmp_path, engine, config=EARLY) as door:
        client = await waiting(door)
        door.later(16)
        script.go_on(says(then="reset"))
        with pytest.raises(BrokenOff) as broken:
            await client.answer("POST")
        body = broken.value.args[0].body
        assert body.startswith(PING + b"data: ") and b"upstream_failed" in body

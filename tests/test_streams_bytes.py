"""Event streams arrive as the engine sent them, wherever its bytes are cut and whatever framing they come in."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fake_engine import DONE, LAST, STREAM_HEAD, Asked, Peer, Script, chunk, event, fake_engine, says
from tests.raw_client import WITHIN_S, chat
from tests.routers import router

TEXT = "häuser ☃ \N{GRINNING FACE} "
EVENTS = (b": a comment first\n\n", event(TEXT), b"event: x\nid: 7\ndata: one\ndata: two\n\n", event("b"), DONE)
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def with_line_ends(line_end: bytes) -> bytes:
    return b"".join(EVENTS).replace(b"\n", line_end)


def apart(*pieces: bytes) -> Script:
    """Send each piece, and the next one only when the router has done with it all it can."""

    async def script(asked: Asked, peer: Peer) -> None:
        for piece in pieces:
            await peer.send(piece)
            await wait_all_tasks_blocked()

    return script


LINE_ENDS = {"LF": b"\n", "CRLF": b"\r\n", "CR": b"\r"}


@pytest.mark.parametrize("line_end", LINE_ENDS.values(), ids=LINE_ENDS.keys())
async def test_a_stream_may_be_cut_at_every_position(tmp_path: Path, line_end: bytes) -> None:
    payload = with_line_ends(line_end)
    middle = len(payload) // 2 + 3
    framed = chunk(payload[:middle]) + chunk(payload[middle:]) + LAST
    raw = STREAM_HEAD + framed
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        for at in range(1, len(raw)):
            engine.script = apart(raw[:at], raw[at:])
            await client.send(chat(stream=True))
            head = await client.until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"transfer-encoding: chunked" in head
            assert await client.until(LAST) == framed, f"cut at {at}"
        assert engine.connections <= 2
        await wait_all_tasks_blocked()  # the last bytes leave before the books are closed
        assert {record.outcome for record in door.app.gateway.books.recent(5000)} == {"ok"}


@pytest.mark.parametrize("line_end", LINE_ENDS.values(), ids=LINE_ENDS.keys())
@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_a_stream_may_come_in_crumbs(tmp_path: Path, line_end: bytes, size: int) -> None:
    """Crumbs of the connection, and crumbs of one byte as chunks of their own, which cut code points."""
    payload = with_line_ends(line_end)
    framed = b"".join(chunk(payload[at : at + size]) for at in range(0, len(payload), size)) + LAST
    raw = STREAM_HEAD + framed
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    async with fake_engine(apart(*pieces)) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(stream=True))
        await client.until(b"\r\n\r\n")
        assert await client.until(LAST) == framed


FRAMINGS = {
    "chunked": (STREAM_HEAD, lambda payload: chunk(payload[:9]) + chunk(payload[9:]) + LAST, "keep"),
    "with a length": (SSE_HEAD + b"content-length: %d\r\n\r\n", lambda payload: payload, "keep"),
    "until the end": (SSE_HEAD + b"\r\n", lambda payload: payload, "close"),
    "until the end, in HTTP/1.0": (SSE_HEAD.replace(b"1.1", b"1.0") + b"\r\n", lambda payload: payload, "close"),
}  # fmt: skip


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("size", [1, 5, 10_000])
async def test_every_framing_reaches_every_client(tmp_path: Path, framing: str, version: str, size: int) -> None:
    head, frame, then = FRAMINGS[framing]
    payload = with_line_ends(b"\n")
    raw = (head % len(payload) if b"%d" in head else head) + frame(payload)
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    async with fake_engine(says(*pieces, then=then)) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(stream=True, version=version))
        assert answer.status == 200
        assert answer.body == payload
        assert answer.fields["content-type"] == "text/event-stream"
        # never the engine's length: a stream that turns out incomplete must be able to end improperly
        assert "content-length" not in answer.fields
        await wait_all_tasks_blocked()
        assert [record.outcome for record in door.app.gateway.books.recent(5)] == ["ok"]


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b": a comment\n\n" + event("a") + DONE, 200),
        (event("a") + DONE, 200),
        (DONE, 200),
        (b'data: {"error": {"message": "m", "code": 400}}\n\n', 400),
        (b": a comment\n\n" + b'data: {"error": {"message": "m", "code": 503}}\n\n', 503),
    ],
)
async def test_a_stream_may_begin_with_a_byte_order_mark(tmp_path: Path, said: bytes, status: int) -> None:
    raw = STREAM_HEAD + chunk(b"\xef\xbb\xbf" + said) + LAST
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        for at in (len(STREAM_HEAD), len(STREAM_HEAD) + 5, len(raw)):
            engine.script = apart(raw[:at], raw[at:])
            answer = await door.ask(chat(stream=True))
            assert answer.status == status
            assert status != 200 or answer.body == b"\xef\xbb\xbf" + said


async def test_many_events_in_one_segment_pass_as_one(tmp_path: Path) -> None:
    events = [event(f"{number} ") for number in range(500)]
    raw = STREAM_HEAD + b"".join(chunk(data) for data in events) + chunk(DONE) + LAST
    async with fake_engine(says(raw)) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(stream=True))
        assert answer.body == b"".join(events) + DONE
        await wait_all_tasks_blocked()
        (record,) = door.app.gateway.books.recent(5)
        assert record.tally is not None and record.tally.content_events == 500


async def test_an_event_of_megabytes_passes(tmp_path: Path) -> None:
    """A generated picture: larger than all that is held back or looked at."""
    large = b'data: {"b64_json":"' + b"0123456789abcdef" * 200_000 + b'"}\n\n'
    pieces = [chunk(large[at : at + 60_000]) for at in range(0, len(large), 60_000)]
    async with (
        fake_engine(says(STREAM_HEAD, *pieces, chunk(DONE), LAST)) as engine,
        router(tmp_path, engine) as door,
    ):
        answer = await door.ask(chat(stream=True))
        assert answer.body == large + DONE
        await wait_all_tasks_blocked()
        assert [record.outcome for record in door.app.gateway.books.recent(5)] == ["ok"]


async def test_events_pass_as_they_come(tmp_path: Path) -> None:
    """Each before the next one exists; and the head not before the first event."""
    go = trio.Event()

    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        await wait_all_tasks_blocked()
        assert not client.buffer
        await peer.send(chunk(b": comments begin nothing\n\n"))
        await wait_all_tasks_blocked()
        await peer.send(chunk(event("a")))
        await go.wait()
        await peer.send(chunk(event("b")), chunk(DONE), LAST)

    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(stream=True))
        assert b": comments" in await client.until(chunk(event("a")))
        go.set()
        assert await client.until(LAST) == chunk(event("b")) + chunk(DONE) + LAST


async def test_a_slow_reader_gets_all_and_holds_the_engine_back(tmp_path: Path) -> None:
    text = "x" * 4000
    sent = 0

    async def script(asked: Asked, peer: Peer) -> None:
        nonlocal sent
        await peer.send(STREAM_HEAD)
        for _ in range(5000):
            await peer.stream.send_all(chunk(event(text)))
            sent += 1
        await peer.send(chunk(DONE), LAST)

    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(stream=True))
        await client.until(b"\r\n\r\n")
        await wait_all_tasks_blocked()
        assert 0 < sent < 5000, "20 MB went somewhere"
        body = bytearray(client.buffer)
        with trio.fail_after(WITHIN_S):
            while not body.endswith(chunk(DONE) + LAST):
                piece = await client.stream.receive_some(1 << 20)
                assert piece, "the stream has ended"
                body += piece
        assert bytes(body) == chunk(event(text)) * 5000 + chunk(DONE) + LAST


async def test_the_access_log_counts_all_that_left(tmp_path: Path) -> None:
    """The pump puts bytes on the client's socket itself, past the reply that counts them."""
    config = "[server]\naccess_log = true\n"
    events = [event(f"{number}" * 5000) for number in range(50)]
    script = apart(STREAM_HEAD, *(chunk(data) for data in events), chunk(DONE), LAST)
    async with fake_engine(script) as engine, router(tmp_path, engine, config=config) as door:
        client = await door.connect()
        await client.send(chat("connection: close", stream=True))
        raw, _ = await client.rest()
        await wait_all_tasks_blocked()
        (line,) = door.told("request")
        assert line["bytes"] == len(raw)

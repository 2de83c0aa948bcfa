"""The link: its messages as bytes, its ends in memory and over real sockets."""

from __future__ import annotations

import math
import ssl
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts import hardware, link
from appliance.facts.catalog import Profile
from appliance.facts.link import Beat, LogLines, Register, Start, Stop, Trouble, Welcome
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.wire import messages
from appliance.wire import websocket as wire
from appliance.wire.calls import answer, call, shake_hands
from appliance.wire.link import (
    MAX_MESSAGE_BYTES,
    Link,
    LinkClosed,
    LinkRefused,
    Malformed,
    UnknownMessage,
    Unsendable,
    decode,
    encode,
    memory_links,
)
from appliance.wire.websocket import SocketLink
from tests.link_authority import Authority

SHARD = Shard("m.abcde", "m", Profile("p", "sim", gpus_per_node=2), node="node-a", gpus=("G0", "G1"), key="k" * 40)
REPORT = Report(SHARD, "failed", 12.5, reason="it left", exit="exit status 3", tail=("a", "b"), ports=(20001,))


def inventory() -> hardware.Inventory:
    """As large as a node may be: 16 GPUs, 16 adapters with full tables."""
    gids = tuple(hardware.Gid(n, f"fe80::{n:x}:1234:5678:9abc", "v2", f"enp{n}s0") for n in range(256))
    port = hardware.Port(1, "active", "linkup", "ethernet", 400.0, gids)
    return hardware.Inventory(
        "node-a",
        "10.0.0.1",
        gpus=tuple(hardware.Gpu(f"GPU-{n:032d}", n, "NVIDIA H100 80GB HBM3", "h100-80g", 80 << 30) for n in range(16)),
        adapters=tuple(hardware.RdmaAdapter(f"mlx5_{n}", "ca", 0, (port,)) for n in range(16)),
    )


def register(reports: int = 1, tail: tuple[str, ...] = ("a",)) -> Register:
    whole = attrs.evolve(REPORT, tail=tail)
    return Register(1, "1.0", "node-a", "boot", 1.5, inventory(), (20000, 24999), (whole,) * reports)


MESSAGES: tuple[link.Message, ...] = (
    register(),
    link.Look(inventory()),
    link.News((REPORT,), ("m.abcde/0",)),
    LogLines("1", ("a", "b"), True, "all"),
    link.Renew("PEM"),
    Welcome(1, "1.0", 2.5, 5.0, 20.0),
    link.Refused("wrong_name", "certificate says node-a, agent claims node-b"),
    Start(SHARD),
    Stop("m.abcde/0", 30.0, "scaled down"),
    link.Forget("m.abcde/0"),
    link.AskLog("1", "m.abcde/0", 100, True),
    link.EndLog("1"),
    link.Renewed("PEM"),
    Beat(3.5),
    Trouble("what?"),
)


# -- the codec ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_every_message_comes_back_as_it_was(message: link.Message) -> None:
    assert decode(encode(message)) == message


def test_every_message_there_is_has_a_word() -> None:
    known = set(typing.get_args(link.Message))
    assert set(messages.TYPES.values()) == known == {type(each) for each in MESSAGES}


def test_what_a_later_version_adds_is_passed_over() -> None:
    data = msgspec.json.encode({"type": "beat", "body": {"clock": 1.0, "mood": "good"}, "since": 3})
    assert decode(data) == Beat(1.0)
    with pytest.raises(UnknownMessage, match="'dance'"):
        decode(b'{"type": "dance", "body": {"steps": 3}}')
    with pytest.raises(UnknownMessage):
        decode(b'{"type": "dance"}')


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"[]",
        b'{"type": 3}',
        b'{"body": {}}',
        b'{"type": "beat"}',
        b'{"type": "beat", "body": {"clock": "noon"}}',
        b'{"type": "beat", "body": [1]}',
        b'{"type": "beat", "body": {"clock": 1.0}} trailing',
        b'{"type": "start", "body": {"shard": {"replica": "r"}}}',
        b'{"type": "trouble", "body": {"message": "\xff"}}',
        b'{"type": "beat", "body": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    ],
    ids=range(12),
)
def test_what_is_no_message_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode(data)


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_else(data: bytes) -> None:
    with pytest.raises((Malformed, UnknownMessage)):
        decode(data)


def test_a_registration_of_two_hundred_shards_with_full_tails_fits() -> None:
    tail = tuple("\x1b[31m" + "x" * 200 for _ in range(500))
    data = encode(register(200, tail))
    assert len(data) < MAX_MESSAGE_BYTES
    came = decode(data)
    assert isinstance(came, Register) and len(came.reports) == 200
    kept = came.reports[7].tail
    assert 50 < len(kept) < 500 and kept == tail[-len(kept) :]


def test_a_line_longer_than_a_tail_is_left_out_and_short_ones_stay() -> None:
    assert messages._last(("x" * 100, "yy", "z"), 10) == ("yy", "z")
    assert messages._last(("yy", "z"), 100) == ("yy", "z")
    assert messages._last(("yy", "z"), 0) == ()


def test_more_shards_than_fit_go_without_tails_and_still_more_not_at_all() -> None:
    tail = tuple("x" * 1000 for _ in range(16))
    came = decode(encode(register(600, tail)))
    assert isinstance(came, Register) and len(came.reports) == 600 and not any(each.tail for each in came.reports)
    with pytest.raises(Unsendable, match="register has"):
        encode(register(20_000))


def test_what_is_not_text_cannot_be_sent() -> None:
    with pytest.raises(Unsendable, match="trouble"):
        encode(Trouble("half a pair \ud800"))


# -- both kinds of link ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def in_memory(tmp_path: Path) -> AsyncIterator[tuple[Link, Link]]:
    ours, theirs = memory_links()
    try:
        yield ours, theirs
    finally:
        await ours.aclose()
        await theirs.aclose()


@asynccontextmanager
async def over_tls(tmp_path: Path) -> AsyncIterator[tuple[Link, Link]]:
    authority = Authority(tmp_path)
    async with listening(authority.server()) as (url, accepted), call(url, authority.client()) as ours:
        yield ours, await accepted()


@asynccontextmanager
async def listening(
    context: ssl.SSLContext | None, reply: bytes | None = None
) -> AsyncIterator[tuple[str, Callable[[], Awaitable[SocketLink]]]]:
    """A server that upgrades whatever calls, or gives each a fixed reply. Yields its URL and the next link."""
    made, coming = trio.open_memory_channel[SocketLink](8)
    opened: list[SocketLink] = []

    async def serve(tcp: trio.SocketStream) -> None:
        stream: trio.abc.Stream = tcp
        try:
            if context is not None:
                stream = await shake_hands(tcp, context, "agent")
            head = b""
            while b"\r\n\r\n" not in head:
                if not (more := bytes(await stream.receive_some(65536))):
                    return
                head += more
            if reply is not None:
                await stream.send_all(reply)
                return
            accepted = await answer(stream, head, "agent")
            opened.append(accepted)
            made.send_nowait(accepted)
            await trio.sleep_forever()
        except (trio.BrokenResourceError, LinkRefused):
            return
        finally:
            await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        yield f"{'wss' if context else 'ws'}://127.0.0.1:{port}", coming.receive
        nursery.cancel_scope.cancel()


KINDS = pytest.mark.parametrize("kind", [in_memory, over_tls], ids=["memory", "tls"])
Kind = Callable[[Path], typing.AsyncContextManager[tuple[Link, Link]]]


@KINDS
async def test_messages_go_both_ways_in_order(kind: Kind, tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with kind(tmp_path) as (agent, plane):
            for sender, receiver in ((agent, plane), (plane, agent)):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_send_all, sender, MESSAGES)
                    for message in MESSAGES:
                        assert await receiver.receive() == message


@KINDS
async def test_what_was_sent_before_the_end_arrives_and_then_the_end(kind: Kind, tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with kind(tmp_path) as (agent, plane):
            await plane.send(link.Refused("revoked", "the certificate of node-a was revoked"))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(plane.aclose, "revoked")
                assert isinstance(await agent.receive(), link.Refused)
                with pytest.raises(LinkClosed):
                    await agent.receive()
                with pytest.raises(LinkClosed):
                    await agent.send(Beat(1.0))
            with pytest.raises(LinkClosed):
                await plane.send(Beat(1.0))
            with pytest.raises(LinkClosed):
                await plane.receive()
            await plane.aclose()


@KINDS
async def test_a_peer_that_does_not_read_holds_its_sender_until_the_senders_deadline(
    kind: Kind, tmp_path: Path
) -> None:
    with trio.fail_after(20):
        async with kind(tmp_path) as (agent, _plane):
            await _fill(agent)
            if isinstance(agent, SocketLink):  # half a frame is on its way: nothing may follow it
                with pytest.raises(LinkClosed, match="broken off"):
                    await agent.send(Beat(1.0))
            with trio.fail_after(1):
                await agent.aclose()


@KINDS
async def test_a_cancelled_receive_loses_nothing(kind: Kind, tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with kind(tmp_path) as (agent, plane):
            with trio.move_on_after(0.02):
                await plane.receive()
            await agent.send(Beat(1.0))
            assert await plane.receive() == Beat(1.0)


# -- over sockets ------------------------------------------------------------------------------------------------------


async def test_the_reason_of_an_end_is_told(tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with over_tls(tmp_path) as (agent, plane), trio.open_nursery() as nursery:
            nursery.start_soon(plane.aclose, "node-a sent what is no message: " + "ü" * 100)
            with pytest.raises(LinkClosed, match="ended the link: node-a sent what is no message: üüü"):
                await agent.receive()


async def test_many_send_at_once_on_one_link(tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with over_tls(tmp_path) as (agent, plane), trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(agent.send, LogLines(str(number), ("x" * 500_000,)))
            await trio.testing.wait_all_tasks_blocked(0.05)  # all of them wait for room by now
            came = {typing.cast(LogLines, await plane.receive()).request for _ in range(8)}
            assert came == {str(number) for number in range(8)}


async def test_two_that_part_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CLOSE_S", 60.0)
    with trio.fail_after(10):
        async with over_tls(tmp_path) as (agent, plane), trio.open_nursery() as nursery:
            nursery.start_soon(plane.aclose)
            with pytest.raises(LinkClosed):
                await agent.receive()
            await agent.aclose()


async def test_a_connection_cut_in_the_middle_is_an_end(tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with over_tls(tmp_path) as (agent, plane):
            await trio.aclose_forcefully(typing.cast(SocketLink, plane)._stream)
            with pytest.raises(LinkClosed):
                await agent.receive()


async def test_a_message_above_the_bound_ends_the_link_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trio.fail_after(20):
        async with over_tls(tmp_path) as (agent, plane):
            monkeypatch.setattr(wire, "encode", lambda message: b"x" * (MAX_MESSAGE_BYTES + 1))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send_until_closed, agent)
                with pytest.raises(LinkClosed, match="more than 8388608 bytes"):
                    await plane.receive()
                with pytest.raises(LinkClosed, match="more than 8388608 bytes"):
                    await agent.receive()


async def _fill(link: Link) -> None:
    """Send until nothing more is taken, and break that last send off."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_send_for_ever, link)
        await trio.testing.wait_all_tasks_blocked(0.05)
        nursery.cancel_scope.cancel()


async def _send_for_ever(link: Link) -> None:
    while True:
        await link.send(LogLines("1", ("x" * 100_000,)))


async def _send_all(link: Link, messages: Iterable[link.Message]) -> None:
    for message in messages:
        await link.send(message)


async def _send_until_closed(link: Link) -> None:
    try:
        await link.send(Beat(1.0))
    except LinkClosed:
        return


async def test_bytes_that_are_no_websocket_end_the_link(tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with over_tls(tmp_path) as (agent, plane):
            await typing.cast(SocketLink, agent)._stream.send_all(b"\xff" * 64)
            with pytest.raises(LinkClosed, match="not a WebSocket"):
                await plane.receive()


async def test_a_malformed_message_is_raised_and_an_unknown_one_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trio.fail_after(10):
        async with over_tls(tmp_path) as (agent, plane):
            real = wire.encode
            monkeypatch.setattr(wire, "encode", lambda message: b'{"type": "dance"}')
            await agent.send(Beat(1.0))
            with pytest.raises(UnknownMessage):
                await plane.receive()
            monkeypatch.setattr(wire, "encode", lambda message: b"dance")
            await agent.send(Beat(1.0))
            with pytest.raises(Malformed):
                await plane.receive()
            monkeypatch.setattr(wire, "encode", real)
            await agent.send(Beat(2.0))
            assert await plane.receive() == Beat(2.0)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 8\r\n\r\nnot here", "HTTP 404: not here"),
        (b"HTTP/1.1 503 Busy\r\nconnection: close\r\n\r\nfull", "HTTP 503: full"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "Bad HTTP message"),
        (b"", "closed the connection"),
    ],
)
async def test_what_http_says_against_a_call_is_told(reply: bytes, said: str) -> None:
    with trio.fail_after(10):
        async with listening(None, reply) as (url, _):
            with pytest.raises(LinkRefused, match=said):
                async with call(url):
                    raise AssertionError("no link")


async def test_what_tls_says_against_a_call_is_told(tmp_path: Path) -> None:
    ours, foreign = Authority(tmp_path), Authority(tmp_path, "foreign")
    strict = ours.server()
    strict.verify_mode = ssl.CERT_REQUIRED
    with trio.fail_after(10):
        async with listening(strict) as (url, _):
            for context, said in (
                (ours.client(), "we showed none"),
                (ours.client(foreign.sign("node-a")), "not signed by its root"),
                (ours.client(ours.sign("node-a", expired=True)), "our certificate has expired"),
                (foreign.client(), "it was not signed by this cluster's root"),
            ):
                with pytest.raises(LinkRefused, match=said):
                    async with call(url, context):
                        raise AssertionError("no link")
        with pytest.raises(LinkRefused, match="refused"):
            async with call(url, ours.client()):
                raise AssertionError("no link")


async def test_a_server_that_says_nothing_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    with trio.move_on_after(math.inf):
        with pytest.raises(LinkRefused, match="no answer to the WebSocket upgrade within 3 s"):
            async with call(f"ws://127.0.0.1:{port}", dial_s=3.0):
                raise AssertionError("no link")
    await listeners[0].aclose()


async def test_what_is_raised_inside_a_call_comes_out_as_it_is(tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with listening(None) as (url, _):
            with pytest.raises(KeyError, match="mine"):
                async with call(url):
                    raise KeyError("mine")


async def test_a_cancelled_owner_of_a_stuck_link_ends_at_once(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with listening(None) as (url, _):
            with trio.CancelScope() as owner:
                async with call(url) as stuck:
                    await _fill(stuck)
                    owner.cancel()
                    before = trio.current_time()
                    await trio.sleep_forever()
            assert owner.cancelled_caught and trio.current_time() - before < 0.4

"""The door for nodes over real sockets and TLS: who comes in, what both sides are told, and what bad peers achieve."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio
import trio.testing

from appliance.control import links, pki
from appliance.facts.link import Beat, LogLines, Refused, Start, Welcome
from appliance.store.papers import Papers
from appliance.wire import link as wire
from appliance.wire.calls import LINK_PATH
from appliance.wire.certificates import new_key, signing_request
from appliance.wire.link import Link, LinkClosed, LinkRefused
from appliance.wire.tls import link_client_context
from tests.control_door import DAY_S, Cluster, cluster
from tests.control_scene import next_of, register, shard

# -- nodes -------------------------------------------------------------------------------------------------------------


async def test_a_node_that_joined_is_welcomed_and_told_what_to_do(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it:
        invitation = await it.joining.add("node-a", "olga", "127.0.0.1")
        token = invitation.command.split("--token ")[1].split()[0]
        key = new_key()
        body = msgspec.json.encode({"token": token, "name": "node-a", "csr": signing_request(key, "node-a")})
        head = b"POST /join HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        status, _, answer = await it.http(head + body)
        assert status == 200, answer
        given = msgspec.json.decode(answer)
        status, _, root = await it.http(b"GET /root HTTP/1.1\r\nhost: x\r\n\r\n")
        assert status == 200 and root.decode() == given["root"]
        files = [tmp_path / name for name in ("node-a.pem", "node-a.key", "node-a.root")]
        for file, text in zip(files, (given["certificate"].encode(), key, root), strict=True):
            file.write_bytes(text)
        async with it.called(link_client_context(*map(str, files))) as link:
            await link.send(register())
            assert isinstance(await link.receive(), Welcome)
            start = await next_of(link, Start)
            assert start.shard.node == "node-a" and start.shard.key
            assert it.door.links == 1 and not it.door.strangers


async def test_who_may_not_come_in_is_told_why_and_so_is_the_operator(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it:
        node_a, unknown = await it.certified("node-a"), await it.certified("node-u", known=False)
        gone = await it.certified("node-r")
        await it.plane.revoke("node-r", "olga")
        for context, name, code, words in (
            (node_a, "node-b", "wrong_name", "certificate says node-a, agent claims node-b"),
            (unknown, "node-u", "unknown", "certificate says node-u (serial"),
            (gone, "node-r", "revoked", "agent claims node-r; this certificate was revoked"),
            (it.anonymous(), "node-a", "no_certificate", "no certificate was shown, agent claims node-a"),
        ):
            for _ in range(2):
                refused = await it.refused(context, register(name))
                assert refused.code == code and words in refused.message, refused
        told = it.logged("agent refused")
        assert [each["code"] for each in told] == ["wrong_name", "unknown", "revoked", "no_certificate"]
        assert all(each["peer"].startswith("127.0.0.1:") and each["reason"] for each in told)


async def test_what_fails_in_the_handshake_is_told_on_both_sides_once(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    foreign = pki.create(Papers.of(str(tmp_path / "other")), time.time())
    async with cluster(tmp_path) as it:
        contexts = (
            (await it.certified("node-a", age_s=200 * DAY_S), "our certificate has expired"),
            (await it.certified("node-a", authority=foreign, known=False), "not"),
        )
        for context, words in contexts:
            for _ in range(2):
                with pytest.raises(LinkRefused, match=words) as refused:
                    async with it.called(context):
                        raise AssertionError("no link")
                assert refused.value.by == "tls"
        await wait_until(lambda: len(it.logged("TLS handshake failed")) >= 2)
        told = it.logged("TLS handshake failed")
        assert [each["peer"] for each in told] == ["127.0.0.1", "127.0.0.1"]
        assert ("expired" in told[0]["reason"] and "root" in told[1]["reason"]) or "signature" in told[1]["reason"]
        async with it.called(await it.certified("node-a")) as link:
            await link.send(register())
            assert isinstance(await link.receive(), Welcome)
        assert it.logged("TLS handshake succeeded again")


async def test_a_name_in_use_is_refused_to_a_second_machine_with_the_same_certificate(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it:
        context = await it.certified("node-a")
        async with it.called(context) as link:
            await link.send(register())
            assert isinstance(await link.receive(), Welcome)
            refused = await it.refused(context, register(boot_id="boot-2"))
            assert refused.code == "name_taken" and "connected from 127.0.0.1:" in refused.message
            assert it.plane.world.nodes["node-a"].connected


async def test_a_revoked_node_is_parted_with_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, it.called(await it.certified("node-a")) as link:
        await link.send(register())
        await link.receive()
        await it.plane.revoke("node-a", "olga")
        assert (await next_of(link, Refused)).code == "revoked"
        with pytest.raises(LinkClosed, match="certificate says node-a"):
            await link.receive()


async def test_a_link_that_is_stuck_holds_up_nothing_and_is_cut(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it:
        a, b = await it.certified("node-a"), await it.certified("node-b")
        async with it.called(a) as link, it.called(b) as other:
            await link.send(register())
            await other.send(register("node-b"))
            await next_of(other, Welcome)
            session = it.plane.sessions["node-a"]
            big = Start(attrs.evolve(shard(), source="x" * 1_000_000))
            while not session.ended:
                session.say(big)
                if len(session.outbox) % 512 == 0:
                    await trio.lowlevel.checkpoint()
            assert "does not read" in session.ended
            await wait_until(lambda: not it.plane.world.nodes["node-a"].connected)
            it.plane.sessions["node-b"].say(Start(shard()))
            await next_of(other, Start)


# -- strangers ---------------------------------------------------------------------------------------------------------


async def wait_until(true: Any) -> None:
    """Until something holds; the scene bounds how long."""
    while not true():  # noqa: ASYNC110
        await trio.sleep(0.01)


async def serves(it: Cluster, link: Link) -> None:
    """The agent that was there before is still served."""
    it.plane.sessions["node-a"].say(Beat(42.0))
    while await next_of(link, Beat) != Beat(42.0):
        continue


@asynccontextmanager
async def with_a_node(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Link]]:
    async with cluster(tmp_path) as it, it.called(await it.certified("node-a")) as link:
        await link.send(register())
        assert isinstance(await link.receive(), Welcome)
        yield it, link


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", 404, b"agents call"),
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 404, b"agents call"),
        (b"GET /link/ HTTP/1.1\r\nhost: x\r\n\r\n", 404, b""),
        (b"PUT /root HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", 405, b"takes GET"),
        (b"GET /link HTTP/1.1\r\nhost: x\r\n\r\n", 400, b"WebSocket"),
        (b"GET /link HTTP/1.1\r\nhost: \xff\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", 400, b""),
        (b"POST /join HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n", 413, b"at most"),
        (b"POST /join HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", 413, b"content-length"),
        (b"POST /join HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}", 400, b"expected JSON"),
        (b"hello\r\n\r\n", 400, b""),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000, 431, b""),
    ],
    ids=range(11),
)
async def test_other_requests_get_an_answer_and_the_end(
    tmp_path: Path, request_: bytes, status: int, words: bytes
) -> None:
    async with with_a_node(tmp_path) as (it, link):
        got, _, body = await it.http(request_)
        assert got == status and words in body, (got, body)
        await serves(it, link)


@pytest.mark.parametrize(
    "first",
    [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x00" * 100, b"\x16\x03\x01\xff\xff" + b"\xff" * 500],
    ids=range(3),
)
async def test_what_is_no_tls_is_ended_and_told_once(tmp_path: Path, first: bytes) -> None:
    async with with_a_node(tmp_path) as (it, link):
        for _ in range(3):
            stream = await it.tcp()
            await stream.send_all(first)
            try:
                while await stream.receive_some(65536):
                    continue
            except trio.BrokenResourceError:
                pass  # our bytes were not read: the end is a reset
            await stream.aclose()
        await wait_until(lambda: not it.door.strangers)
        assert len(it.logged("TLS handshake failed")) == 1
        await serves(it, link)


async def test_whoever_is_slow_is_ended_and_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(links, "BODY_S", 0.3)
    async with with_a_node(tmp_path) as (it, link):
        silent, slow_head, slow_body = await it.tcp(), await it.raw(), await it.raw()
        await slow_head.send_all(b"GET /root HTTP/1.1\r\nho")
        await slow_body.send_all(b"POST /join HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        await serves(it, link)
        await wait_until(lambda: not it.door.strangers)
        await serves(it, link)
        told = it.logged("TLS handshake failed")
        assert [each["reason"] for each in told] == ["it has not shaken hands within 0.3 s"]
        for stream in (silent, slow_head, slow_body):
            await trio.aclose_forcefully(stream)


async def test_an_agent_without_a_certificate_may_say_little_and_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_a_node(tmp_path) as (it, link):
        monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 64 << 20)
        async with it.called(it.anonymous()) as stranger:
            with pytest.raises(LinkClosed):
                await stranger.send(LogLines("1", ("x" * (2 << 20),)))
                await stranger.receive()
        await wait_until(lambda: it.logged("agent refused"))
        assert "was not read" in it.logged("agent refused")[0]["reason"]
        await serves(it, link)


async def test_strangers_have_little_room_and_nodes_come_in_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MOST_STRANGERS_EACH", 3)
    async with with_a_node(tmp_path) as (it, link):
        waiting = [await it.tcp() for _ in range(3)]
        await wait_until(lambda: len(it.door.strangers) == 3)
        for _ in range(2):
            turned_away = await it.tcp()
            with trio.move_on_after(5) as bound:
                with suppress(trio.BrokenResourceError):
                    assert await turned_away.receive_some(10) == b""
            assert not bound.cancelled_caught
        assert len(it.logged("connection refused")) == 1
        await serves(it, link)
        for stream in waiting:
            await stream.aclose()
        await wait_until(lambda: not it.door.strangers)
        async with it.called(await it.certified("node-b")) as other:
            await other.send(register("node-b"))
            assert isinstance(await other.receive(), Welcome)


async def test_silent_strangers_make_way_for_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_STRANGERS_EACH", 3)
    monkeypatch.setattr(links, "SLOW_S", 0.0)
    async with with_a_node(tmp_path) as (it, link):
        waiting = []
        for number in range(1, 4):
            waiting.append(await it.tcp())
            await wait_until(lambda number=number: len(it.door.strangers) == number)
        async with it.called(await it.certified("node-b")) as other:
            await other.send(register("node-b"))
            assert isinstance(await other.receive(), Welcome)
        with trio.fail_after(5), suppress(trio.BrokenResourceError):
            assert await waiting[0].receive_some(10) == b""
        assert len(it.door.strangers) == 2 and not it.logged("fault of a connection")
        await serves(it, link)
        for stream in waiting:
            await stream.aclose()
        await wait_until(lambda: not it.door.strangers)


async def test_bad_bytes_on_a_nodes_link_end_that_link_alone(tmp_path: Path) -> None:
    async with with_a_node(tmp_path) as (it, link):
        async with it.called(await it.certified("node-b")) as other:
            await other.send(register("node-b"))
            await next_of(other, Welcome)
            await other._stream.send_all(b"\xff" * 100)  # type: ignore[attr-defined]
            with pytest.raises(LinkClosed):
                await next_of(other, Refused)
        await wait_until(lambda: not it.plane.world.nodes["node-b"].connected)
        await serves(it, link)


async def test_a_handshake_that_is_cancelled_leaves_no_count_behind(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it:
        streams = [await it.tcp() for _ in range(5)]
        await wait_until(lambda: len(it.door.strangers) == 5)
    for stream in streams:  # the scene's end has asserted that nothing is left
        await stream.aclose()
    assert LINK_PATH == "/link"

"""Announcements over real sockets: who leads to a daemon, who is passed over, and what a flood costs."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import trio

from appliance.groups import listen, watch
from appliance.rules.groups.daemons import MOST_WATCHED
from appliance.rules.groups.once import MOST_SOURCES
from appliance.wire import datagram
from tests.fake_daemon import Daemon, engine_at, fake_daemon, free_udp_port, send
from tests.groups_scene import Scene, scene, until

KEY = b"s3cret"


def port_of(found: Scene) -> int:
    return found.groups.listener.port


async def heard(found: Scene, count: int) -> None:
    await until(f"{count} datagrams were read", lambda: found.groups.listener.read >= count)


@pytest.mark.parametrize("form", ["v1", "v2", "proto", "ours"])
async def test_each_form_leads_to_its_daemon(form: str) -> None:
    key = b"" if form == "v1" else KEY
    async with engine_at("m") as engine, fake_daemon() as daemon, scene(key, udp=True) as found:
        daemon.group("glm", openai=engine.url)
        payload = daemon.payload()
        if form == "v1":
            data = json.dumps(payload | {"mentat_announce": 1}).encode()
        elif form == "ours":
            data = datagram.build(payload, KEY)
        else:
            payload |= {"mentat_announce": 2} if form == "v2" else {"proto": "0.99"}
            data = json.dumps({"p": payload, "sig": datagram.sign(payload, KEY)}).encode()
        send(data, port_of(found))
        await found.serving("m")
        row = found.status["daemons"][daemon.address]
        assert (row["node_id"], row["seed"], row["error"]) == ("N1", False, None)
        assert found.status["verify"] is bool(key)


async def test_a_daemon_on_this_machine_has_the_same_port() -> None:
    port = free_udp_port()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("0.0.0.0", port))
        async with scene(announce_port=port) as found:
            assert port_of(found) == port
            assert found.told("announce_listen_failed") == []


async def test_a_port_that_cannot_be_had_leaves_the_rest_at_work() -> None:
    async with engine_at("m") as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=engine.url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("0.0.0.0", 0))
            async with scene(announce_port=other.getsockname()[1], daemons=[daemon.address]) as found:
                assert len(found.told("announce_listen_failed")) == 1
                await found.serving("m")


async def test_no_port_means_no_ear() -> None:
    async with scene() as found:
        assert port_of(found) == 0


async def test_one_byte_too_many() -> None:
    async with fake_daemon() as daemon, scene(udp=True) as found:
        for length in (datagram.MOST_BYTES + 1, datagram.MOST_BYTES + 400):
            send(b" " * length, port_of(found))
        await heard(found, 2)
        (line,) = found.told("announce_oversize")
        assert line["source"] == "127.0.0.1"
        whole = json.dumps(daemon.payload() | {"mentat_announce": 1}).encode()
        send(whole.ljust(datagram.MOST_BYTES), port_of(found))
        await until("one of exactly the limit is heard", lambda: daemon.address in found.status["daemons"])


async def test_what_is_told_and_what_is_not() -> None:
    async with fake_daemon() as daemon, scene(KEY, udp=True) as found:
        port = port_of(found)
        for _ in range(3):
            daemon.announce(port, b"wrong")
            daemon.announce(port, b"wrong", universe="elsewhere")
            daemon.announce(port, KEY, universe="elsewhere")
            daemon.announce(port, KEY, t=1_000_000_000)
            send(b"garbage", port)
        await heard(found, 15)
        assert [line["event"] for line in found.log if line["event"].startswith("announce")] == [
            "announce_rejected",
            "announce_stale",
        ]
        assert found.status["daemons"] == {}
        daemon.announce(port, KEY)
        await until("the right one is heard", lambda: found.status["daemons"])


async def test_a_replayed_datagram_changes_nothing() -> None:
    async with fake_daemon() as daemon, scene(KEY, udp=True) as found:
        data = datagram.build(daemon.payload(http="127.0.0.1:9"), KEY)
        send(data, port_of(found))
        await until("it is heard", lambda: found.status["daemons"])
        found.groups.daemons.all.clear()
        send(data, port_of(found))
        await heard(found, 2)
        assert found.status["daemons"] == {}


async def test_a_source_that_is_not_allowed() -> None:
    async with fake_daemon() as daemon, scene(udp=True, allowed_sources=["127.0.0.1"]) as found:
        for _ in range(2):
            send(datagram.build(daemon.payload()), port_of(found), "127.0.0.2")
        await heard(found, 2)
        (line,) = found.told("announce_source_not_allowed")
        assert line["source"] == "127.0.0.2"
        send(datagram.build(daemon.payload()), port_of(found), "127.0.0.1")
        await until("the allowed one is heard", lambda: found.status["daemons"])


async def test_a_moved_daemon_is_found_at_its_new_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PAUSE_S", 0.02)
    async with engine_at("m") as engine, scene(udp=True) as found:
        async with fake_daemon() as daemon:
            daemon.group("glm", openai=engine.url)
            daemon.announce(port_of(found))
            await found.serving("m")
        await until("it is missed", lambda: found.told("daemon does not answer"))
        async with fake_daemon() as daemon:
            daemon.group("glm", openai=engine.url)
            daemon.announce(port_of(found))
            await until("it is watched again", lambda: len(found.told("daemon is watched")) == 2)
            (row,) = found.status["daemons"].values()
            assert row["error"] is None


async def test_a_silent_daemon_is_forgotten() -> None:
    async with scene(udp=True, model_ttl_s=50.0) as found:
        async with fake_daemon() as daemon:
            daemon.announce(port_of(found))
            await until("it is watched", lambda: found.told("daemon is watched"))
        found.later(51)
        await until("it is forgotten", lambda: not found.status["daemons"])


# -- floods: counts, not times -----------------------------------------------------------------------------------------


def flood(port: int, datagrams: list[bytes], count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for i in range(count):
            sock.sendto(datagrams[i % len(datagrams)], ("127.0.0.1", port))


@pytest.mark.parametrize("kind", ["garbage", "foreign", "unsigned", "oversize"])
async def test_a_flood_is_read_in_bounded_batches_and_told_once(kind: str) -> None:
    other = Daemon(port=9)
    many = {
        "garbage": [b"x" * 40, b"{", b"\xff" * 1400],
        "foreign": [datagram.build(other.payload("elsewhere", node_id=f"n{i}"), b"theirs") for i in range(50)],
        "unsigned": [datagram.build(other.payload(node_id=f"n{i}")) for i in range(50)],
        "oversize": [b" " * 2000],
    }[kind]
    async with engine_at("m") as engine, fake_daemon() as daemon, scene(KEY, udp=True) as found:
        daemon.group("glm", openai=engine.url)
        port, ear = port_of(found), found.groups.listener
        for _ in range(50):  # the kernel drops what finds no room, so five may come to less than a batch
            await trio.to_thread.run_sync(flood, port, many, 2000)
            if ear.read > 5 * listen.BATCH:
                break
        await until("some of it was read", lambda: ear.read > listen.BATCH)
        # Every batch is followed by a rest, so no more than that is ever done in one go.
        assert ear.read <= (ear.rests + 1) * listen.BATCH
        lines = [line for line in found.log if line["event"].startswith("announce")]
        assert len(lines) == (0 if kind == "foreign" else 1)
        assert found.groups._reception.remembered <= 1
        assert found.status["daemons"] == {}

        def announced() -> bool:
            daemon.announce(port, KEY)
            return daemon.address in found.status["daemons"]

        await until("a right one is heard all the same", announced)
        await found.serving("m")


async def test_daemons_that_nobody_can_verify_are_bounded() -> None:
    """Without a key anybody on an allowed network may announce, so there is a most."""
    async with scene(udp=True) as found:
        for i in range(MOST_WATCHED + 40):
            send(
                datagram.build(Daemon(port=9, node_id=f"n{i}").payload(addrs=[], http=f"127.0.0.1:{i + 20000}")),
                port_of(found),
            )
            if i % 50 == 49:
                await heard(found, i + 1)
        await heard(found, MOST_WATCHED + 40)
        assert len(found.status["daemons"]) == MOST_WATCHED
        assert len(found.told("daemons_full")) == 1


async def test_one_kind_from_everywhere_is_told_of_so_many_sources_only() -> None:
    async with scene(KEY, udp=True) as found:
        for i in range(60):
            send(b"garbage", port_of(found), f"127.0.1.{i + 1}")
        await heard(found, 60)
        lines: list[Any] = found.told("announce_rejected")
        assert len(lines) == MOST_SOURCES
        assert "more" in lines[-1]


async def test_a_fault_of_ours_does_not_end_the_ear(monkeypatch: pytest.MonkeyPatch) -> None:
    read = datagram.read

    def breaks(data: bytes) -> Any:
        if data == b"odd":
            raise ZeroDivisionError
        return read(data)

    monkeypatch.setattr(datagram, "read", breaks)
    async with fake_daemon() as daemon, scene(udp=True) as found:
        for _ in range(3):
            send(b"odd", port_of(found))
        daemon.announce(port_of(found))
        await until("the next one is heard", lambda: found.status["daemons"])
        assert len(found.told("fault while finding groups")) == 1

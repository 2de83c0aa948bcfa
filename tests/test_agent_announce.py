"""What an agent tells the network, what it publishes of an engine beside it, and `appliance agent register`."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import structlog
import trio

from appliance.agent.announce import Announcer
from appliance.agent.status import Identity, Seen, document
from appliance.facts.address import Address
from appliance.facts.groups import GroupsSettings, Registered
from appliance.facts.hardware import Interface, Inventory
from appliance.rules.groups.reception import Heard, Reception
from appliance.rules.groups.sources import Sources
from appliance.rules.groups.views import read_view
from appliance.wire import datagram
from appliance.wire.interfaces import Link
from tests.fake_daemon import free_udp_port
from tests.groups_scene import scene, until

WHO = Identity("node-a", "10.0.0.1", "00000000000000aa", 0.0, "node-a")
ANY = [Address("0.0.0.0", 6380)]


def link(name: str, address: str, *, up: bool = True) -> Link:
    network = ipaddress.IPv4Network(f"{address}/24", strict=False)
    loopback = address.startswith("127.")
    return Link(name, address, network, "" if loopback else str(network.broadcast_address), up, loopback)


LINKS = (
    link("lo", "127.0.0.1"),
    link("eth1", "192.168.1.1"),
    link("eth0", "10.0.0.1"),
    link("eth2", "10.9.0.1", up=False),
)


def announcer(
    key: bytes = b"", listen: list[Address] = ANY, links: tuple[Link, ...] = LINKS, **settings: Any
) -> Announcer:
    return Announcer(GroupsSettings(**settings), key, WHO, listen, look=lambda: links, wall=lambda: 1000.9)


def test_one_datagram_holds_both_forms() -> None:
    data = announcer().build(LINKS)
    assert data is not None
    assert json.loads(data) == {
        "proto": "0.99",
        "mentat_announce": 1,
        "node_id": WHO.node_id,
        "boot_id": WHO.boot_id,
        "control": "10.0.0.1:0",
        "http": "10.0.0.1:6380",
        "universe": "appliance",
        "addrs": ["10.0.0.1", "192.168.1.1"],
        "addr_tags": {},
        "seq": 0,
        "t": 1000,
    }
    signed = announcer(b" k\n", universe="blue").build(LINKS)
    assert signed is not None
    claim = datagram.read(signed)
    assert datagram.verified(claim, b"k")
    assert claim.payload is not None
    assert (claim.payload["mentat_announce"], claim.universe) == (2, "blue")


@pytest.mark.parametrize("key", [b"", b"k"])
def test_our_router_believes_our_agent(key: bytes) -> None:
    reception = Reception(
        GroupsSettings().universes, Sources(["local"]), key=bool(key), verified=lambda c: datagram.verified(c, key)
    )
    data = announcer(key).build(LINKS)
    assert data is not None
    found = reception.judge(datagram.read(data), "10.0.0.1", [LINKS[2].network], 1000)
    assert found == Heard(WHO.node_id, ("10.0.0.1:6380",))


def test_where_the_document_is_read() -> None:
    assert announcer(listen=[Address("10.0.0.7", 99)]).payload(LINKS)["http"] == "10.0.0.7:99"
    assert announcer(listen=[Address("10.0.0.7", 99)]).addrs(LINKS) == ("10.0.0.7",)
    moved = (link("lo", "127.0.0.1"), link("eth0", "10.0.0.9"))
    assert announcer().payload(moved)["http"] == "10.0.0.9:6380"
    assert not announcer(listen=[Address("127.0.0.1", 6380)]).useful
    assert not announcer(announce_port=0).useful
    assert announcer().useful


def test_a_datagram_is_never_too_large() -> None:
    many = tuple(link(f"e{i}", f"10.{i // 250}.{i % 250}.1") for i in range(300))
    data = announcer(b"k").build(many)
    assert data is not None
    assert datagram.MOST_BYTES - 20 < len(data) <= datagram.MOST_BYTES
    assert announcer(universe="u" * 2000).build(many) is None


async def test_rounds_count_and_reach_every_target() -> None:
    port = free_udp_port()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind(("127.0.0.1", port))
        ear.setblocking(False)
        made = announcer(
            announce_addrs=(f"127.0.0.1:{port}", "127.0.0.1"), announce_port=port, announce_interval_s=0.01, links=()
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            seqs = []
            while len(seqs) < 3:
                await trio.lowlevel.wait_readable(ear)
                seqs.append(json.loads(ear.recv(2000))["seq"])
            nursery.cancel_scope.cancel()
    assert seqs == [0, 1, 2]  # each round once, although two of its targets are the same


async def test_a_target_that_cannot_be_reached_is_told_once() -> None:
    made = announcer(announce_addrs=("256.1.1.1", "127.0.0.1"), announce_port=9, announce_interval_s=0.01, links=())
    with structlog.testing.capture_logs() as log:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            await until("rounds were made", lambda: made._seq > 3)
            nursery.cancel_scope.cancel()
    assert [line["to"] for line in log if line["event"] == "announcement not sent"] == ["256.1.1.1"]


async def test_addresses_that_changed_are_looked_at() -> None:
    links = [LINKS]
    looked = trio.Event()

    async def changed() -> None:
        looked.set()

    made = Announcer(
        GroupsSettings(announce_port=9, announce_interval_s=0.01), b"", WHO, ANY, changed=changed, look=lambda: links[0]
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await until("rounds were made", lambda: made._seq > 2)
        assert not looked.is_set()
        links[0] = LINKS[:2]
        await looked.wait()
        nursery.cancel_scope.cancel()


def test_a_registered_engine_is_a_group_without_actors() -> None:
    service = {"host": "", "port": 8000, "path": "/v1", "provider": "vllm", "note": ""}
    seen = Seen(
        WHO,
        Inventory(node="node-a", address="10.0.0.1", interfaces=(Interface("eth0", ("10.0.0.1", "192.168.1.1")),)),
        {},
        registered=Registered("glm", service, None),
    )
    whole = document(seen)
    assert whole["groups"] == {
        "glm": {
            "agents": {
                "glm@node-a": {
                    "node_ip": "10.0.0.1",
                    "pid": os.getpid(),
                    "alive": True,
                    "services": {"openai": service},
                }
            },
            "actors": {},
            "placement_groups": {},
            "gpus_total": 0,
            "gpus_used": 0,
        }
    }
    row = read_view(whole).groups["glm"]
    assert row.agents[0].openai is not None and row.agents[0].openai.port == 8000
    moved = attrs.evolve(seen, inventory=attrs.evolve(seen.inventory, address="10.0.0.9"))
    assert document(moved)["node_ip"] == "10.0.0.9"
    assert document(moved)["node_id"] == whole["node_id"]


# -- as a process ------------------------------------------------------------------------------------------------------


def start(folder: Path, **environ: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("APPLIANCE_", "MENTAT_"))}
    env |= {"STATE_DIRECTORY": f"{folder}/appliance-s", "RUNTIME_DIRECTORY": f"{folder}/appliance-r"} | environ
    command = [sys.executable, "-m", "appliance", "agent", "register"]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


async def test_register_is_found_and_ends_with_a_signal(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    from tests.fake_daemon import engine_at

    async with engine_at("m") as engine, scene(daemons=[f"127.0.0.1:{port}"], allowed_sources=["0.0.0.0/0"]) as found:
        process = start(
            tmp_path,
            MENTAT_GROUP="glm",
            MENTAT_OPENAI_API=f"http://127.0.0.1:{engine.port}/v1",
            MENTAT_ANNOUNCE_PORT="0",
            APPLIANCE_AGENT__LISTEN=f"127.0.0.1:{port}",
        )
        try:
            await found.serving("m")
            assert os.listdir(tmp_path) == []  # it owns nothing
            process.terminate()
            assert await trio.to_thread.run_sync(process.wait) == 0
        finally:
            process.kill()
            assert process.stderr is not None
            process.stderr.close()


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "MENTAT_GROUP is not set"),
        ({"MENTAT_GROUP": "g", "MENTAT_OPENAI_API": "https://x/v1"}, "MENTAT_OPENAI_API: expected a port and a path"),
        ({"MENTAT_GROUP": "g", "MENTAT_SECRET_FILE": "/nowhere"}, "groups.secret_file: expected a readable file"),
    ],
)
def test_what_register_refuses(tmp_path: Path, environ: dict[str, str], told: str) -> None:
    process = start(tmp_path, **environ)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.startswith("appliance agent register: ")
    assert told in errors
    assert len(errors.splitlines()) == 1


def test_a_port_that_a_daemon_has_already(tmp_path: Path) -> None:
    """Beside a daemon of another make on the same machine the agent says which setting to change."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        process = start(tmp_path, MENTAT_GROUP="g", APPLIANCE_AGENT__LISTEN=address)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.strip() == (
        f"appliance agent register: agent.listen: {address} is in use by another process; stop that one or choose"
        " another address"
    )

"""A control plane behind its door on loopback, with a root, a store on disk, and whatever calls it."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
import structlog.testing
import trio

from appliance.control import pki
from appliance.control.joining import Joining
from appliance.control.links import LinkDoor
from appliance.control.plane import Plane
from appliance.facts.address import Address
from appliance.facts.link import Refused, Register
from appliance.store.papers import Papers, make_folder, put
from appliance.store.rows import JoinToken
from appliance.store.store import Store, open_store
from appliance.wire.calls import call
from appliance.wire.certificates import new_key, signing_request
from appliance.wire.link import LinkClosed
from appliance.wire.tls import CONTROL_NAME, link_client_context, link_server_context
from tests.control_scene import SETTINGS

DAY_S = 86400.0


@attrs.define
class Cluster:
    """A control plane behind its door. `lines` are what it logs."""

    plane: Plane
    door: LinkDoor
    joining: Joining
    store: Store
    authority: pki.Authority
    port: int
    folder: Path
    lines: list[Any]

    @property
    def url(self) -> str:
        return f"wss://127.0.0.1:{self.port}"

    async def certified(
        self, name: str, *, known: bool = True, authority: pki.Authority | None = None, age_s: float = 0.0
    ) -> ssl.SSLContext:
        """The TLS context of a node with a certificate."""
        papers = await self.papers(name, known=known, authority=authority, age_s=age_s)
        return link_client_context(papers.node, papers.node_key, papers.root)

    async def papers(
        self, name: str, *, known: bool = True, authority: pki.Authority | None = None, age_s: float = 0.0
    ) -> Papers:
        """A folder of papers as a node has them once it has joined. `known`: it stands in the store."""
        key = new_key()
        signed = (authority or self.authority).sign_csr(signing_request(key, name), name, time.time() - age_s)
        if known:
            await self.store.add_token(JoinToken(signed.row.serial, name, time.time() + 60.0), "test", time.time())
            assert await self.store.redeem(signed.row.serial, signed.row, "test")
        papers = Papers.of(str(self.folder / signed.row.serial))
        make_folder(papers.folder)
        put(papers.node, signed.pem.encode())
        put(papers.node_key, key)
        put(papers.root, self.authority.pem)
        return papers

    def anonymous(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.authority.papers.root)
        return context

    def called(self, context: ssl.SSLContext) -> Any:
        return call(self.url, context, name=CONTROL_NAME)

    async def refused(self, context: ssl.SSLContext, message: Register) -> Refused:
        async with self.called(context) as link:
            await link.send(message)
            first = await link.receive()
            assert isinstance(first, Refused), first
            with pytest.raises(LinkClosed):
                await link.receive()
            return first

    async def http(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Status, head and body of an answer to someone without a certificate."""
        stream = await self.raw()
        await stream.send_all(request)
        answer = b""
        while chunk := await stream.receive_some(65536):
            answer += chunk
        await trio.aclose_forcefully(stream)
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), head, body

    async def raw(self) -> trio.SSLStream[trio.SocketStream]:
        tcp = await trio.open_tcp_stream("127.0.0.1", self.port)
        stream = trio.SSLStream(tcp, self.anonymous(), server_hostname=CONTROL_NAME, https_compatible=True)
        await stream.do_handshake()
        return stream

    async def tcp(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    def logged(self, event: str) -> list[Any]:
        return [each for each in self.lines if each["event"] == event]


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    authority = pki.create(Papers.of(str(folder)), time.time())
    authority.keep_server(["127.0.0.1"], time.time())
    papers = authority.papers
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    with structlog.testing.capture_logs() as lines, trio.fail_after(30):
        async with open_store("", str(folder)) as store, trio.open_nursery() as nursery:
            joining = Joining(store, authority, [Address("127.0.0.1", port)])
            plane = Plane(SETTINGS, store, Random(1), joining=joining)
            await nursery.start(plane.run)
            door = LinkDoor(plane, joining, lambda: link_server_context(papers.server, papers.server_key, papers.root))
            await nursery.start(door.serve, [sock])
            yield Cluster(plane, door, joining, store, authority, port, folder, lines)
            nursery.cancel_scope.cancel()
    assert door.links == 0 and not door.strangers and not plane.sessions

"""A daemon of announced groups for tests: `/status`, `/events` and announcements, in the shape of each version.

    async with fake_daemon() as daemon, engine_at("m") as engine:
        daemon.group("glm", openai=engine.url)
        daemon.tell()                       # whoever listens to /events reads again

`shape` is "seed" (lists, URLs), "mid" (lists, ports beside them) or "new" (maps, objects). The document is written out
anew for each question, so a test changes the values and tells.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_server_stream

from appliance.wire import datagram


@attrs.define(eq=False)
class Group:
    """One group of a daemon. `openai` and `mcp` are a URL, or (port, path)."""

    name: str
    openai: str | tuple[int, str] | None = None
    mcp: str | tuple[int, str] | None = None
    actors: list[str] = attrs.field(factory=list)
    gpus: int = 0
    alive: bool = True
    provider: str = ""
    note: str = ""
    node_ip: str = ""
    agent: str = "a1"


@attrs.define(eq=False)
class Daemon:
    port: int = 0
    host: str = "127.0.0.1"
    node_id: str = "N1"
    node_ip: str = "127.0.0.1"
    shape: str = "new"
    addrs: list[str] = attrs.field(factory=lambda: ["127.0.0.1"])
    peers: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    groups: list[Group] = attrs.field(factory=list)
    boot_id: str = "00000000000000aa"
    seq: int = 0
    reads: int = 0
    listeners: list[WebSocketConnection] = attrs.field(factory=list)
    answer: Callable[[], bytes] | None = None
    """Instead of the document."""
    events_open: bool = True

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def group(self, name: str, **how: Any) -> Group:
        made = Group(name, **how)
        self.groups.append(made)
        return made

    def document(self) -> dict[str, Any]:
        names = dict.fromkeys(group.name for group in self.groups)
        return {
            "node_id": self.node_id,
            "node_ip": self.node_ip,
            "addrs": self.addrs,
            "seq": self.seq,
            "peers": self.peers,
            "groups": {name: self._group([each for each in self.groups if each.name == name]) for name in names},
        } | ({"proto": "0.99"} if self.shape == "new" else {})

    def _group(self, parts: list[Group]) -> dict[str, Any]:
        agents = {f"{part.name}@{part.agent}": self._agent(part) for part in parts}
        actors = {f"x{i}": {"state": state} for part in parts for i, state in enumerate(part.actors)}
        document: dict[str, Any] = {"gpus_total": sum(part.gpus for part in parts)}
        if self.shape == "new":
            return document | {"agents": agents, "actors": actors, "placement_groups": {}}
        return document | {
            "agents": [{"id": key, **row} for key, row in agents.items()],
            "actors": [{"id": key, **row} for key, row in actors.items()],
            "placement_groups": [],
        }

    def _agent(self, group: Group) -> dict[str, Any]:
        row: dict[str, Any] = {"node_ip": group.node_ip or self.node_ip, "alive": group.alive}
        said = {name: value for name, value in (("openai", group.openai), ("mcp", group.mcp)) if value is not None}
        if self.shape == "new":
            row["services"] = {name: self._object(value, group) for name, value in said.items()}
            return row
        row["services"] = {name: value for name, value in said.items() if isinstance(value, str)}
        if self.shape == "mid":
            ports = {name: value for name, value in said.items() if not isinstance(value, str)}
            row["services_ports"] = {name: {"port": port, "path": path} for name, (port, path) in ports.items()}
            row["service_notes"] = {"openai": group.note} if group.note else {}
            row["provider"] = group.provider
        return row

    def _object(self, value: str | tuple[int, str], group: Group) -> dict[str, Any]:
        if isinstance(value, str):
            host, _, rest = value.removeprefix("http://").partition(":")
            port, _, path = rest.partition("/")
            return {"host": host, "port": int(port), "path": f"/{path}", "provider": group.provider, "note": group.note}
        return {"host": "", "port": value[0], "path": value[1], "provider": group.provider, "note": group.note}

    # -- announcing --------------------------------------------------------------------------------------------------

    def payload(self, universe: str = "default", **more: Any) -> dict[str, Any]:
        self.seq += 1
        return {
            "node_id": self.node_id,
            "control": f"{self.node_ip}:6379",
            "http": f"{self.node_ip}:{self.port}",
            "universe": universe,
            "addrs": self.addrs,
            "addr_tags": {},
            "boot_id": self.boot_id,
            "seq": self.seq,
            "t": int(time.time()),
            **more,
        }

    def announce(self, port: int, key: bytes = b"", universe: str = "default", **more: Any) -> None:
        """One round, in our form, which holds both others."""
        send(datagram.build(self.payload(universe, **more), key), port)

    def announce_as(self, form: str, port: int, key: bytes = b"", universe: str = "default") -> None:
        """One round in the form of one version: "v1" is unsigned whatever the key, "v2" and "proto" are signed."""
        payload = self.payload(universe)
        if form == "v1":
            send(json.dumps(payload | {"mentat_announce": 1}).encode(), port)
            return
        payload |= {"mentat_announce": 2} if form == "v2" else {"proto": "0.99"}
        send(json.dumps({"p": payload, "sig": datagram.sign(payload, key)}).encode(), port)

    async def tell_for_ever(self, every_s: float = 0.01) -> None:
        while True:
            await self.tell()
            await trio.sleep(every_s)

    async def tell(self) -> None:
        """One event to whoever listens."""
        self.seq += 1
        for listener in list(self.listeners):
            with suppress(ConnectionClosed):
                await listener.send_message(
                    json.dumps({"type": "actor_running", "seq": self.seq, "node": self.node_id})
                )

    # -- serving -----------------------------------------------------------------------------------------------------

    async def serve(self, stream: trio.SocketStream) -> None:
        try:
            head = b""
            while b"\r\n\r\n" not in head:
                more = await stream.receive_some(4096)
                if not more:
                    return
                head += more
            if b"/events" in head.split(b"\r\n", 1)[0]:
                if self.events_open:
                    await self._events(stream, head)
                return
            self.reads += 1
            body = self.answer() if self.answer is not None else json.dumps(self.document()).encode()
            await stream.send_all(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)
            )
        except trio.BrokenResourceError:
            pass
        finally:
            await trio.aclose_forcefully(stream)

    async def _events(self, stream: trio.SocketStream, head: bytes) -> None:
        async with trio.open_nursery() as nursery:
            try:
                request = await wrap_server_stream(nursery, _Again(stream, head))
                listener = await request.accept()
                await listener.send_message(json.dumps({"type": "snapshot", "seq": self.seq, "data": self.document()}))
                self.listeners.append(listener)
                while True:
                    await listener.get_message()
            except ConnectionClosed:
                pass
            finally:
                self.listeners = [each for each in self.listeners if each.closed is None]
                nursery.cancel_scope.cancel()


class _Again(trio.abc.Stream):
    """A stream whose first bytes were read already."""

    def __init__(self, stream: trio.SocketStream, received: bytes) -> None:
        self._stream = stream
        self._received = received

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._received:
            received, self._received = self._received, b""
            return received
        return bytes(await self._stream.receive_some(max_bytes))

    async def send_all(self, data: Any) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def fake_daemon(**how: Any) -> AsyncIterator[Daemon]:
    """A daemon at a port of the kernel's choice. When the block ends it is gone as a killed one: connections break."""
    daemon = Daemon(**how)
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(daemon.port, host=daemon.host)
        daemon.port = listeners[0].socket.getsockname()[1]
        await nursery.start(trio.serve_listeners, daemon.serve, listeners)
        try:
            yield daemon
        finally:
            nursery.cancel_scope.cancel()


@attrs.define(eq=False)
class Engine:
    """What answers probes: a list of models, or whatever `answer` sends. `hits` counts connections."""

    models: list[str]
    host: str = "127.0.0.1"
    port: int = 0
    hits: int = 0
    answer: Callable[[int], bytes | None] | None = None
    """By the number of the connection: raw bytes, b"" to close without a word, None to stay silent."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    async def serve(self, stream: trio.SocketStream) -> None:
        self.hits += 1
        number = self.hits
        try:
            head = b""
            while b"\r\n\r\n" not in head:
                more = await stream.receive_some(4096)
                if not more:
                    return
                head += more
            if self.answer is not None:
                raw = self.answer(number)
                if raw is None:
                    await trio.sleep_forever()
            else:
                rows = [
                    {"id": name, "object": "model", "max_model_len": 7, "owned_by": "engine"} for name in self.models
                ]
                raw = ok(json.dumps({"object": "list", "data": rows}).encode())
            await stream.send_all(raw or b"")
        except trio.BrokenResourceError:
            pass
        finally:
            await trio.aclose_forcefully(stream)


def ok(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


@asynccontextmanager
async def engine_at(*models: str, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Engine]:
    engine = Engine(list(models), host, port)
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(port, host=host)
        engine.port = listeners[0].socket.getsockname()[1]
        await nursery.start(trio.serve_listeners, engine.serve, listeners)
        try:
            yield engine
        finally:
            nursery.cancel_scope.cancel()


def send(data: bytes, port: int, source: str = "127.0.0.1") -> None:
    """One datagram to this machine, from an address of it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((source, 0))
        sock.sendto(data, ("127.0.0.1", port))


def free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

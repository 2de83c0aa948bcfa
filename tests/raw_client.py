"""A client that sends raw bytes and reads answers with h11, so that every answer is proved to be HTTP."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

import attrs
import h11
import trio

WITHIN_S = 60.0
"""The longest any test waits for bytes; it only ends a test that would fail anyway, however busy the machine is."""
BEYOND_SOCKETS = 2 * max(4 << 20, int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2]))
"""Bytes that the sockets between two processes do not take while the receiver reads nothing: twice what a sender's
buffer may grow to. A receiver's grows only with what is read from it."""
_CUT = struct.pack("ii", 1, 0)


@attrs.frozen
class Answer:
    """A whole answer. `fields` holds the last value of each field, `interim` the statuses of the 1xx before it."""

    status: int
    fields: dict[str, str]
    body: bytes
    interim: tuple[int, ...] = ()

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The refusal in the body, with its four keys."""
        error: dict[str, Any] = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str) and error["message"]
        assert isinstance(error["type"], str) and error["type"]
        return error

    @property
    def closes(self) -> bool:
        return self.fields.get("connection") == "close"


class BrokenOff(Exception):
    """The connection ended before the answer did; `args[0]` holds the answer as far as it came."""


class Client:
    """One connection. Whoever opened it closes it (`routers.router` closes those it opened)."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, within_s: float = WITHIN_S) -> None:
        self.stream = stream
        self.within_s = within_s
        self.buffer = b""

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            await self.stream.send_all(piece)

    async def answer(self, method: str = "GET") -> Answer:
        """The next answer; `method` is that of its request. Raises BrokenOff."""
        http = h11.Connection(h11.CLIENT)
        http.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        http.send(h11.EndOfMessage())
        if self.buffer:
            http.receive_data(self.buffer)
        head: h11.Response | None = None
        interim: list[int] = []
        body = bytearray()

        def answer() -> Answer:
            fields = {n.decode("latin-1"): v.decode("latin-1") for n, v in (head.headers if head else ())}
            return Answer(head.status_code if head else 0, fields, bytes(body), tuple(interim))

        with trio.fail_after(self.within_s):
            while True:
                try:
                    event = http.next_event()
                    if event is h11.NEED_DATA:
                        http.receive_data(await self.stream.receive_some(65536))
                        continue
                except (trio.BrokenResourceError, h11.RemoteProtocolError) as error:
                    raise BrokenOff(answer()) from error
                if isinstance(event, h11.InformationalResponse):
                    interim.append(event.status_code)
                elif isinstance(event, h11.Response):
                    head = event
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    self.buffer = bytes(http.trailing_data[0])
                    return answer()
                else:
                    raise BrokenOff(answer())

    async def until(self, wanted: bytes) -> bytes:
        """Raw bytes up to and with `wanted`; what came after it stays for the next reader."""
        with trio.fail_after(self.within_s):
            while wanted not in self.buffer:
                data = await self.stream.receive_some(65536)
                assert data, f"ended before {wanted!r}: {self.buffer!r}"
                self.buffer += data
        at = self.buffer.index(wanted) + len(wanted)
        taken, self.buffer = self.buffer[:at], self.buffer[at:]
        return taken

    async def rest(self) -> tuple[bytes, str]:
        """All raw bytes until the connection ends, and how it did: "closed" or "reset"."""
        with trio.fail_after(self.within_s):
            while True:
                try:
                    data = await self.stream.receive_some(65536)
                except trio.BrokenResourceError:
                    return self.buffer, "reset"
                if not data:
                    return self.buffer, "closed"
                self.buffer += data

    async def close(self) -> None:
        await self.stream.aclose()

    async def reset(self) -> None:
        assert isinstance(self.stream, trio.SocketStream)
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CUT)
        await self.stream.aclose()


def request(
    method: str = "POST", target: str = "/v1/chat/completions", *fields: str, body: bytes | None = None,
    version: str = "1.1",
) -> bytes:  # fmt: skip
    """A request with a Host; `body` adds its length and, unless `fields` says otherwise, that it is JSON."""
    lines = [f"{method} {target} HTTP/{version}", "host: door", *fields]
    if body is not None:
        names = {line.partition(":")[0].lower() for line in fields}
        if "content-type" not in names:
            lines.append("content-type: application/json")
        if not names & {"content-length", "transfer-encoding"}:
            lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


def chat(*fields: str, target: str = "/v1/chat/completions", version: str = "1.1", **more: Any) -> bytes:
    """A chat request for the fake engine's model; `more` are further keys of its body."""
    ask = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], **more}
    return request("POST", target, *fields, body=json.dumps(ask).encode(), version=version)

"""An engine's answer: which of its fields go on to a client, and its body, whatever the framing."""

from __future__ import annotations

from collections.abc import Iterable

from ..facts.call import Fields
from ..wire import framing
from ..wire.head import ResponseHead
from ..wire.line import Line
from .upstream import UpstreamFailed

_NOT_FROM_ENGINES = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"server", b"set-cookie", b"content-length", b"x-request-id",
        b"x-appliance-reason", b"alt-svc", b"strict-transport-security",
    )
)  # fmt: skip
_USUAL_CONNECTIONS = frozenset((b"", b"close", b"keep-alive", b"Keep-Alive"))


def is_stream(head: ResponseHead) -> bool:
    return head.by_name.get(b"content-type", b"").lower().startswith(b"text/event-stream")


def is_json(head: ResponseHead) -> bool:
    return head.by_name.get(b"content-type", b"").lower().startswith(b"application/json")


def kept(head: ResponseHead) -> Fields:
    return kept_fields(head.fields, head.by_name.get(b"connection", b""))


class _GoesOn(dict[bytes, bool]):
    """Whether a field goes on to the client, by its name. Engines send few names, and the same ones each time."""

    def __missing__(self, name: bytes) -> bool:
        goes_on = name not in _NOT_FROM_ENGINES and not name.startswith(b"access-control-")
        if len(self) < _MOST_KNOWN_NAMES:
            self[name] = goes_on
        return goes_on


_goes_on = _GoesOn()
_MOST_KNOWN_NAMES = 512


def kept_fields(fields: Iterable[tuple[bytes, bytes]], connection: bytes = b"") -> Fields:
    """An engine's fields that go on to the client; `connection` is its Connection field, which may name further ones
    that are for this hop only."""
    goes_on = _goes_on
    kept = [field for field in fields if goes_on[field[0]]]
    if connection not in _USUAL_CONNECTIONS:
        named = {token.strip(b" \t").lower() for token in connection.split(b",")}
        kept = [field for field in kept if field[0] not in named]
    return kept


class BodyReader:
    """Reads a response's body, whatever its framing. `surplus` tells that bytes came after its end, which are lost."""

    __slots__ = ("_chunked", "_left", "_line", "_waiting", "ended", "surplus")

    def __init__(self, line: Line, head: ResponseHead, rest: bytes) -> None:
        self._line = line
        self._chunked = framing.Chunked(plain=True) if head.chunked else None
        self._left = head.length
        self._waiting = rest
        self.ended = head.length == 0
        self.surplus = self.ended and bool(rest)

    async def next(self) -> bytes | None:
        """The next piece of the payload, None after the last. Raises UpstreamFailed, or a cut."""
        while not self.ended:
            data, self._waiting = self._waiting, b""
            if not data:
                # an engine that never pauses would never let the task sleep, and a cut only strikes a sleeper
                if self._line.sleeper is not None:
                    self._line.sleeper.check()
                try:
                    data = await self._line.recv()
                except OSError as error:
                    raise UpstreamFailed(
                        "reset", f"connection lost: {error.strerror or error}", sent=True, answered=True
                    ) from None
                if not data:
                    if self._left is None and self._chunked is None:
                        self.ended = True
                        return None
                    raise UpstreamFailed("closed", "the answer broke off", sent=True, answered=True)
            if self._chunked is not None:
                try:
                    data = b"".join(self._chunked.feed(data))
                except framing.BadFraming as error:
                    raise UpstreamFailed("garbage", f"malformed answer: {error}", sent=True, answered=True) from None
                self.ended = self._chunked.done
                self.surplus = bool(self._chunked.rest)
            elif self._left is not None:
                self.surplus = len(data) > self._left
                data = data[: self._left]
                self._left -= len(data)
                self.ended = self._left == 0
            if data:
                return data
        return None

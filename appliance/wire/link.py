"""The link between an agent and its control plane: what it does, and how it is within one process.

`websocket.py` has the one over a socket, `calls.py` how that comes about; `messages.py` says what is in a message.
"""

from __future__ import annotations

from typing import Protocol

import trio

from ..facts.link import Message
from .messages import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from .messages import Malformed as Malformed
from .messages import UnknownMessage as UnknownMessage
from .messages import Unsendable as Unsendable
from .messages import decode as decode
from .messages import encode as encode

CLOSE_S = 0.5
"""How long the end of a link waits for the peer's: long enough for our last words to arrive before a reset could."""

UNREAD_MESSAGES = 64
"""Messages a link in memory holds in each direction before its sender waits."""


class LinkClosed(Exception):
    """The link is over; the text says why, as far as it is known."""


class LinkRefused(Exception):
    """No link came of the call; the text is what the network, TLS or HTTP said. `by` is who said so: `tls` and `http`
    are answers, and asking again at once would get the same ones; "" is a network, or a peer that is not there."""

    def __init__(self, text: str, by: str = "") -> None:
        super().__init__(text)
        self.by = by


class Link(Protocol):
    """One connection. `receive` belongs to one task, `send` to any."""

    peer: str
    """Who is at the other end, for log lines."""

    async def send(self, message: Message) -> None:
        """Hand over a message, waiting for a peer that does not read. Raises LinkClosed, Unsendable."""

    async def receive(self) -> Message:
        """The next message. Raises LinkClosed, UnknownMessage, Malformed."""

    async def aclose(self, reason: str = "") -> None:
        """End the link and tell the peer why, waiting for it at most CLOSE_S. Harmless when repeated."""


class MemoryLink:
    """One end of a link within the process. Messages are values that nobody changes, so they pass as they are."""

    def __init__(
        self, peer: str, outgoing: trio.MemorySendChannel[Message], incoming: trio.MemoryReceiveChannel[Message]
    ) -> None:
        self.peer = peer
        self._outgoing = outgoing
        self._incoming = incoming

    async def send(self, message: Message) -> None:
        try:
            await self._outgoing.send(message)
        except trio.BrokenResourceError:
            raise LinkClosed("the other side has ended the link") from None
        except trio.ClosedResourceError:
            raise LinkClosed("the link was ended") from None

    async def receive(self) -> Message:
        try:
            return await self._incoming.receive()
        except trio.EndOfChannel:
            raise LinkClosed("the other side has ended the link") from None
        except trio.ClosedResourceError:
            raise LinkClosed("the link was ended") from None

    async def aclose(self, reason: str = "") -> None:
        self._outgoing.close()
        self._incoming.close()
        await trio.lowlevel.checkpoint()


def memory_links(peer: str = "this process") -> tuple[Link, Link]:
    """The two ends of a link within the process. Close both; what was sent before one closes can still be received."""
    there, here = trio.open_memory_channel[Message](UNREAD_MESSAGES)
    back_there, back_here = trio.open_memory_channel[Message](UNREAD_MESSAGES)
    return MemoryLink(peer, there, back_here), MemoryLink(peer, back_there, here)

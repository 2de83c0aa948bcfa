"""What the gateway needs from whoever asked: three methods, and a way to give up.

The door's reply writes to a client's socket (`door/reply.py`); the playground's hands pieces to a page.
"""

from __future__ import annotations

from typing import Protocol

from ..facts.call import Fields
from ..nursery.sleeper import Cut, Sleeper
from ..wire.line import Line


class ClientLeft(Exception):
    """The client is gone: there is nobody to answer."""


class Left(Cut):
    """The client closed its side while its answer was being made."""


class Cancelled(Cut):
    """An operator ended the request."""


class EndpointLost(Cut):
    """The endpoint that serves the request is gone; `args[0]` says why."""


class Reply(Protocol):
    """An answer on its way out. `start` once, `send` as often as needed, `end` once, or `give_up` at any moment.
    `started` tells that bytes of it have left.

    `sleeper` is the task that serves the call: what it waits for, and what cuts it. `line` is the client's socket where
    bytes may be put on it directly (`framed` as below), None elsewhere. `chunked` tells how a body of unknown length
    leaves: in the chunked framing, so that an engine's chunked bytes may be passed on as they are (`framed=True`).
    `sent_bytes` counts what left; whoever puts bytes on `line` adds them.
    """

    sleeper: Sleeper
    line: Line | None
    started: bool
    chunked: bool
    sent_bytes: int

    def start(self, status: int, fields: Fields, length: int | None) -> None:
        """Decide the head. It leaves with the first bytes of the body. `length` None: not known beforehand."""

    async def send(self, data: bytes, *, framed: bool = False) -> None:
        """Hand over a piece of the body. Raises ClientLeft, or a cut."""

    def put(self, data: bytes) -> None:
        """Hand over a small piece at once, without waiting: what the client does not take now leaves before the next
        one. Raises ClientLeft."""

    async def end(self, last: bytes = b"", *, framed: bool = False) -> None:
        """The body is complete, with `last` as its last piece; `framed` when its last chunk has been sent as it came.
        Raises ClientLeft, or a cut."""

    def give_up(self) -> None:
        """The body will not be completed: the connection must end in a way that no client takes for success."""

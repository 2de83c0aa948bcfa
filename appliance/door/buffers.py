"""How much of clients' bodies may be held at once."""

from __future__ import annotations

from ..facts.errors import Refusal


class Buffers:
    """A sum that is checked before a body is read: refusing at the head costs nothing, waiting half-read costs the
    memory that was to be saved.
    """

    __slots__ = ("held_bytes", "limit_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def reserve(self, size: int) -> None:
        """Count `size` more bytes. Raises a Refusal when they do not fit; nothing is counted then."""
        if self.held_bytes + size > self.limit_bytes:
            raise Refusal(
                503,
                "buffers_full",
                "too many request bodies are being held at the moment, try again shortly",
                retry_after_s=1,
            )
        self.held_bytes += size

    def release(self, size: int) -> None:
        self.held_bytes -= size

"""How much of clients' bodies may be held at once, and how they are held while they arrive."""

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


class Gathered:
    """A body put together from the pieces in which it arrives, however small: a list of single bytes weighs eight times
    what it holds, and more in small chunks, so that a client could have us hold much more than was reserved.
    """

    __slots__ = ("_crumbs", "_pieces", "size")

    CRUMB_BYTES = 4096
    """Pieces up to this size are put into a common one."""

    def __init__(self) -> None:
        self._crumbs = bytearray()
        self._pieces: list[bytes] = []
        self.size = 0

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        if len(piece) > self.CRUMB_BYTES:
            self._sweep()
            self._pieces.append(piece)
            return
        self._crumbs += piece
        if len(self._crumbs) > 16 * self.CRUMB_BYTES:
            self._sweep()

    def whole(self) -> bytes:
        self._sweep()
        return b"".join(self._pieces)

    def _sweep(self) -> None:
        if self._crumbs:
            self._pieces.append(bytes(self._crumbs))
            self._crumbs = bytearray()

"""The head of a request off a plain Trio stream, for listeners beside the road: an agent's status, the control plane's
port."""

from __future__ import annotations

import trio

from .head import RequestHead, check_beginning, end_of_head, read_request

READ_BYTES = 65536


async def read_head(stream: trio.abc.ReceiveStream) -> tuple[RequestHead | None, bytes]:
    """The head and all bytes that came, (None, ...) when the client left without one. Raises BadHead. The caller bounds
    the wait; the size is bounded by `end_of_head`."""
    received = bytearray()
    while True:
        end = end_of_head(received)
        if end >= 0:
            return read_request(bytes(received[:end])), bytes(received)
        if received:
            check_beginning(bytes(received[:16]))
        chunk = await stream.receive_some(READ_BYTES)
        if not chunk:
            return None, b""
        received += chunk

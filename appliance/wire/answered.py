"""One answer and the end of the connection, for listeners beside the road; `asked.py` reads what is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus

import trio

from .asked import READ_BYTES


async def send_answer(
    stream: trio.abc.SendStream,
    status: int,
    content_type: str,
    body: bytes,
    fields: Iterable[tuple[str, str]] = (),
    *,
    with_body: bool,
    within_s: float,
    part: Callable[[], Awaitable[None]],
) -> None:
    """Send an answer within `within_s` (else trio.TooSlowError), then `part`, which bounds itself: what there is to do
    before the stream may be closed, which is the caller's to do. Without its body it is told how long that would be."""
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"content-type: {content_type}",
        f"content-length: {len(body)}",
        "cache-control: no-store",
        "connection: close",
        *(f"{name}: {value}" for name, value in fields),
        "\r\n",
    ]
    with trio.fail_after(within_s):
        await stream.send_all("\r\n".join(head).encode("latin-1") + (body if with_body else b""))
    await part()


async def heard_out(tcp: trio.SocketStream, within_s: float) -> None:
    """Say that nothing more comes, and read until the client has closed or `within_s` is over: closing first, with
    bytes unread, would reset what is still on its way."""
    with trio.move_on_after(within_s):
        await tcp.send_eof()
        while await tcp.receive_some(READ_BYTES):
            continue

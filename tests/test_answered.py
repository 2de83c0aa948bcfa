"""Answers of the listeners beside the road: whole also for a client that says more than was read, and bounded for one
that does not read."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

from appliance.wire.answered import heard_out, send_answer

BODY = b"x" * 1_000_000


async def answered(stream: trio.SocketStream) -> None:
    part = partial(heard_out, stream, 5.0)
    await send_answer(stream, 413, "text/plain", BODY, (("allow", "GET"),), with_body=True, within_s=5.0, part=part)
    await trio.aclose_forcefully(stream)


async def test_the_whole_answer_reaches_a_client_that_has_said_more_than_was_read() -> None:
    """Closed with its bytes unread, it would get a reset in place of the rest."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answered, [listener])
        client = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        await client.send_all(b"y" * 1000)
        received = b""
        with trio.fail_after(10):
            while chunk := await client.receive_some():
                received += chunk
            # The end is told by a FIN while our own side is open: only then is nothing lost.
            await client.send_all(b"y" * 1000)
            await client.aclose()
        nursery.cancel_scope.cancel()
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 413 Request Entity Too Large",
        b"content-type: text/plain",
        b"content-length: 1000000",
        b"cache-control: no-store",
        b"connection: close",
        b"allow: GET",
    ]
    assert body == BODY


async def test_who_does_not_read_is_waited_for_so_long_and_not_parted_with(autojump_clock: MockClock) -> None:
    ours, _theirs = memory_stream_pair()
    ours.send_stream.send_all_hook = trio.sleep_forever
    parted = []

    async def part() -> None:
        parted.append(trio.current_time())

    begun = trio.current_time()
    with pytest.raises(trio.TooSlowError):
        await send_answer(ours, 200, "text/plain", BODY, with_body=True, within_s=5.0, part=part)
    assert trio.current_time() - begun == pytest.approx(5.0)
    assert parted == []
    ours.send_stream.send_all_hook = None
    await send_answer(ours, 200, "text/plain", BODY, with_body=False, within_s=5.0, part=part)
    assert len(parted) == 1

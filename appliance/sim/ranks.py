"""Several processes that are one engine: how its ranks find each other, and die together.

The leader (rank 0) listens at the rendezvous address and is complete once every other rank has said its number there.
The connections then stay open for as long as the engine lives, and say nothing: the end of one is the end of a rank,
and a rank that loses its peer ends too, as the ranks of a real engine do when a collective call fails.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NoReturn

import trio

from .settings import Ranks

JOIN_S = 300.0
"""How long a worker keeps asking for its leader, and a leader waits for its workers."""
RETRY_S = 0.1
_HELLO_S = 5.0
_LONGEST_HELLO = 64


def say_hello(ranks: Ranks) -> bytes:
    """What a worker says first."""
    return f"sim-rank {ranks.node_rank} of {ranks.nnodes}\n".encode()


def read_hello(line: bytes, ranks: Ranks, joined: set[int]) -> int:
    """The rank that a worker claims. Raises ValueError with the reason when the leader cannot take it."""
    words = line.decode("ascii", "replace").split()
    if (
        len(words) != 4
        or words[0] != "sim-rank"
        or words[2] != "of"
        or not words[1].isdigit()
        or not words[3].isdigit()
    ):
        raise ValueError("not a rank of a sim")
    rank, nnodes = int(words[1]), int(words[3])
    if nnodes != ranks.nnodes:
        raise ValueError(f"rank {rank} expects {nnodes} nodes, this leader {ranks.nnodes}")
    if not 1 <= rank < nnodes:
        raise ValueError(f"there is no worker rank {rank} among {nnodes} nodes")
    if rank in joined:
        raise ValueError(f"rank {rank} has joined already")
    return rank


async def lead(
    ranks: Ranks,
    rendezvous: socket.socket,
    lost: Callable[[str], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Hold the workers of this engine at `rendezvous`, a listening socket, which is closed at the end.

    Started when all have joined; `lost` is told, once or more, why they are not whole. Cancelling it lets them go.
    """
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(rendezvous))
    joined: set[int] = set()
    whole = trio.Event()

    async def hold(stream: trio.SocketStream) -> None:
        _notice_power_loss(stream)
        async with stream:
            rank = await _greet(stream, ranks, joined)
            if rank is None:
                return
            if len(joined) == ranks.nnodes - 1:
                whole.set()
            await _silence(stream)
            lost(f"rank {rank} is gone")

    async def wait_until_whole() -> None:
        with trio.move_on_after(JOIN_S):
            await whole.wait()
            task_status.started()
            return
        missing = sorted(set(range(1, ranks.nnodes)) - joined)
        lost(f"no word from rank {', '.join(map(str, missing))} within {JOIN_S:.0f} s")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_until_whole)
        await trio.serve_listeners(hold, [listener], handler_nursery=nursery)
    raise AssertionError("serving ends only by cancellation")


async def _greet(stream: trio.SocketStream, ranks: Ranks, joined: set[int]) -> int | None:
    """Take a worker's hello; None when it is none of ours, which is told why."""
    try:
        with trio.fail_after(_HELLO_S):
            rank = read_hello(await _line(stream), ranks, joined)
            joined.add(rank)  # before the next checkpoint: two that claim one number must not both get it
            await stream.send_all(b"welcome\n")
            return rank
    except ValueError as error:
        with trio.move_on_after(_HELLO_S):
            try:
                await stream.send_all(f"refused: {error}\n".encode())
            except trio.BrokenResourceError:
                return None
    except (trio.BrokenResourceError, trio.TooSlowError):
        pass
    return None


async def follow(ranks: Ranks, joined: Callable[[], None], lost: Callable[[str], None]) -> None:
    """Be a worker: join the leader, asking for it up to `JOIN_S`, and return after telling `lost` why it ended."""
    stream = await _dial(ranks)
    if stream is None:
        lost(f"no leader at {ranks.master_addr}:{ranks.master_port} within {JOIN_S:.0f} s")
        return
    _notice_power_loss(stream)
    async with stream:
        try:
            await stream.send_all(say_hello(ranks))
            answer = (await _line(stream)).decode("utf-8", "replace").strip()
        except trio.BrokenResourceError:
            answer = ""
        if answer != "welcome":
            lost(answer or "the leader hung up")
            return
        joined()
        await _silence(stream)
        lost("the leader is gone")


async def _dial(ranks: Ranks) -> trio.SocketStream | None:
    with trio.move_on_after(JOIN_S):
        while True:
            try:
                return await trio.open_tcp_stream(ranks.master_addr, ranks.master_port)
            except OSError:
                await trio.sleep(RETRY_S)
    return None


async def _line(stream: trio.SocketStream) -> bytes:
    """One short line; what came of it when the peer hung up before its end."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_HELLO * 4:
        data = await stream.receive_some(_LONGEST_HELLO)
        if not data:
            break
        line += data
    return line


async def _silence(stream: trio.SocketStream) -> None:
    """Return when the peer is gone; what it says until then means nothing."""
    try:
        while await stream.receive_some(_LONGEST_HELLO):
            pass
    except trio.BrokenResourceError:
        pass


def _notice_power_loss(stream: trio.SocketStream) -> None:
    """A machine that lost power sends no FIN: probes find it out within about 20 s."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

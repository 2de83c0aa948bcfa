"""Lines and their poller: no byte and no wake is lost, order is kept, what is held back is bounded."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import socket
import struct
from collections.abc import Callable

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.nursery.sleeper import Cut, Sleeper
from appliance.wire.line import CORK_FROM, CORKED_BYTES, READ_BYTES, UNACKNOWLEDGED_S, Line, Poller, keep_alive_probes
from tests.lines import drain, line_on, polling, tcp_pair


async def until(wanted: Callable[[], object]) -> None:
    while not wanted():  # noqa: ASYNC110  the kernel is in between, so there is no event to wait for
        await trio.sleep(0.001)


# -- receiving ---------------------------------------------------------------------------------------------------------


async def test_many_pairs_talk_and_no_wake_is_lost() -> None:
    """Each pair answers the other in turn, so one lost wake would hang it; together they get the poller corking."""
    rng = random.Random(5)

    async def talk(line: Line, rounds: list[bytes], begins: bool) -> None:
        for number, message in enumerate(rounds):
            if (number % 2 == 0) is begins:
                await line.send_all(message)
            else:
                got = b""
                while len(got) < len(message):
                    got += await line.recv()
                assert got == message
        line.close()

    async with polling() as poller, trio.open_nursery() as nursery:
        for _ in range(24):
            sizes = (
                rng.choice((1, 100, CORKED_BYTES, CORKED_BYTES + 1, READ_BYTES, 3 * READ_BYTES)) for _ in range(20)
            )
            rounds = [rng.randbytes(size) for size in sizes]
            near, far = tcp_pair()
            nursery.start_soon(talk, line_on(near, poller), rounds, True)
            nursery.start_soon(talk, line_on(far, poller), rounds, False)
    assert len(poller) == 0


async def test_what_came_before_the_line_was_made_is_read() -> None:
    async with polling() as poller:
        near, far = socket.socketpair()
        far.sendall(b"early")
        line = line_on(near, poller)
        assert await line.recv() == b"early"
        far.sendall(b"more")
        far.close()
        assert await line.recv() == b"more"
        assert await line.recv() == b""
        assert await line.recv() == b""
        line.close()


async def test_what_comes_between_a_try_and_the_sleep_wakes() -> None:
    async with polling() as poller:
        near, far = socket.socketpair()
        line = line_on(near, poller)
        assert line.try_recv() is None
        assert not line.readable
        far.sendall(b"x")
        assert await line.recv() == b"x"
        line.close()
        far.close()


@pytest.mark.parametrize("size", [1, READ_BYTES - 1, READ_BYTES, READ_BYTES + 1, 2 * READ_BYTES, 5 * READ_BYTES])
async def test_data_and_the_end_at_once(size: int) -> None:
    """Edge-triggered: there is no second report of the end, whatever the length of the last read was."""
    async with polling() as poller:
        near, far = tcp_pair()
        line = line_on(near, poller)
        await trio.testing.wait_all_tasks_blocked()
        data = bytes(size)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, lambda: (far.sendall(data), far.close()))
            got = b""
            while piece := await line.recv():
                got += piece
            assert got == data
        line.close()


async def test_the_end_is_seen_before_the_data_is_read() -> None:
    async with polling() as poller:
        near, far = socket.socketpair()
        line = line_on(near, poller)
        seen: list[bool] = []
        line.on_hang_up = lambda: seen.append(line.hung_up)
        far.sendall(b"last words")
        far.close()
        await until(lambda: line.hung_up)
        assert seen == [True]
        assert [await line.recv(), await line.recv()] == [b"last words", b""]
        assert seen == [True], "told once"
        line.close()


async def test_a_reset_is_an_error_and_a_hang_up() -> None:
    async with polling() as poller:
        near, far = tcp_pair()
        line = line_on(near, poller)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        with pytest.raises(ConnectionResetError):
            await line.recv()
        await until(lambda: line.hung_up)
        assert not line.try_peek()
        line.close()


async def test_bytes_can_be_seen_without_being_read() -> None:
    async with polling() as poller:
        near, far = socket.socketpair()
        line = line_on(near, poller)
        assert not line.try_peek()
        far.sendall(b"x")
        assert line.try_peek()
        assert line.try_recv() == b"x"
        far.close()
        assert not line.try_peek()
        line.close()


class Endless:
    """A socket whose peer is faster than any reader."""

    def recv_into(self, buffer: memoryview) -> int:
        return len(buffer)


async def test_a_line_that_is_always_ready_lets_others_have_their_turn_and_can_be_cancelled() -> None:
    async with polling() as poller:
        near, far = socket.socketpair()
        line = line_on(near, poller)
        line.sock = Endless()  # type: ignore[assignment]
        received = 0

        async def flooded() -> None:
            nonlocal received
            while True:
                received += len(await line.recv())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flooded)
            for _ in range(10):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert READ_BYTES <= received <= 16 * 12 * READ_BYTES
        line.sock = near
        line.close()
        far.close()


async def test_a_pump_that_is_always_ready_lets_others_have_their_turn() -> None:
    """`postpone` keeps the news that an edge-triggered set would not repeat, for after everybody else's."""
    async with polling() as poller:
        busy, far = tcp_pair()
        quiet, other = socket.socketpair()
        turns: list[str] = []
        line = Line(busy, poller)

        def pump() -> None:
            turns.append("busy")
            poller.postpone(line)

        line.on_news = pump
        far.sendall(b"x")
        await until(lambda: len(turns) > 3)
        quiet_line = line_on(quiet, poller)
        other.sendall(b"y")
        assert await quiet_line.recv() == b"y"
        line.on_news = None
        count = len(turns)
        await trio.testing.wait_all_tasks_blocked()
        assert len(turns) <= count + 1
        line.close()
        quiet_line.close()
        far.close()
        other.close()


async def test_a_postponed_line_may_be_closed_or_taken_meanwhile() -> None:
    async with polling() as poller:
        near, far = socket.socketpair()
        line = Line(near, poller)
        line.on_news = lambda: pytest.fail("closed lines have no news")
        poller.postpone(line)
        line.close()
        near, again = socket.socketpair()
        line = Line(near, poller)
        poller.postpone(line)
        again.sendall(b"x")
        await trio.testing.wait_all_tasks_blocked()
        assert line.try_recv() == b"x"
        line.close()
        far.close()
        again.close()


async def test_numbers_of_closed_sockets_are_used_again() -> None:
    """A line's registration ends with it: the next socket of the same number starts anew."""
    async with polling() as poller:
        numbers = set()
        for turn in range(20):
            near, far = tcp_pair()
            line = line_on(near, poller)
            numbers.add(line.fd)
            far.sendall(b"%d" % turn)
            if turn % 3 == 0:  # news that nobody has read, and a hang-up, go with the line
                far.close()
                await until(lambda line=line: line.hung_up)
            else:
                assert await line.recv() == b"%d" % turn
            line.close()
            line.close()
            assert len(poller) == 0
            far.close()
        assert len(numbers) < 5
        near, far = tcp_pair()
        line = line_on(near, poller)
        await trio.testing.wait_all_tasks_blocked()
        assert not line.hung_up
        assert line.try_recv() is None
        line.close()
        far.close()


async def test_a_cut_ends_every_kind_of_wait() -> None:
    class Reason(Cut):
        pass

    async with polling() as poller:
        near, far = tcp_pair(2048)
        line = line_on(near, poller)
        assert line.sleeper is not None
        ended = 0

        async def cut_thrice() -> None:
            nonlocal ended
            for wait in (line.recv, lambda: line.send_all(bytes(1 << 22)), line.flush):
                with pytest.raises(Reason):
                    await wait()
                ended += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut_thrice)
            for number in range(3):
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert ended == number
                if number == 1:  # the socket is full by now: what is put here is what the flush will wait for
                    line._backlog = b"held"
                line.sleeper.cut(Reason())
        line.abort()
        far.close()


# -- sending -----------------------------------------------------------------------------------------------------------


async def test_a_full_socket_takes_the_rest_when_it_has_room() -> None:
    async with polling() as poller:
        near, far = tcp_pair(2048)
        line, other = line_on(near, poller), line_on(far, poller)
        data = random.Random(1).randbytes(1 << 20)
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await line.send_all(data)
                line.close()

            nursery.start_soon(send)
            got = b""
            while piece := await other.recv():
                got += piece
        assert got == data
        other.close()


pieces = st.lists(
    st.tuples(
        st.booleans(),  # is the poller corking?
        st.sampled_from([1, 10, 1000, CORKED_BYTES - 1, CORKED_BYTES, CORKED_BYTES + 1, 2 * CORKED_BYTES, 200_000]),
        st.booleans(),  # does the peer read afterwards?
    ),
    max_size=25,
)


@given(pieces)
@settings(max_examples=60, deadline=None)
def test_corked_and_other_sends_keep_their_order_and_are_bounded(steps: list[tuple[bool, int, bool]]) -> None:
    """Whatever is taken arrives once and in order; what lies here is never more than two corked pieces."""
    poller = Poller()
    near, far = tcp_pair(4096)
    line = Line(near, poller)
    counter = itertools.count()
    sent = got = b""
    for corked, size, reads in steps:
        poller.corked = corked
        data = b"".join(next(counter).to_bytes(4, "big") for _ in range(-(-size // 4)))[:size]
        line.writable = line.writable or bool(select.select([], [near], [], 0)[1])
        taken = line.try_send(data)
        assert 0 <= taken <= len(data)
        sent += data[:taken]
        assert len(line._backlog) <= 2 * CORKED_BYTES
        if not corked:
            poller._flush()
        if reads:
            got += drain(far)
            line.news(select.EPOLLOUT)
    poller.corked = False
    poller._flush()
    while line.unsent or len(got) < len(sent):
        got += drain(far)
        line.news(select.EPOLLOUT)
    assert got == sent
    line.close()
    far.close()
    poller.close()


async def test_one_round_of_many_events_leaves_together() -> None:
    """From `CORK_FROM` events on, what the tasks answer is held until all of them have run, and then it leaves."""
    async with polling() as poller:
        count = CORK_FROM + 4
        held: list[int] = []

        async def answer(line: Line) -> None:
            data = await line.recv()
            await line.send_all(data.upper())
            held.append(len(poller.outbox) if poller.corked else -1)

        pairs = [tcp_pair() for _ in range(count)]
        lines = [line_on(near, poller) for near, _ in pairs]
        async with trio.open_nursery() as nursery:
            for line in lines:
                nursery.start_soon(answer, line)
            await trio.testing.wait_all_tasks_blocked()
            for _, far in pairs:
                far.sendall(b"abc")
        await until(lambda: not poller.corked)
        for line, (_, far) in zip(lines, pairs, strict=True):
            assert far.recv(100) == b"ABC"
            assert not line.unsent
            line.close()
            far.close()
        assert held == list(range(1, count + 1)), "sent one by one"


async def test_a_lost_peer_is_told_when_sending() -> None:
    async with polling() as poller:
        near, far = tcp_pair()
        line = line_on(near, poller)
        far.close()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(1000):
                await line.send_all(b"x" * 1000)
        line.close()


async def test_a_corked_send_to_a_lost_peer_shows_when_reading() -> None:
    async with polling() as poller:
        near, far = tcp_pair()
        line = line_on(near, poller)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        poller.corked = True
        assert line.try_send(b"hello") == 5
        poller.corked = False
        poller._flush()
        assert not line.unsent
        with contextlib.suppress(ConnectionResetError):
            assert await line.recv() == b""
        await until(lambda: line.hung_up)
        line.close()


def held(line: Line, poller: Poller, far: socket.socket) -> bytes:
    """Fill the socket, then cork one more piece; everything handed over."""
    data = b""
    while line.writable:
        block = bytes(65536)
        data += block[: line.try_send(block)]
    line.writable = poller.corked = True
    assert line.try_send(b"the end") == 7
    poller.corked = False
    poller._flush()
    assert line.unsent
    return data + b"the end"


async def test_a_flush_waits_for_what_is_held_back() -> None:
    async with polling() as poller:
        near, far = tcp_pair(4096)
        line = line_on(near, poller)
        sent = held(line, poller, far)
        got = b""
        async with trio.open_nursery() as nursery:

            async def part() -> None:
                await line.flush()
                assert not line.unsent
                await line.part()
                line.close()

            nursery.start_soon(part)
            far.setblocking(True)
            while piece := await trio.to_thread.run_sync(far.recv, 1 << 20):
                got += piece
            assert got == sent
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not line.closed, "the peer may still be sending"
            await trio.to_thread.run_sync(far.sendall, bytes(1 << 20))
            far.shutdown(socket.SHUT_WR)
        assert far.recv(1) == b"", "and its end is no reset"
        far.close()


async def test_a_close_drops_what_the_socket_does_not_take_and_an_abort_everything() -> None:
    async with polling() as poller:
        near, far = tcp_pair(4096)
        line = line_on(near, poller)
        sent = held(line, poller, far)
        line.close()
        got = b""
        with pytest.raises(BlockingIOError):
            far.setblocking(False)
            while True:
                piece = far.recv(1 << 20)
                if not piece:
                    raise BlockingIOError
                got += piece
        assert sent.startswith(got)
        far.close()

        near, far = tcp_pair()
        line = line_on(near, poller)
        poller.corked = True
        line.try_send(b"never")
        poller.corked = False
        line.abort()
        line.abort()
        poller._flush()
        with pytest.raises(ConnectionResetError):
            far.recv(10)
        far.close()


async def test_connecting() -> None:
    async with polling() as poller:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.socket()
            near.setblocking(False)
            with pytest.raises(BlockingIOError):
                near.connect(listener.getsockname())
            line = line_on(near, poller)
            await line.connected()
            address = listener.getsockname()
            line.close()
        near = socket.socket()
        near.setblocking(False)
        with pytest.raises(BlockingIOError):
            near.connect(address)
        line = line_on(near, poller)
        with pytest.raises(OSError, match="Connection refused"):
            await line.connected()
        line.close()


def test_how_long_a_peer_may_be_lost() -> None:
    def timeout_of(sock: socket.socket) -> float:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000

    near, far = tcp_pair()
    keep_alive_probes(near)
    assert timeout_of(near) == UNACKNOWLEDGED_S
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    keep_alive_probes(near, 5)
    assert timeout_of(near) == UNACKNOWLEDGED_S
    # the kernel counts a stalled but living peer too: its own promise must be the first to strike
    keep_alive_probes(near, 30)
    assert timeout_of(near) > 30
    keep_alive_probes(near, 1e12)
    unix, other = socket.socketpair()
    keep_alive_probes(unix)
    for sock in (near, far, unix, other):
        sock.close()


def test_a_poller_knows_its_lines() -> None:
    poller = Poller()
    near, far = socket.socketpair()
    line = Line(near, poller, Sleeper())
    assert len(poller) == 1
    poller.remove(line)
    poller.remove(line)
    assert len(poller) == 0
    line.close()
    far.close()
    poller.close()


async def test_a_number_used_again_gets_no_news_of_the_socket_that_had_it() -> None:
    """In one round of the poller, whoever is told first closes the other's socket and makes a new one of its number."""
    async with polling() as poller:
        pairs = [socket.socketpair() for _ in range(2)]
        lines = [Line(near, poller) for near, _ in pairs]
        fresh: list[Line] = []
        kept: list[socket.socket] = []

        def replace(line: Line) -> None:
            if not fresh:
                line.close()
                ends = sorted(socket.socketpair(), key=lambda end: end.fileno() != line.fd)
                if ends[0].fileno() != line.fd:
                    os.dup2(ends[0].fileno(), line.fd)
                    ends[0].close()
                    ends[0] = socket.socket(fileno=line.fd)
                kept.append(ends[1])
                fresh.append(Line(ends[0], poller))

        lines[0].on_news = lambda: replace(lines[1])
        lines[1].on_news = lambda: replace(lines[0])
        await until(lambda: not any(line.readable and line.try_recv() is not None for line in lines))
        for _, far in pairs:
            far.close()
        await until(lambda: fresh)
        assert not fresh[0].hung_up
        assert len(poller) == 2
        kept[0].close()
        await until(lambda: fresh[0].hung_up)
        for line in (*lines, *fresh):
            line.close()
        assert len(poller) == 0

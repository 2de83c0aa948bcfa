"""A sim of several ranks: complete before it serves, and gone as a whole."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from appliance.sim.listening import CannotListen, bind
from appliance.sim.ranks import follow, lead, read_hello, say_hello
from appliance.sim.settings import Ranks
from tests.engines.sim_engine import until


class Cluster:
    """One leader in this Trio run, and workers to be added; `whole` once the leader says so."""

    def __init__(self, nnodes: int, nursery: trio.Nursery) -> None:
        self.rendezvous = bind("127.0.0.1", 0, "--master-port", backlog=128)
        self.port = self.rendezvous.getsockname()[1]
        self.nnodes = nnodes
        self.nursery = nursery
        self.whole = False
        self.joined: list[int] = []
        self.lost: list[str] = []
        self.leader = trio.CancelScope()
        self.workers: dict[int, trio.CancelScope] = {}
        nursery.start_soon(self._lead)

    def ranks(self, rank: int, nnodes: int | None = None) -> Ranks:
        return Ranks(nnodes or self.nnodes, rank, "127.0.0.1", self.port)

    async def _lead(self) -> None:
        with self.leader:
            async with trio.open_nursery() as nursery:
                await nursery.start(lead, self.ranks(0), self.rendezvous, self.lost.append)
                self.whole = True

    def add(self, rank: int, nnodes: int | None = None) -> None:
        self.workers[rank] = trio.CancelScope()

        async def work() -> None:
            with self.workers[rank]:
                ranks = self.ranks(rank, nnodes)
                await follow(ranks, lambda: self.joined.append(rank), lambda why: self.lost.append(f"{rank}: {why}"))

        self.nursery.start_soon(work)


@asynccontextmanager
async def cluster(nnodes: int) -> AsyncIterator[Cluster]:
    async with trio.open_nursery() as nursery:
        yield Cluster(nnodes, nursery)
        nursery.cancel_scope.cancel()


async def test_the_leader_is_whole_once_all_have_joined_and_not_before() -> None:
    async with cluster(3) as ranks:
        ranks.add(2)
        await until(lambda: ranks.joined == [2])
        await trio.testing.wait_all_tasks_blocked()
        assert not ranks.whole
        ranks.add(1)
        await until(lambda: ranks.whole)
        assert sorted(ranks.joined) == [1, 2] and not ranks.lost


async def test_a_lost_worker_is_the_leaders_loss() -> None:
    async with cluster(2) as ranks:
        ranks.add(1)
        await until(lambda: ranks.whole)
        ranks.workers[1].cancel()
        await until(lambda: ranks.lost == ["rank 1 is gone"])


async def test_a_lost_leader_is_every_workers_loss() -> None:
    async with cluster(3) as ranks:
        ranks.add(1)
        ranks.add(2)
        await until(lambda: ranks.whole)
        ranks.leader.cancel()
        await until(lambda: sorted(ranks.lost) == ["1: the leader is gone", "2: the leader is gone"])


@pytest.mark.parametrize(
    ("rank", "nnodes", "why"),
    [
        (1, None, "rank 1 has joined already"),
        (2, 4, "rank 2 expects 4 nodes, this leader 3"),
        (7, None, "no worker rank 7"),
    ],
)
async def test_a_rank_that_does_not_belong_is_refused_and_harms_nobody(rank: int, nnodes: int | None, why: str) -> None:
    async with cluster(3) as ranks:
        ranks.add(1)
        await until(lambda: ranks.joined == [1])
        ranks.add(rank, nnodes)
        await until(lambda: ranks.lost)
        assert why in ranks.lost[0]
        ranks.add(2)
        await until(lambda: ranks.whole)


async def test_a_stranger_at_the_rendezvous_harms_nobody() -> None:
    async with cluster(2) as ranks:
        async with await trio.open_tcp_stream("127.0.0.1", ranks.port) as stranger:
            await stranger.send_all(b"GET / HTTP/1.1\r\n\r\n")
            assert b"refused: not a rank" in await stranger.receive_some()
        ranks.add(1)
        await until(lambda: ranks.whole)


async def test_a_worker_keeps_asking_for_a_leader_that_is_late() -> None:
    free = bind("127.0.0.1", 0, "--master-port")
    ranks = Ranks(2, 1, "127.0.0.1", free.getsockname()[1])
    joined: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow, ranks, lambda: joined.append(1), lambda why: None)
        await trio.testing.wait_all_tasks_blocked(0.01)  # it has been refused by now, and waits to ask again
        free.listen(1)
        await nursery.start(lead, Ranks(2, 0), free, lambda why: None)
        await until(lambda: joined)
        nursery.cancel_scope.cancel()


def test_hello_is_read_as_it_is_said() -> None:
    ranks = Ranks(4, 3)
    assert read_hello(say_hello(ranks), ranks, {1, 2}) == 3


@pytest.mark.parametrize(
    "line", [b"", b"sim-rank x of 4", b"sim-rank 1 of", b"sim-rank -1 of 4", "sim-rank ² of 4".encode()]
)
def test_a_broken_hello_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"rank"):
        read_hello(line, Ranks(4, 0), set())


def test_a_taken_port_names_the_flag_to_change() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(CannotListen, match=r"127\.0\.0\.1:\d+: Address already in use; choose another --port"):
            bind("127.0.0.1", holder.getsockname()[1], "--port")
    with pytest.raises(CannotListen, match="no-such-host"):
        bind("no-such-host.invalid", 0, "--port")

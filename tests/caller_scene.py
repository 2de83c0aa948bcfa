"""A caller with shards that only remember, and a control plane that is the test: each call arrives as a `Line`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any, TypeVar

import attrs
import trio

from appliance.agent.conversation import Standing
from appliance.agent.credentials import Credentials
from appliance.agent.following import Following
from appliance.agent.link import Caller
from appliance.facts import link as say
from appliance.facts.hardware import Inventory
from appliance.facts.replica import Shard
from appliance.wire.link import Link, LinkClosed, LinkRefused, memory_links
from tests.agent_scene import NODE, SIM, FakeShards, machine

BEAT_S, SILENCE_S = 5.0, 20.0
STANDING = Standing("box", "1.0", "boot-1", (20000, 20009))

M = TypeVar("M")


def shard(replica: str, **changes: Any) -> Shard:
    return Shard(replica, "m", SIM, node="box", **changes)


class LoggedShards(FakeShards):
    """Fake shards with logs: what a test writes into the file `log` is every shard's."""

    def __init__(self, log: str = "/nonexistent") -> None:
        super().__init__()
        self.log = log
        self.fault: Exception | None = None

    def start(self, shard: Shard) -> None:
        if self.fault is not None:
            raise self.fault
        super().start(shard)

    def stop(self, shard_id: str, *, drain_s: float = 0) -> None:
        if shard_id in self.told:
            super().stop(shard_id, drain_s=drain_s)

    def forget(self, shard_id: str) -> None:
        if shard_id in self.told:
            super().forget(shard_id)

    async def log_lines(self, shard_id: str, n: int) -> list[str]:
        await trio.lowlevel.checkpoint()
        assert self.told[shard_id]
        return [f"line {number}" for number in range(n)]

    def follow_log(self, shard_id: str) -> Following:
        assert self.told[shard_id]
        return Following(self.log, lambda: ("secret-key",))


@attrs.define(eq=False)
class Line:
    """The control plane's end of one call."""

    link: Link

    async def hear(self, kind: type[M]) -> M:
        """The next message of this kind; beats and others before it are passed over."""
        with trio.fail_after(1000):
            while True:
                message = await self.link.receive()
                if isinstance(message, kind):
                    return message

    async def next(self) -> say.Message:
        """The next message that is no beat."""
        with trio.fail_after(1000):
            while isinstance(message := await self.link.receive(), say.Beat):
                continue
        return message

    async def only_beats(self, count: int = 2) -> None:
        """Nothing but so many beats follows."""
        for _ in range(count):
            assert isinstance(await self.link.receive(), say.Beat)

    async def say(self, message: say.Message) -> None:
        await self.link.send(message)

    async def welcome(self, beat_s: float = BEAT_S, silence_s: float = SILENCE_S, clock: float = 0.0) -> say.Register:
        register = await self.hear(say.Register)
        await self.say(say.Welcome(say.PROTOCOL, "1.1", clock or trio.current_time(), beat_s, silence_s))
        return register

    async def keep_up(self, every_s: float = 1.0) -> None:
        """Say beats until the link ends."""
        try:
            while True:
                await self.say(say.Beat(trio.current_time()))
                await trio.sleep(every_s)
        except LinkClosed:
            return


class Board:
    """Where calls arrive: `answer` is what the next ones get, a `Line` by default."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.refuse: Exception | None = None
        self.stuck = False
        self._send, self._lines = trio.open_memory_channel[Line](math.inf)
        self.wrap: Callable[[Link], Link] = lambda link: link

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[Link]:
        self.at.append(trio.current_time())
        if self.stuck:
            await trio.sleep_forever()
        if self.refuse is not None:
            raise self.refuse
        ours, theirs = memory_links()
        self._send.send_nowait(Line(theirs))
        try:
            yield self.wrap(ours)
        finally:
            await ours.aclose()

    async def call(self) -> Line:
        with trio.fail_after(1000):
            return await self._lines.receive()

    @property
    def waits(self) -> list[float]:
        """Seconds between two calls."""
        return [after - before for before, after in zip(self.at, self.at[1:], strict=False)]


@attrs.define(eq=False)
class Scene:
    caller: Caller
    shards: LoggedShards
    board: Board
    nursery: trio.Nursery
    machine: Any

    async def call(self) -> Line:
        return await self.board.call()

    async def welcomed(self, **how: Any) -> Line:
        line = await self.call()
        await line.welcome(**how)
        return line

    def see(self, inventory: Inventory) -> None:
        """The machine has looked."""
        self.machine.inventory = inventory
        self.machine.changed.tell()


@asynccontextmanager
async def calling(
    *,
    log: str = "/nonexistent",
    now: Callable[[], float] | None = None,
    credentials: Credentials | None = None,
    seed: int = 1,
) -> AsyncIterator[Scene]:
    """A caller that calls a board of the test's."""
    shards, found, board = LoggedShards(log), machine(NODE), Board()
    clock = now or trio.current_time
    caller = Caller("wss://plane", board.dial, STANDING, shards, found, Random(seed), clock, credentials=credentials)
    async with trio.open_nursery() as nursery:
        await nursery.start(caller.wake.relay, shards.changed.wait)
        await nursery.start(caller.wake.relay, found.changed.wait)
        nursery.start_soon(caller.keep)
        yield Scene(caller, shards, board, nursery, found)
        nursery.cancel_scope.cancel()


def gone(text: str = "connection refused") -> LinkRefused:
    return LinkRefused(f"plane:6384: {text}")

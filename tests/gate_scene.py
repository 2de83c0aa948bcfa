"""A router and its engines for tests of admission: sims in the same Trio loop, or scripted engines held at will.

async with sim(slots=8, tokens_per_s=400) as a, router(tmp_path, config=a.toml(engine="sim")) as door:
    answers = await burst(door, 300, band="silver")
    assert a.most_waiting <= 2
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import h11
import trio

from appliance.gateway.record import Record
from appliance.rules.admission.queue import Admission
from appliance.rules.admission.ticket import Ticket
from appliance.sim.batch import Sequence
from appliance.sim.settings import Sizes, Speeds
from tests.engines import sim_engine
from tests.fake_engine import CHAT, Asked, FakeEngine, Peer, fake_engine, whole
from tests.raw_client import Answer, chat
from tests.routers import Running

MODEL = "llama"
_seeds = itertools.count()
WITHIN_S = 60.0
"""The longest an answer may take; it only ends a test that would fail anyway."""


# -- engines -----------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Sim:
    """A sim that remembers how long its own queue and its batch were at most."""

    running: sim_engine.Running
    most_waiting: int = 0
    most_running: int = 0
    asked: int = 0

    def forget(self) -> None:
        self.most_waiting = self.most_running = self.asked = 0

    def toml(self, *, id: str = "a", engine: str = "sim", capacity: int = 0, model: str = MODEL, more: str = "") -> str:
        return (
            f'[[endpoints]]\nid = "{id}"\nurl = "{self.running.url}/v1"\nmodels = ["{model}"]\n'
            f'engine = "{engine}"\ncapacity = {capacity}\n{more}\n'
        )


@asynccontextmanager
async def sim(
    slots: int, *, tokens_per_s: float = 400.0, slowdown: float = 0.0, model: str = MODEL
) -> AsyncIterator[Sim]:
    """A sim with so many slots, in this Trio run."""
    speeds = Speeds(0, tokens_per_s, slowdown)
    async with sim_engine.serving(speeds=speeds, sizes=Sizes(max_num_seqs=slots), models=(model,)) as running:
        batch, found = running.batch, Sim(running)
        submit = batch.submit

        def watched(sequence: Sequence, now: float) -> None:
            submit(sequence, now)
            found.asked += 1
            found.most_waiting = max(found.most_waiting, batch.waiting)
            found.most_running = max(found.most_running, batch.running)

        batch.submit = watched  # type: ignore[method-assign]
        yield found


@attrs.define(eq=False)
class Held:
    """A scripted engine that answers nothing until it is let go, one request at a time or all."""

    engine: FakeEngine
    inside: list[tuple[str, trio.Event]] = attrs.field(factory=list)
    """Requests it holds, oldest first: their session, and what lets them go."""
    order: list[str] = attrs.field(factory=list)
    """Sessions in the order in which they came."""
    bands: list[str] = attrs.field(factory=list)
    open: bool = False

    def let_go(self, count: int = 1) -> None:
        for _ in range(count):
            self.inside.pop(0)[1].set()

    def let_all_go(self) -> None:
        self.open = True
        self.let_go(len(self.inside))


@asynccontextmanager
async def held(capacity: int, *, id: str = "a", model: str = MODEL) -> AsyncIterator[Held]:
    """An engine whose capacity the configuration tells (0: unknown)."""
    seen: list[Held] = []

    async def script(asked: Asked, peer: Peer) -> None:
        here = seen[0]
        session = str(asked.json().get("user", ""))
        here.order.append(session)
        if not here.open:
            gone = trio.Event()
            here.inside.append((session, gone))
            async with trio.open_nursery() as nursery:

                async def leave_with_the_router() -> None:
                    await peer.left()
                    gone.set()

                nursery.start_soon(leave_with_the_router)
                await gone.wait()
                nursery.cancel_scope.cancel()
            here.inside = [entry for entry in here.inside if entry[1] is not gone]
        if peer.open:
            usage = {"prompt_tokens": len(asked.body) // 4, "completion_tokens": 8}
            await peer.send(whole(200, {**CHAT, "usage": usage}))

    async with fake_engine(script, id=id) as engine:
        engine.models = (model,)
        engine.capacity = capacity
        seen.append(Held(engine))
        yield seen[0]


# -- clients -----------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Told:
    """A request of a test and what became of it. `answer` None: there is none (yet)."""

    band: str
    session: str
    answer: Answer | None = None
    place: int = 0
    """How many of its group had their answer before it."""
    took_s: float = 0.0

    @property
    def status(self) -> int:
        return self.answer.status if self.answer is not None else 0


async def ask(door: Running, *, band: str = "", session: str = "", **more: Any) -> Told:
    """One chat request on a connection of its own, to its end."""
    told = Told(band, session)
    began = time.monotonic()
    client = await door.connect()
    await client.send(raw(band, session, **more))
    data = b""
    with trio.fail_after(WITHIN_S):
        while piece := await client.stream.receive_some(65536):
            data += piece
    await client.close()
    told.answer = read(data)
    told.took_s = time.monotonic() - began
    return told


def raw(band: str = "", session: str = "", **more: Any) -> bytes:
    """No two are the same: the breaker takes a request that fails again for what is wrong."""
    fields = ["connection: close"] + ([f"x-appliance-band: {band}"] if band else [])
    if session:
        more["user"] = session
    return chat(*fields, **{"max_tokens": 4, "ignore_eos": True, "seed": next(_seeds), **more})


def read(data: bytes) -> Answer:
    """A whole answer, which h11 must take for one."""
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    http.send(h11.EndOfMessage())
    http.receive_data(data)
    http.receive_data(b"")
    head = http.next_event()
    assert isinstance(head, h11.Response), data[:200]
    body = b""
    while isinstance(event := http.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    return Answer(head.status_code, {n.decode(): v.decode() for n, v in head.headers}, body)


class Group:
    """Requests that run beside the test; `told` in the order in which they were begun, `done` in that of their ends."""

    def __init__(self, door: Running, nursery: trio.Nursery) -> None:
        self.door = door
        self.told: list[Told] = []
        self.done: list[Told] = []
        self._nursery = nursery

    def begin(self, count: int, *, band: str = "", session: str = "", **more: Any) -> list[Told]:
        fresh = [Told(band, session) for _ in range(count)]
        for told in fresh:
            self.told.append(told)
            self._nursery.start_soon(self._run, told, more)
        return fresh

    async def _run(self, told: Told, more: dict[str, Any]) -> None:
        found = await ask(self.door, band=told.band, session=told.session, **more)
        told.answer, told.took_s, told.place = found.answer, found.took_s, len(self.done)
        self.done.append(told)

    def statuses(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for told in self.told:
            found[told.status] = found.get(told.status, 0) + 1
        return found


async def burst(door: Running, count: int, *, band: str = "", **more: Any) -> Group:
    """So many requests at one moment, to their ends."""
    async with trio.open_nursery() as nursery:
        group = Group(door, nursery)
        group.begin(count, band=band, **more)
    return group


# -- the router's books ------------------------------------------------------------------------------------------------


def rules(door: Running) -> Admission:
    return door.app.gateway.gate.rules


def records(door: Running, of: Callable[[Record], bool] = lambda record: True) -> list[Record]:
    return [record for record in door.app.gateway.books.recent(4000) if of(record)]


def tickets(door: Running) -> list[Ticket]:
    """Places in line of all requests, live ones first."""
    return [ticket for record in records(door) for ticket in record.tickets]


async def waiting(door: Running, count: int, band: str = "") -> None:
    """Until exactly so many wait (of a band, or in all)."""

    def now() -> int:
        return rules(door).depth(band) if band else rules(door).lines.count

    await door.until(f"{count} wait (now {now()})", lambda: now() == count)


def error_of(told: Told) -> str:
    assert told.answer is not None
    return str(json.loads(told.answer.body)["error"]["code"])

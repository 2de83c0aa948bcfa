"""Everything at once through a whole router: nothing may be left of anybody, and nobody may be forgotten.

What is random here is drawn from a seed, but the order in which sockets speak is not: this finds faults, and the tests
beside it pin them down.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest
import trio

from appliance.facts.endpoint import Sample
from tests.fake_engine import CHAT, DONE, Asked, FakeEngine, Peer, event, fake_engine, streamed, whole
from tests.gate_scene import Group, raw, records, rules, tickets
from tests.routers import Running, router

REQUESTS = 600
BANDS = ("platinum", "gold", "silver", "bronze")
MODELS = """
[[models]]
name = "llama"
fallbacks = ["spare"]
[[models]]
name = "spare"
"""


def moody(rng: Random) -> object:
    """An engine that mostly answers, in its own time, and otherwise fails in every way there is."""

    async def script(asked: Asked, peer: Peer) -> None:
        mood = rng.random()
        await trio.sleep(rng.random() * 0.02)
        if mood < 0.04:
            await peer.send(whole(rng.choice((500, 503, 429, 400)), {"error": {"message": "no"}}))
        elif mood < 0.06:
            await peer.reset()
        elif mood < 0.07:
            await peer.close()
        elif asked.json().get("stream"):
            await peer.send(*streamed(*(event(word) for word in "abc"), DONE))
        else:
            await peer.send(whole(200, CHAT))

    return script


async def client(door: Running, rng: Random, ended: dict[str, int]) -> None:
    stream = await door.connect()
    more = {"stream": True} if rng.random() < 0.5 else {}
    model = "spare" if rng.random() < 0.2 else "llama"
    await stream.send(raw(rng.choice(BANDS), f"t{rng.randrange(5)}", model=model, **more))
    data = b""
    with trio.move_on_after(rng.random() * 0.3 if rng.random() < 0.2 else 60) as patience:
        try:
            while piece := await stream.stream.receive_some(65536):
                data += piece
        except trio.BrokenResourceError:
            data += b"reset"
    await trio.aclose_forcefully(stream.stream)
    ended["left" if patience.cancelled_caught else data[9:12].decode()] += 1


def upset(door: Running, engines: list[FakeEngine], rng: Random) -> None:
    """One thing that operators, engines and networks do."""
    gateway, now = door.app.gateway, time.monotonic()
    members = list(gateway.table.members.values())
    member = rng.choice(members)
    match rng.randrange(7):
        case 0:
            left = [engine for engine in engines if rng.random() < 0.7] or engines[:1]
            for engine in left:
                engine.capacity = rng.choice((0, 1, 3, 8))
            total = rng.choice(("", "[admission]\nqueue_capacity_total = 5\n", "[admission]\nenabled = false\n"))
            door.file.write_text(total + MODELS + "".join(engine.toml for engine in left))
            assert not door.app.reload()
        case 1:
            member.set_draining(not member.draining)
        case 2:
            for draining in members:
                draining.set_draining(False)
        case 3:
            gateway.sampled(member, Sample(now, rng.randrange(9), rng.randrange(3), rng.choice((None, 0.9, 0.1))), 1.0)
        case 4:
            member.fresh_until = now - 1
        case 5:
            gateway.gate.sweep(now + rng.choice((0, 11, 40)))
        case 6:
            running = [record for record in records(door) if record.outcome == "running"]
            if running:
                rng.choice(running).cancel()


@pytest.mark.parametrize("seed", range(2))
async def test_a_storm_leaves_nothing_behind(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    ended = dict.fromkeys(("left", "200", "400", "429", "500", "502", "503", "504", "", "res"), 0)
    async with fake_engine(moody(rng), id="a") as a, fake_engine(moody(rng), id="b") as b, fake_engine(id="c") as c:
        c.models = ("spare",)
        engines = [a, b, c]
        a.capacity, b.capacity, c.capacity = 3, 0, 2
        async with router(tmp_path, *engines, config=MODELS) as door:
            async with trio.open_nursery() as nursery:
                for number in range(REQUESTS):
                    nursery.start_soon(client, door, rng, ended)
                    if rng.random() < 0.3:
                        await trio.sleep(rng.random() * 0.02)
                    if number % 10 == 9:
                        upset(door, engines, rng)
                for member in door.app.gateway.table.members.values():
                    member.set_draining(False)
            assert sum(ended.values()) == REQUESTS
            assert ended["200"] > REQUESTS / 10
            assert not door.told("request failed inside the router")
            assert {ticket.state for ticket in tickets(door)} <= {"ended", "refused"}
            subject = rules(door)
            await door.until("nothing is in line or leased", lambda: not subject.lines.count and not subject.leased)
            # and whoever comes now is served
            door.file.write_text("".join(engine.toml for engine in engines[2:]))
            assert not door.app.reload()
            async with trio.open_nursery() as nursery:
                group = Group(door, nursery)
                group.begin(20, band="gold", model="spare")
            assert group.statuses() == {200: 20}

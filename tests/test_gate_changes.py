"""What changes while requests wait or run: endpoints that fail, drain, vanish or fall silent, and settings."""

from __future__ import annotations

import time
from pathlib import Path

import trio

from appliance.facts.endpoint import Sample
from appliance.gateway.reply import Left
from tests.fake_engine import CHAT, Asked, FakeEngine, Peer, fake_engine, in_turn, says, whole
from tests.gate_scene import Group, Held, ask, burst, error_of, held, raw, records, rules, tickets, waiting
from tests.raw_client import chat
from tests.routers import Running, router

FALLBACK = """
[[models]]
name = "llama"
fallbacks = ["spare"]
"""


def write(door: Running, *engines: FakeEngine, config: str = "") -> None:
    """Change the file, and have the router read it as SIGHUP does."""
    door.file.write_text(config + "\n" + "".join(engine.toml for engine in engines))
    assert not door.app.reload()


async def fill(group: Group, engine: Held, count: int, band: str = "silver") -> None:
    before = len(engine.inside)
    group.begin(count, band=band)
    await group.door.until("the engine holds them", lambda: len(engine.inside) == before + count)


def without_a_clock(door: Running) -> None:
    """From here on nothing is noticed by looking at the clock: what happens must be seen as it happens."""
    door.app.gateway.gate.sweep = lambda now: None  # type: ignore[method-assign]


def load_of(door: Running, id: str = "a") -> tuple[int, int]:
    load = rules(door).loads[id]
    return load.inflight, load.leased


# -- endpoints that vanish ---------------------------------------------------------------------------------------------


async def test_an_endpoint_that_vanishes_with_50_requests_leaves_nothing_behind(tmp_path: Path) -> None:
    async with (
        held(50) as a,
        held(2, id="b") as b,
        router(tmp_path, a.engine) as door,
        trio.open_nursery() as nursery,
    ):
        group = Group(door, nursery)
        await fill(group, a, 50, "gold")
        group.begin(30, band="gold")
        await waiting(door, 30)
        write(door, b.engine)
        await door.until("b took what it can", lambda: len(b.inside) == 2)
        assert (load_of(door, "a"), load_of(door, "b"), rules(door).lines.count) == ((50, 0), (2, 0), 28)
        a.let_all_go()  # they run on where they are
        await door.until("they have ended", lambda: group.statuses().get(200) == 50)
        assert set(rules(door).loads) == {"b"}
        assert len(b.inside) == 2
        b.let_all_go()
    assert group.statuses() == {200: 80}


async def test_places_given_at_an_endpoint_that_vanishes_move_with_their_requests(tmp_path: Path) -> None:
    """50 grants that are not sent yet: the reload comes in the same step."""
    async with (
        held(1) as a,
        held(60, id="b") as b,
        router(tmp_path, a.engine) as door,
        trio.open_nursery() as nursery,
    ):
        group = Group(door, nursery)
        await fill(group, a, 1)
        group.begin(50, band="gold")
        await waiting(door, 50)
        write(door, a.engine, b.engine)  # wakes them: b has room
        assert sum(ticket.state == "granted" for ticket in tickets(door)) == 50
        write(door, a.engine)
        assert load_of(door, "a") == (1, 50)
        await door.until("all were sent to the one that is left", lambda: len(a.inside) == 51)
        assert (b.order, set(rules(door).loads)) == ([], {"a"})
        a.let_all_go()
    assert group.statuses() == {200: 51}


async def test_waiters_are_told_when_their_only_endpoint_vanishes(tmp_path: Path) -> None:
    async with (
        held(1) as a,
        held(1, id="b", model="other") as b,
        router(tmp_path, a.engine) as door,
        trio.open_nursery() as nursery,
    ):
        group = Group(door, nursery)
        await fill(group, a, 1)
        told = group.begin(3)
        await waiting(door, 3)
        write(door, b.engine)
        await door.until("they were told", lambda: all(each.answer for each in told))
        assert {(each.status, error_of(each)) for each in told} == {(503, "model_not_ready")}
        assert all(each.answer is not None and "has no endpoint" in each.answer.error["message"] for each in told)
        assert {each.answer.fields["retry-after"] for each in told if each.answer} == {"5"}
        a.let_all_go()


# -- endpoints that fail -----------------------------------------------------------------------------------------------


async def test_waiters_are_told_at_once_when_the_breaker_of_their_only_endpoint_opens(tmp_path: Path) -> None:
    fail = trio.Event()

    async def script(asked: Asked, peer: Peer) -> None:
        await fail.wait()
        await peer.send(whole(500, {"error": {"message": "broken", "type": "x", "param": None, "code": "x"}}))

    async with fake_engine(script) as engine:
        engine.capacity = 5
        async with router(tmp_path, engine) as door, trio.open_nursery() as nursery:
            group = Group(door, nursery)
            group.begin(5, band="gold")
            await door.until("all five are there", lambda: len(engine.asked) == 5)
            told = group.begin(7, band="gold")
            await waiting(door, 7)
            without_a_clock(door)
            fail.set()
            await door.until("all were told", lambda: all(each.answer for each in group.told))
            assert {(each.status, error_of(each)) for each in told} == {(503, "model_not_ready")}
            assert all("stopped after failures" in each.answer.error["message"] for each in told if each.answer)
            assert len(engine.asked) == 5


async def test_waiters_take_their_fallback_when_the_breaker_opens(tmp_path: Path) -> None:
    fail = trio.Event()

    async def script(asked: Asked, peer: Peer) -> None:
        await fail.wait()
        await peer.reset()

    async with fake_engine(script) as broken, held(100, id="b", model="spare") as spare:
        broken.capacity = 6
        async with (
            router(tmp_path, broken, spare.engine, config=FALLBACK) as door,
            trio.open_nursery() as nursery,
        ):
            spare.open = True
            group = Group(door, nursery)
            group.begin(6, band="gold")
            await door.until("all six are there", lambda: len(broken.asked) == 6)
            told = group.begin(7, band="gold")
            await waiting(door, 7)
            fail.set()
            await door.until("all were told", lambda: all(each.answer for each in group.told))
            assert {each.status for each in told} == {200}
            assert {record.choices[-1].model for record in records(door) if record.code == 200} == {"spare"}


async def test_a_half_open_endpoint_counts_as_one_place_and_its_neighbour_is_not_overfilled(tmp_path: Path) -> None:
    """a fails until it is stopped; when it may be tried again, a burst comes."""
    async with held(8, id="b") as b, fake_engine(id="a") as a:
        a.capacity = 8
        async with router(tmp_path, a, b.engine) as door, trio.open_nursery() as nursery:
            (first, _) = door.app.gateway.table.members.values()
            for _ in range(5):
                first.breaker.fail(time.monotonic(), door.app.gateway.rng, False)
            first.set_draining(False)  # settles its gates
            assert not first.up
            first.breaker.open_until = time.monotonic() - 1
            door.app.gateway.gate.sweep(time.monotonic())
            assert rules(door).loads["a"].capacity == 1
            group = Group(door, nursery)
            group.begin(40, band="silver")
            await door.until("the probe was answered", lambda: first.up)
            await door.until("all others were answered by a", lambda: len(group.done) + len(b.inside) == 40)
            assert len(b.inside) <= 8
            b.let_all_go()
    assert group.statuses() == {200: 40}


async def test_an_endpoint_that_is_back_takes_waiters_at_once(tmp_path: Path) -> None:
    engine = in_turn(*[says(whole(500, b"broken"))] * 5, says(whole(200, CHAT)))
    async with fake_engine(engine) as fake, router(tmp_path, fake) as door:
        (member,) = door.app.gateway.table.members.values()
        for seed in range(5):
            assert (await door.ask(chat(seed=seed))).status == 500
        assert not member.up
        assert (await door.ask(chat())).error["code"] == "model_not_ready"
        member.breaker.open_until = time.monotonic()
        door.app.gateway.gate.sweep(time.monotonic())
        without_a_clock(door)
        for _ in range(20):  # the first is the probe; none of the others has to wait for a look at the clock
            assert (await door.ask(chat())).status == 200


async def test_a_request_that_is_tried_elsewhere_takes_its_place_along(tmp_path: Path) -> None:
    async with fake_engine(says(whole(503, b"full")), id="a") as a, held(3, id="b") as b:
        a.capacity = 3
        async with router(tmp_path, a, b.engine) as door, trio.open_nursery() as nursery:
            group = Group(door, nursery)
            group.begin(3, band="gold")
            await door.until("all came to b", lambda: len(b.inside) == 3)
            assert (load_of(door, "a"), load_of(door, "b")) == ((0, 0), (3, 0))
            b.let_all_go()
    assert group.statuses() == {200: 3}


# -- endpoints that drain or fall silent -------------------------------------------------------------------------------


async def test_waiters_are_told_when_their_only_endpoint_drains(tmp_path: Path) -> None:
    async with held(1) as engine, router(tmp_path, engine.engine) as door, trio.open_nursery() as nursery:
        group = Group(door, nursery)
        await fill(group, engine, 1)
        (told,) = group.begin(1)
        await waiting(door, 1)
        (member,) = door.app.gateway.table.members.values()
        member.set_draining(True)
        await door.until("it was told", lambda: told.answer)
        assert (told.status, error_of(told)) == (503, "model_not_ready")
        assert told.answer is not None and "draining" in told.answer.error["message"]
        engine.let_all_go()  # the one that runs there ends well
    assert group.statuses() == {200: 1, 503: 1}


async def test_an_endpoint_whose_metrics_fall_silent_is_full_for_ten_seconds_and_never_overfills_the_others(
    tmp_path: Path,
) -> None:
    async with held(4, id="a") as a, held(4, id="b") as b, router(tmp_path, a.engine, b.engine) as door:
        one, two = door.app.gateway.table.members.values()
        gate, now = door.app.gateway.gate, time.monotonic()
        for member in (one, two):
            hear(door, member.id, now)
        async with trio.open_nursery() as nursery:
            group = Group(door, nursery)
            one.fresh_until = now - 0.1  # nothing came from a for too long; the choice will avoid it
            one.full_until = now + 9.9
            gate.sweep(now)
            group.begin(20, band="gold")
            await door.until("b is full", lambda: len(b.inside) == 4 and rules(door).lines.count == 16)
            assert not a.inside
            gate.sweep(now + 10.5)  # full for long enough: its own count holds from here on
            one.full_until = now - 0.1
            await door.until("a takes its share", lambda: len(a.inside) == 4)
            assert rules(door).lines.count == 12
            a.let_all_go()
            b.let_all_go()
        assert group.statuses() == {200: 20}


async def test_when_all_endpoints_fall_silent_their_own_counts_hold_at_once(tmp_path: Path) -> None:
    async with held(4) as a, router(tmp_path, a.engine) as door, trio.open_nursery() as nursery:
        now = time.monotonic()
        (member,) = door.app.gateway.table.members.values()
        hear(door, "a", now)
        member.fresh_until = now - 0.1
        member.full_until = now + 9.9
        door.app.gateway.gate.sweep(now)
        group = Group(door, nursery)
        group.begin(9, band="gold")
        await door.until("it is full", lambda: len(a.inside) == 4 and rules(door).lines.count == 5)
        a.let_all_go()


async def test_an_engine_without_the_metrics_it_should_have_is_told_by_its_answers(tmp_path: Path) -> None:
    most = here = 0

    async def script(asked: Asked, peer: Peer) -> None:
        nonlocal most, here
        if asked.target == "/metrics":
            await peer.send(whole(404, b"no such page"))
            return
        here += 1
        most = max(most, here)
        await trio.sleep(0.2)
        here -= 1
        await peer.send(whole(200, {**CHAT, "usage": {"prompt_tokens": 3, "completion_tokens": 10}}))

    async with fake_engine(script) as engine:
        table = f'[[endpoints]]\nid = "a"\nurl = "{engine.url}"\nmodels = ["llama"]\nengine = "vllm"\n'
        async with router(tmp_path, config=table) as door:
            group = await burst(door, 60, band="gold")
    assert group.statuses() == {200: 60}
    assert most > 4  # it takes whoever comes; held to the cold rule for ever it would never have had more than 2


def hear(door: Running, id: str, now: float) -> None:
    """A sample of an idle engine, as a scrape would bring it."""
    door.app.gateway.sampled(door.app.gateway.table.members[id], Sample(now, 0, 0), 1.0)


# -- settings ----------------------------------------------------------------------------------------------------------


async def test_bands_that_change_while_requests_wait(tmp_path: Path) -> None:
    """bronze gets a higher ceiling, silver goes away: its waiters go on in the new default band."""
    bands = """
[admission]
default_band = "gold"
[[admission.bands]]
name = "gold"
ceiling = 1.0
capacity = 10
ttl_s = 30
[[admission.bands]]
name = "bronze"
ceiling = 1.0
capacity = 10
ttl_s = 30
"""
    async with held(10) as engine, router(tmp_path, engine.engine) as door, trio.open_nursery() as nursery:
        group = Group(door, nursery)
        await fill(group, engine, 9)
        group.begin(2, band="silver", session="silver")
        group.begin(2, band="bronze", session="bronze")
        await waiting(door, 4)
        write(door, engine.engine, config=bands)
        await door.until("one more may run now", lambda: len(engine.inside) == 10)
        assert engine.order[-1] == "silver"  # gold by now
        assert [figures.waiting for figures in rules(door).bands(time.monotonic())] == [1, 2]
        (refused,) = group.begin(1, band="silver")
        await door.until("silver is unknown", lambda: refused.answer)
        assert (refused.status, error_of(refused)) == (400, "unknown_band")
        engine.let_all_go()
    assert group.statuses() == {200: 13, 400: 1}


async def test_a_band_that_went_away_is_the_default_on_the_way_to_a_fallback(tmp_path: Path) -> None:
    band = '[[admission.bands]]\nname = "only"\nceiling = 1\ncapacity = 9\nttl_s = 9\n'
    bands = f'[admission]\ndefault_band = "only"\n{band}'
    band = '[[admission.bands]]\nname = "only"\nceiling = 1\ncapacity = 9\nttl_s = 9\n'
    bands = f'[admission]\ndefault_band = "only"\n{band}'
    fail = trio.Event()

    async def script(asked: Asked, peer: Peer) -> None:
        await fail.wait()
        await peer.send(whole(503, b"later"))

    async with fake_engine(script) as engine, fake_engine(id="b") as spare:
        spare.models = ("spare",)
        async with router(tmp_path, engine, spare, config=FALLBACK) as door, trio.open_nursery() as nursery:
            group = Group(door, nursery)
            (told,) = group.begin(1, band="bronze")
            await door.until("it is there", lambda: engine.asked)
            write(door, engine, spare, config=bands + FALLBACK)
            fail.set()
            await door.until("it has its answer", lambda: told.answer)
            assert told.status == 200
            (record,) = records(door)
            assert [ticket.band for ticket in record.tickets] == ["bronze", "only"]


async def test_with_admission_off_nobody_waits_and_everybody_is_counted(tmp_path: Path) -> None:
    off = "[admission]\nenabled = false\n"
    async with (
        held(1) as engine,
        router(tmp_path, engine.engine, config=off) as door,
        trio.open_nursery() as nursery,
    ):
        group = Group(door, nursery)
        group.begin(30, band="bronze")
        await door.until("all are there", lambda: len(engine.inside) == 30)
        assert (load_of(door), rules(door).lines.count) == ((30, 0), 0)
        assert rules(door).saturations() == [("llama", "main", 30.0)]
        write(door, engine.engine)  # on again, live
        group.begin(2, band="platinum")
        await waiting(door, 2)
        write(door, engine.engine, config=off)
        await door.until("nobody waits", lambda: len(engine.inside) == 32)
        engine.let_all_go()
    assert group.statuses() == {200: 32}


# -- fallbacks and pools -----------------------------------------------------------------------------------------------


async def test_a_request_that_the_queue_refuses_takes_its_fallback(tmp_path: Path) -> None:
    config = "[admission]\nqueue_capacity_total = 1\n" + FALLBACK
    async with (
        held(1) as a,
        held(9, id="b", model="spare") as spare,
        router(tmp_path, a.engine, spare.engine, config=config) as door,
        trio.open_nursery() as nursery,
    ):
        spare.open = True
        group = Group(door, nursery)
        await fill(group, a, 1)
        (waits,) = group.begin(1)
        await waiting(door, 1)
        over = await ask(door)
        assert over.status == 200
        (record,) = records(door, lambda record: record.code == 200)
        assert [ticket.model for ticket in record.tickets] == ["llama", "spare"]
        assert record.choices[-1].model == "spare"
        door.app.gateway.gate.sweep(time.monotonic() + 61)  # and so does one whose time is up
        await door.until("it was served", lambda: waits.answer)
        assert waits.status == 200
        a.let_all_go()


async def test_a_pool_is_filled_before_the_next_and_a_high_band_goes_on_in_the_first(tmp_path: Path) -> None:
    async with held(4, id="a") as a, held(4, id="b") as b, router(tmp_path) as door:
        config = "".join(
            engine.engine.toml + f'pool = "{engine.engine.id}"\npool_priority = {priority}\n'
            for engine, priority in ((a, 10), (b, 0))
        )
        door.file.write_text(config)
        assert not door.app.reload()
        async with trio.open_nursery() as nursery:
            group = Group(door, nursery)
            await fill(group, a, 4, "gold")
            await fill(group, b, 4, "gold")
            group.begin(1, band="gold")
            await waiting(door, 1)
            await fill(group, a, 1, "platinum")  # both are at their healthy limit
            b.let_go()
            await door.until("gold goes to the second", lambda: len(b.order) == 5)
            assert rules(door).saturations() == [("llama", "a", 5 / 4), ("llama", "b", 1.0)]
            a.let_all_go()
            b.let_all_go()


async def test_a_client_that_left_during_a_failed_attempt_does_not_wait_at_the_fallback(tmp_path: Path) -> None:
    """Its departure and the failure come in one step; the queue must not forget the first over the second."""
    async with (
        held(1, id="b", model="spare") as spare,
        fake_engine(says(whole(503, b"no"), then="silent")) as engine,
        router(tmp_path, engine, spare.engine, config=FALLBACK) as door,
        trio.open_nursery() as nursery,
    ):
        group = Group(door, nursery)
        group.begin(1, model="spare")
        await door.until("the fallback is full", lambda: len(spare.inside) == 1)
        gate = door.app.gateway.gate
        client = await door.connect()
        cuts: list[str] = []
        real = gate.ask

        def ask_and_leave(entry, call, sleeper, now):  # type: ignore[no-untyped-def]
            ticket = real(entry, call, sleeper, now)
            if ticket.state == "waiting":
                sleeper.cut(Left())
                cuts.append(entry.name)
            return ticket

        gate.ask = ask_and_leave  # type: ignore[method-assign]
        await client.send(raw("silver"))
        await door.until("it left", lambda: records(door, lambda record: record.outcome == "client left"))
        assert cuts == ["spare"]
        assert rules(door).lines.count == 0
        spare.let_all_go()

"""Waiting at a whole router: whose turn it is, who has to go, and what is said to them."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
import pytest
import trio

from appliance.gateway.reply import Left
from tests.gate_scene import Group, Held, ask, burst, error_of, held, raw, records, rules, tickets, waiting
from tests.raw_client import request
from tests.routers import Running, router

BANDS = """
[[admission.bands]]
name = "high"
ceiling = 1.2
capacity = 4
ttl_s = 30
[[admission.bands]]
name = "low"
ceiling = 0.7
capacity = 3
ttl_s = 30
"""


async def fill(group: Group, engine: Held, count: int, band: str) -> None:
    """Send requests that the engine takes in and holds."""
    before = len(engine.inside)
    group.begin(count, band=band)
    await group.door.until("the engine holds them", lambda: len(engine.inside) == before + count)


# -- turns -------------------------------------------------------------------------------------------------------------


async def test_five_requests_of_one_tenant_do_not_wait_behind_a_thousand_of_another(tmp_path: Path) -> None:
    async with held(2) as engine, router(tmp_path, engine.engine) as door, trio.open_nursery() as nursery:
        group = Group(door, nursery)
        await fill(group, engine, 1, "bronze")
        group.begin(1000, band="bronze", session="many")
        await waiting(door, 1000)
        group.begin(5, band="bronze", session="few")
        await waiting(door, 1005)
        seen = len(engine.order)
        while len(engine.order) < seen + 12:
            before = len(engine.order)
            engine.let_go()
            await door.until("another came in", lambda before=before: len(engine.order) > before)
        assert engine.order[seen : seen + 10].count("few") == 5
        assert engine.order[seen + 10 :] == ["many", "many"]
        nursery.cancel_scope.cancel()


async def turns_of(tmp_path: Path, fairness: str) -> list[str]:
    """Two tenants with ten requests each, one of them with prompts a hundred times as long: the order they came in."""
    config = f'[admission]\nfairness = "{fairness}"\n'
    long = [{"role": "user", "content": "a long story " * 4000}]
    async with (
        held(1) as engine,
        router(tmp_path, engine.engine, config=config) as door,
        trio.open_nursery() as nursery,
    ):
        group = Group(door, nursery)
        await fill(group, engine, 1, "gold")
        group.begin(10, band="gold", session="long", messages=long)
        await waiting(door, 10)
        group.begin(10, band="gold", session="short")
        await waiting(door, 20)
        engine.let_all_go()
        await door.until("all had their turn", lambda: len(engine.order) == 21)
    return engine.order[1:]


async def test_turns_are_charged_by_work(tmp_path: Path) -> None:
    assert await turns_of(tmp_path, "work") == ["long", *["short"] * 10, *["long"] * 9]


async def test_turns_are_charged_by_requests_where_the_operator_says_so(tmp_path: Path) -> None:
    assert await turns_of(tmp_path, "requests") == ["long", "short"] * 10


async def test_the_highest_band_goes_first(tmp_path: Path) -> None:
    async with held(1) as engine, router(tmp_path, engine.engine) as door, trio.open_nursery() as nursery:
        group = Group(door, nursery)
        await fill(group, engine, 1, "platinum")
        await fill(group, engine, 1, "platinum")  # one slot and a ceiling of 1.2: one may wait in the engine
        for count, band in enumerate(("bronze", "silver", "gold", "platinum"), 1):
            group.begin(1, band=band, session=band)
            await waiting(door, count)
        engine.let_all_go()
    assert engine.order[2:] == ["platinum", "gold", "silver", "bronze"]
    assert [told.band for told in group.done[2:]] == engine.order[2:]


# -- bounds ------------------------------------------------------------------------------------------------------------


async def test_the_newest_of_the_lowest_band_makes_room_for_a_higher_one(tmp_path: Path) -> None:
    config = "[admission]\nqueue_capacity_total = 2\n"
    async with (
        held(1) as engine,
        router(tmp_path, engine.engine, config=config) as door,
        trio.open_nursery() as nursery,
    ):
        group = Group(door, nursery)
        await fill(group, engine, 2, "platinum")
        (older,) = group.begin(1, band="bronze", session="older")
        await waiting(door, 1)
        (newer,) = group.begin(1, band="bronze", session="newer")
        await waiting(door, 2)
        (platinum,) = group.begin(1, band="platinum")
        await door.until("somebody had to go", lambda: newer.answer)
        assert newer.answer is not None
        assert (newer.status, error_of(newer)) == (503, "displaced")
        assert int(newer.answer.fields["retry-after"]) >= 1
        assert newer.answer.fields["x-appliance-reason"] == "displaced"
        assert "x-should-retry" not in newer.answer.fields
        assert (rules(door).depth("platinum"), rules(door).depth("bronze")) == (1, 1)

        (refused,) = group.begin(1, band="bronze")  # nobody waits below it
        await door.until("it was refused", lambda: refused.answer)
        assert refused.answer is not None
        assert (refused.status, error_of(refused)) == (503, "queue_full")
        assert int(refused.answer.fields["retry-after"]) >= 1
        assert refused.answer.fields["x-appliance-reason"] == "queue_full"
        engine.let_all_go()
        await door.until("the others were served", lambda: older.answer and platinum.answer)
        assert (older.status, platinum.status) == (200, 200)
    rejections = door.app.gateway.meters.rejections
    assert rejections == {("bronze", "displaced"): 1, ("bronze", "queue_full"): 1}


async def test_a_band_has_a_bound_of_its_own(tmp_path: Path) -> None:
    config = '[admission]\ndefault_band = "low"\n' + BANDS
    async with (
        held(1) as engine,
        router(tmp_path, engine.engine, config=config) as door,
        trio.open_nursery() as nursery,
    ):
        group = Group(door, nursery)
        await fill(group, engine, 1, "low")
        group.begin(3, band="low")
        await waiting(door, 3)
        (over,) = group.begin(1)
        await door.until("it was refused", lambda: over.answer)
        assert (over.status, error_of(over)) == (503, "queue_full")
        engine.let_all_go()


async def test_a_wait_ends_with_its_time_limit(tmp_path: Path) -> None:
    async with held(1) as engine, router(tmp_path, engine.engine) as door, trio.open_nursery() as nursery:
        group = Group(door, nursery)
        await fill(group, engine, 2, "platinum")
        (silver,) = group.begin(1, band="silver")
        await waiting(door, 1)
        (bronze,) = group.begin(1, band="bronze")
        await waiting(door, 2)
        door.app.gateway.gate.sweep(time.monotonic() + 61)
        await door.until("it was told", lambda: silver.answer)
        assert silver.answer is not None
        assert (silver.status, error_of(silver)) == (504, "queue_timeout")
        assert "ttl_s" in silver.answer.error["message"]
        assert int(silver.answer.fields["retry-after"]) >= 1
        assert bronze.answer is None  # it has 300 s
        engine.let_all_go()


# -- who leaves --------------------------------------------------------------------------------------------------------


async def test_a_client_that_hangs_up_while_it_waits_leaves_the_queue_at_once(tmp_path: Path) -> None:
    async with held(1) as engine, router(tmp_path, engine.engine) as door, trio.open_nursery() as nursery:
        group = Group(door, nursery)
        await fill(group, engine, 1, "silver")
        clients = [await door.connect() for _ in range(20)]
        for client in clients:
            await client.send(raw("silver"))
        await waiting(door, 20)
        for client in clients:
            await client.close()
        await waiting(door, 0)
        left = records(door, lambda record: record.outcome == "client left")
        assert len(left) == 20
        assert all(not record.choices and record.queue_wait_s > 0 for record in left)
        assert len(engine.order) == 1
        engine.let_all_go()


async def test_an_operator_may_cancel_one_that_waits(tmp_path: Path) -> None:
    async with held(1) as engine, router(tmp_path, engine.engine) as door, trio.open_nursery() as nursery:
        group = Group(door, nursery)
        await fill(group, engine, 1, "silver")
        (told,) = group.begin(1, band="silver")
        await waiting(door, 1)
        (record,) = records(door, lambda record: not record.choices)
        assert record.cancel()
        await door.until("it was told", lambda: told.answer)
        assert (told.status, error_of(told)) == (503, "cancelled")
        assert told.answer is not None and told.answer.fields["x-should-retry"] == "false"
        engine.let_all_go()


@pytest.mark.parametrize("granted_first", [True, False])
async def test_a_client_that_leaves_in_the_step_that_grants_its_place_gives_it_back(
    tmp_path: Path, granted_first: bool
) -> None:
    """Both orders of the two events, in one step of the loop, so that the task wakes up to both of them."""
    async with held(1) as engine, router(tmp_path, engine.engine) as door, trio.open_nursery() as nursery:
        group = Group(door, nursery)
        engine.open = True
        await burst(door, 2, band="gold")  # leaves a connection to the engine that could be used at once
        engine.open = False
        await fill(group, engine, 1, "gold")
        before = len(engine.order)
        client = await door.connect()
        await client.send(raw("gold", "leaver"))
        await waiting(door, 1)
        (record,) = records(door, lambda record: record.tickets[0].state == "waiting")
        (ticket,) = record.tickets
        gate, (member,) = door.app.gateway.gate, door.app.gateway.table.members.values()
        assert record.sleeper is not None
        if granted_first:
            make_room(door)
            assert ticket.state == "granted"
            record.sleeper.cut(Left())
        else:
            record.sleeper.cut(Left())
            make_room(door)
            assert ticket.state == "granted"
        await door.until("it is gone", lambda: record.outcome == "client left")
        assert ticket.state == "ended"
        assert rules(door).loads[member.id].leased == 0
        assert len(engine.order) == before  # nothing was sent for it
        (told,) = group.begin(1, band="gold", session="next")
        await door.until("its place is free again", lambda: engine.order[before:] == ["next"])
        assert told.answer is None
        assert gate.rules.lines.count == 0
        engine.let_all_go()


def make_room(door: Running) -> None:
    """A second slot, as a change of the configuration would bring it."""
    table, gate = door.app.gateway.table, door.app.gateway.gate
    (member,) = table.members.values()
    member.configure(attrs.evolve(member.endpoint, capacity=2))
    gate.publish()


async def test_a_stop_of_the_router_leaves_nothing_in_line(tmp_path: Path) -> None:
    config = "[server]\ndrain_s = 0\n"
    async with held(1) as engine, router(tmp_path, engine.engine, config=config) as door:
        clients = [await door.connect() for _ in range(6)]
        for client in clients:
            await client.send(raw("silver"))
        await waiting(door, 5)
        door.app.begin_stop()
        for client in clients:
            await client.rest()
        assert {ticket.state for ticket in tickets(door)} == {"ended"}
        assert {record.outcome for record in records(door)} == {"cancelled"}


# -- the band's name ---------------------------------------------------------------------------------------------------


async def test_an_unknown_band_is_refused_before_the_body_is_read(tmp_path: Path) -> None:
    async with held(1) as engine, router(tmp_path, engine.engine) as door:
        client = await door.connect()
        head = request("POST", "/v1/chat/completions", "x-appliance-band: iron", "content-length: 1000000")
        await client.send(head)  # and nothing of the body
        answer = await client.answer("POST")
        assert (answer.status, answer.error["code"]) == (400, "unknown_band")
        assert answer.error["param"] == "x-appliance-band"
        for name in ("iron", "platinum", "gold", "silver", "bronze"):
            assert name in answer.error["message"]
        assert answer.fields["x-should-retry"] == "false"
        assert door.app.buffers.held_bytes == 0
        assert answer.closes


async def test_an_unknown_band_is_refused_in_the_words_of_the_route(tmp_path: Path) -> None:
    async with held(1) as engine, router(tmp_path, engine.engine) as door:
        answer = await door.ask(raw("iron").replace(b"/v1/chat/completions", b"/v1/messages"))
        assert answer.status == 400
        assert answer.json()["type"] == "error"
        assert (await door.ask(request("GET", "/v1/models", "x-appliance-band: iron"))).status == 200


async def test_the_band_of_a_request_is_the_one_it_names_or_the_default(tmp_path: Path) -> None:
    async with held(9) as engine, router(tmp_path, engine.engine) as door:
        engine.open = True
        for band in ("platinum", "bronze", ""):
            assert (await ask(door, band=band)).status == 200
        assert [record.band for record in reversed(records(door))] == ["platinum", "bronze", "silver"]
        (meters,) = door.app.gateway.meters.models.values()
        assert meters.requests == {("platinum", 200): 1, ("bronze", 200): 1, ("silver", 200): 1}

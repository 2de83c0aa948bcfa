"""Bursts through a whole router at engines whose room is known, learnt, or still to be found out."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.gate_scene import Sim, ask, burst, records, rules, sim, tickets
from tests.routers import Running, router

WITHIN_S = 120.0
"""Ends a test that would fail anyway."""
FILLED = 7
"""90% of 8 slots, whole requests only."""
HOW = ("configured", "told", "learnt", "cold", "unscraped")


def configuration(how: str, engine: Sim) -> str:
    """The sim as an endpoint whose capacity comes from the file, from its metrics, from watching, or from nowhere."""
    match how:
        case "configured":
            return engine.toml(engine="openai", capacity=engine.running.engine.settings.sizes.max_num_seqs)
        case "told":
            return engine.toml(engine="sim")
        case "unscraped":
            return engine.toml(engine="openai")
        case _:
            return engine.toml(engine="vllm")


async def made_known(door: Running, engine: Sim, how: str) -> None:
    """Let the router find out what it is to know before the burst."""
    load = rules(door).loads["a"]
    slots = engine.running.engine.settings.sizes.max_num_seqs
    match how:
        case "told":
            await door.until("the engine told its slots", lambda: load.capacity == slots)
        case "learnt":
            with trio.fail_after(WITHIN_S):
                while not (load.learnt and load.capacity == slots):
                    await burst(door, slots * 12, band="gold", max_tokens=60)
            engine.forget()
        case _:
            assert load.capacity == (slots if how == "configured" else 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", HOW)
async def test_a_burst_of_300_never_leaves_more_than_2_waiting_in_an_engine_of_8_slots(
    tmp_path: Path, how: str, stream: bool
) -> None:
    # Where nothing else is known, answers prove how many of them ran together; short ones prove nothing. Ends that this
    # process reads late, being held up by others, prove too much (`rules/admission/capacity`, LATE_S): once more then.
    tokens, tries = (60, 3) if how == "unscraped" else (4, 1)
    for number in range(tries):
        bursts = 1
        folder = tmp_path / str(number)
        folder.mkdir()
        async with sim(8) as engine, router(folder, config=configuration(how, engine)) as door:
            await made_known(door, engine, how)
            group = await burst(door, 300, band="silver", stream=stream, max_tokens=tokens)
            with trio.fail_after(WITHIN_S):
                # How soon it is filled depends on how often its metrics can be read meanwhile, so a burst may be over
                # before. What one burst has shown holds for the next.
                while how == "cold" and engine.most_running < FILLED and engine.most_waiting <= 2:
                    assert (await burst(door, 300, band="silver", stream=stream)).statuses() == {200: 300}
                    bursts += 1
        if engine.most_waiting <= 2:
            break
    assert group.statuses() == {200: 300}
    assert engine.most_waiting <= 2
    assert engine.most_running >= FILLED
    assert engine.asked == 300 * bursts


async def test_a_burst_on_four_engines_of_2_slots_goes_where_there_is_room(tmp_path: Path) -> None:
    """All requests begin alike, so affinity would send them to one place."""
    words = "the same words again " * 60
    async with sim(2) as a, sim(2) as b, sim(2) as c, sim(2) as d:
        engines = (a, b, c, d)
        config = "".join(engine.toml(id=id) for engine, id in zip(engines, "abcd", strict=True))
        async with router(tmp_path, config=config) as door:
            await door.until("all told their slots", lambda: all(x.capacity == 2 for x in rules(door).loads.values()))
            group = await burst(door, 300, band="silver", messages=[{"role": "user", "content": words}])
            assert group.statuses() == {200: 300}
            assert max(engine.most_waiting for engine in engines) <= 2
            assert min(engine.asked for engine in engines) > 30


async def test_an_engine_of_256_slots_that_are_known_is_filled_in_one_go(tmp_path: Path) -> None:
    async with sim(256, tokens_per_s=0.5) as engine, router(tmp_path, config=engine.toml(engine="sim")) as door:
        await made_known(door, engine, "told")
        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(ask_for_long, door, "gold")
            await door.until("its batch is full", lambda: engine.running.batch.running == 256)
            assert (engine.most_waiting, rules(door).lines.count) == (0, 300 - 256)
            assert not [ticket for ticket in tickets(door) if ticket.state == "running" and ticket.number]
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["cold", "unscraped"])
async def test_an_engine_of_256_slots_that_are_not_known_is_filled_as_it_proves_them(tmp_path: Path, how: str) -> None:
    async with (
        sim(256, tokens_per_s=0.5) as engine,
        router(tmp_path, config=configuration(how, engine)) as door,
        trio.open_nursery() as nursery,
    ):
        for _ in range(300):
            nursery.start_soon(ask_for_long, door, "gold")
        await door.until("its batch is full", lambda: engine.running.batch.running == 256)
        assert engine.most_waiting <= 2
        nursery.cancel_scope.cancel()


async def ask_for_long(door: Running, band: str) -> None:
    await ask(door, band=band, max_tokens=100, stream=True)


async def test_a_saturated_model_holds_up_no_other(tmp_path: Path) -> None:
    async with sim(2, tokens_per_s=50) as busy, sim(2, model="other") as free:
        config = busy.toml() + free.toml(id="b", model="other")
        async with router(tmp_path, config=config) as door:
            await door.until("both told their slots", lambda: all(x.capacity == 2 for x in rules(door).loads.values()))
            async with trio.open_nursery() as nursery:
                for _ in range(100):
                    nursery.start_soon(ask_for_long, door, "silver")
                await door.until("a is saturated", lambda: rules(door).lines.count >= 98)
                for _ in range(20):
                    assert (await ask(door, band="bronze", model="other")).status == 200
                assert rules(door).lines.count >= 98
                nursery.cancel_scope.cancel()
            others = records(door, lambda record: record.model == "other")
            assert len(others) == 20
            assert all(not record.queue_wait_s and not record.tickets[0].number for record in others)

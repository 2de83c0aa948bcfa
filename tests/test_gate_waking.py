"""A model that nobody serves yet: who waits for it, for how long, and what is said in the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import trio

from appliance.admin import documents
from tests.fake_engine import DONE, event, fake_engine, says, streamed, whole
from tests.gate_scene import Group, error_of, held, records, rules, waiting
from tests.raw_client import Answer, Client, chat
from tests.routers import Running, router
from tests.waking_scene import AT_ZERO, LOADING, Plane, replica

SMALL = '[[models]]\nname = "llama"\nfallbacks = ["small"]\n[[models]]\nname = "small"\n'
CHAIN = (
    '[[models]]\nname = "llama"\nfallbacks = ["first", "second"]\n'
    '[[models]]\nname = "first"\n[[models]]\nname = "second"\n'
)


async def begun(door: Running, count: int = 1, **more: Any) -> Client:
    """A request that waits for its model."""
    client = await door.connect()
    await client.send(chat(**more))
    await waiting(door, count)
    return client


async def test_a_request_waits_until_the_model_is_there(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        before = time.monotonic()
        client = await begun(door)
        assert plane.wanted == ["llama"]
        told = door.app.gateway.demand()["llama"]
        assert (told.waiting, told.running, told.slots) == (1, 0, 0)
        assert before <= told.asked_at <= time.monotonic()
        plane.publish(replica(engine))
        answer = await client.answer("POST")
        assert answer.status == 200
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
        (record,) = records(door)
        assert (record.endpoint, record.tickets[0].blocker) == ("llama.abcde", "loading")


async def test_an_alias_wakes_its_model(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        client = await begun(door, model="chat")
        plane.publish(replica(engine))
        assert (await client.answer("POST")).status == 200
        assert plane.wanted == ["llama"]
        assert engine.asked[0].json()["model"] == "llama"


async def test_who_waited_in_vain_is_told_what_is_being_done(tmp_path: Path) -> None:
    async with router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door)
        plane.publish(waking={"llama": "it is to be started"})
        client = await begun(door)
        plane.waking = {"llama": LOADING}  # what is true at the end is told, not what was when it came
        plane.after(119.0)
        assert rules(door).lines.count == 1
        plane.after(120.5)
        answer = await client.answer("POST")
        assert (answer.status, answer.fields["retry-after"]) == (503, "5")
        assert answer.fields["x-appliance-reason"] == "model_not_ready"
        assert answer.error["code"] == "model_not_ready"
        assert answer.error["message"].startswith("llama is not ready after 12")
        assert f" s: {LOADING} (deadline: control.wake_wait_s)" in answer.error["message"]


async def test_the_wait_is_as_long_as_the_operator_says_also_after_a_reload(tmp_path: Path) -> None:
    async with router(tmp_path, config=AT_ZERO + "[control]\nwake_wait_s = 10\n") as door:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        await begun(door)
        door.file.write_text(AT_ZERO + "[control]\nwake_wait_s = 500\n")
        assert door.app.reload() == ""
        plane.after(400.0)
        assert rules(door).lines.count == 1
        plane.after(501.0)
        assert rules(door).lines.count == 0


async def test_a_model_that_cannot_be_started_is_refused_at_once(tmp_path: Path) -> None:
    async with router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door, reason="no node has 8 free GPUs of one class")
        plane.publish()
        answer = await door.ask(chat())
        assert (answer.status, answer.error["code"]) == (503, "model_not_ready")
        assert answer.error["message"] == "the model 'llama' is not ready: no node has 8 free GPUs of one class"
        assert int(answer.fields["retry-after"]) >= 1
        assert door.app.gateway.demand()["llama"].asked_at > time.monotonic() - 60


async def test_who_waits_for_a_model_that_cannot_be_started_after_all_is_told_so(tmp_path: Path) -> None:
    async with router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        client = await begun(door)
        plane.reason = "the last start failed: out of memory"
        plane.publish()
        answer = await client.answer("POST")
        assert answer.status == 503
        assert answer.error["message"] == "the model 'llama' is not ready: the last start failed: out of memory"


async def test_a_client_that_leaves_gives_its_place_back(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        client = await begun(door)
        await client.close()
        await waiting(door, 0)
        assert door.app.gateway.demand()["llama"].waiting == 0
        plane.publish(replica(engine))
        assert (await door.ask(chat())).status == 200
        assert len(engine.asked) == 1


async def test_bands_go_in_order_and_within_the_capacity(tmp_path: Path) -> None:
    async with held(1) as engine, router(tmp_path, config=AT_ZERO) as door, trio.open_nursery() as nursery:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        group = Group(door, nursery)
        for count, band in enumerate(("bronze", "silver", "gold", "silver"), 1):
            group.begin(1, band=band, session=f"{band} {count}")
            await waiting(door, count)
        plane.publish(replica(engine.engine))
        await door.until("one is let in", lambda: engine.inside)
        await waiting(door, 3)
        engine.let_all_go()
        await door.until("all have their answer", lambda: len(group.done) == 4)
        assert group.statuses() == {200: 4}
    assert engine.order == ["gold 3", "silver 2", "silver 4", "bronze 1"]


async def test_the_queues_bounds_hold_for_those_who_wait_for_a_model(tmp_path: Path) -> None:
    bands = '[[admission.bands]]\nname = "silver"\nceiling = 1.0\ncapacity = 2\nttl_s = 1\n'
    config = "[admission]\nqueue_capacity_total = 10\n" + bands + AT_ZERO
    async with router(tmp_path, config=config) as door, trio.open_nursery() as nursery:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        group = Group(door, nursery)
        group.begin(2)
        await waiting(door, 2)
        (third,) = group.begin(1)
        await door.until("the third is refused", lambda: third.answer)
        assert (third.status, error_of(third)) == (503, "queue_full")
        plane.after(100.0)  # longer than the band's own limit
        assert rules(door).lines.count == 2
        nursery.cancel_scope.cancel()


async def test_pings_before_the_first_event_while_the_model_wakes(tmp_path: Path) -> None:
    config = "[deadlines]\nsse_ping_before_first_token = true\n" + AT_ZERO
    async with fake_engine(says(*streamed(event("a"), DONE))) as engine, router(tmp_path, config=config) as door:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        client = await begun(door, stream=True)
        door.later(20.0)
        await client.until(b": ping\n\n")
        plane.publish(replica(engine))
        await client.until(event("a"))
        await client.until(DONE)


async def test_after_a_ping_the_end_of_the_wait_is_an_error_event(tmp_path: Path) -> None:
    config = "[deadlines]\nsse_ping_before_first_token = true\n" + AT_ZERO
    async with router(tmp_path, config=config) as door:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        client = await begun(door, stream=True)
        door.later(20.0)
        await client.until(b": ping\n\n")
        plane.after(121.0)
        told, _ = await client.rest()
        assert LOADING.encode() in told and b"[DONE]" not in told


# -- fallbacks ---------------------------------------------------------------------------------------------------------


async def test_a_fallback_that_is_awake_takes_the_request_at_once(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=SMALL) as door:
        plane = Plane(door)
        plane.publish(replica(engine, "small.abcde", model="small"), waking={"llama": LOADING})
        answer = await door.ask(chat())
        assert answer.status == 200
        assert engine.asked[0].json()["model"] == "small"
        assert plane.wanted == ["llama"]  # it is woken all the same
        assert door.app.gateway.demand()["llama"].asked_at > time.monotonic() - 60


async def test_a_fallback_without_a_ready_endpoint_is_none(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=SMALL) as door:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        client = await begun(door)
        plane.publish(replica(engine))
        assert (await client.answer("POST")).status == 200


async def test_a_fallback_is_woken_where_the_model_itself_cannot_be(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=SMALL) as door:
        plane = Plane(door, reason="there is no room")
        plane.publish(waking={"small": LOADING})
        client = await begun(door)
        assert plane.wanted == ["small"]
        plane.publish(replica(engine, "small.abcde", model="small"))
        assert (await client.answer("POST")).status == 200


async def test_nobody_waits_for_one_model_after_the_other(tmp_path: Path) -> None:
    async with router(tmp_path, config=CHAIN) as door:
        plane = Plane(door, reason="there is no room")
        plane.publish(waking={"first": LOADING, "second": LOADING})
        client = await begun(door)
        plane.after(121.0)
        answer = await client.answer("POST")
        assert answer.error["message"] == "the model 'llama' is not ready: there is no room"
        assert plane.wanted == ["first"]


async def test_a_fallback_that_sleeps_is_passed_over_for_one_that_is_awake(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=CHAIN) as door:
        plane = Plane(door)
        plane.publish(replica(engine, "second.abcde", model="second"), waking={"llama": LOADING, "first": LOADING})
        assert (await door.ask(chat())).status == 200
        assert engine.asked[0].json()["model"] == "second"
        assert plane.wanted == ["llama"]


async def test_a_fallbacks_deadlines_begin_when_it_gets_the_request(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=SMALL) as door:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        client = await begun(door)
        plane.publish(replica(engine, "small.abcde", model="small"), waking={"llama": LOADING})
        came = time.monotonic()
        plane.after(121.0)
        assert (await client.answer("POST")).status == 200
        (record,) = records(door)
        assert record.tickets[1].asked_at > came
        assert record.dispatched_at > came


# -- what is listed and shown ------------------------------------------------------------------------------------------


async def get(door: Running, path: str) -> Answer:
    return await door.ask(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())


async def test_a_model_at_zero_is_listed_with_what_its_last_engine_said(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        assert (await get(door, "/v1/models/llama")).json()["owned_by"] == "appliance"
        plane.publish(replica(engine))
        await door.until("the engine has listed it", lambda: door.app.gateway.listed)
        plane.publish(waking={"llama": LOADING})
        for name in ("llama", "chat"):
            assert (await get(door, f"/v1/models/{name}")).json() == {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "fake",
            }
        assert [entry["id"] for entry in (await get(door, "/v1/models")).json()["data"]] == ["chat", "llama"]
        door.file.write_text('[[models]]\nname = "other"\n')
        assert door.app.reload() == ""
        assert door.app.gateway.listed_last == {}


async def test_a_router_whose_models_can_be_woken_is_ready(tmp_path: Path) -> None:
    async with router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door)
        assert (await get(door, "/readyz")).status == 503
        plane.publish(waking={"llama": LOADING})
        assert (await get(door, "/readyz")).status == 200
        shown = (await get(door, "/status.json")).json()["models"]["llama"]
        assert (shown["ready"], shown["waking"]) == (False, True)
        plane.publish()
        assert (await get(door, "/readyz")).status == 503


@pytest.mark.parametrize("engines", [1, 2])
async def test_the_record_says_what_it_waited_for(tmp_path: Path, engines: int) -> None:
    async with fake_engine(says(whole(200, {"choices": []}))) as engine, router(tmp_path, config=AT_ZERO) as door:
        plane = Plane(door)
        plane.publish(waking={"llama": LOADING})
        client = await begun(door)
        plane.publish(*(replica(engine, f"llama.abcd{number}") for number in range(engines)))
        await client.answer("POST")
        (record,) = records(door)
        told = documents.request(door.app.gateway, record.request_id, time.monotonic())
        assert told is not None and told["places"][0]["blocker"] == "loading"

"""Admission in front of real engines and of processes that die: llama.cpp, and sims that are killed and stopped."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import trio

from tests.engines import sim_engine
from tests.gate_scene import Group, ask, records, rules
from tests.raw_client import request
from tests.routers import Running, router

if TYPE_CHECKING:
    from tests.engines.llama_engine import LlamaEngine


def endpoint(url: str, *, id: str = "a", model: str = "llama", engine: str = "sim") -> str:
    return f'[[endpoints]]\nid = "{id}"\nurl = "{url}/v1"\nmodels = ["{model}"]\nengine = "{engine}"\n'


# -- llama.cpp: no KV figure, slots in /props, scraped every 2.5 s -----------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_llamacpp_never_has_more_than_2_waiting(tmp_path: Path, llama_engine: LlamaEngine, stream: bool) -> None:
    config = endpoint(llama_engine.url, model="tiny", engine="llamacpp")
    async with router(tmp_path, config=config) as door:
        load = rules(door).loads["a"]
        await door.until("its slots are known", lambda: load.capacity == 2)
        assert load.kv == 0.0
        most = 0
        async with trio.open_nursery() as nursery:
            group = Group(door, nursery)
            group.begin(40, band="platinum", model="tiny", max_tokens=24, stream=stream)
            with trio.fail_after(60):
                while len(group.done) < 40:
                    most = max(most, await deferred(llama_engine.url))
        assert group.statuses() == {200: 40}
        assert most <= 2
        waited = [record for record in records(door) if record.queue_wait_s]
        assert len(waited) >= 36  # 2 run, and 2 of a band that is not held back wait in the engine


async def deferred(url: str) -> int:
    """Requests that the engine itself has put off."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{url}/metrics", timeout=20)).text
    return int(sim_engine.read_metrics(text)["llamacpp:requests_deferred"])


# -- engines that die and come back ------------------------------------------------------------------------------------


async def knock(door: Running, group: Group, until: trio.Event) -> None:
    """A client that asks again and again, whatever it is told."""
    while not until.is_set():
        told = await ask(door, band="silver", session="knocker", max_tokens=20)
        group.told.append(told)
        if told.status != 200:
            await trio.sleep(0.05)


async def test_an_engine_that_dies_and_comes_back_under_load_is_served_again(tmp_path: Path) -> None:
    speed = ("--decode-tokens-per-second", "200")
    with ExitStack() as sims:
        first = sims.enter_context(sim_engine.running("--max-num-seqs", "4", *speed, model="llama"))
        async with router(tmp_path, config=endpoint(first.url)) as door:
            load, member = rules(door).loads["a"], door.app.gateway.table.members["a"]
            await door.until("its slots are known", lambda: load.capacity == 4)
            over = trio.Event()
            async with trio.open_nursery() as nursery:
                group = Group(door, nursery)
                for _ in range(30):
                    nursery.start_soon(knock, door, group, over)
                await door.until("it is under load", lambda: group.statuses().get(200, 0) >= 30)
                assert rules(door).lines.count > 10
                first.popen.kill()
                first.popen.wait()
                await door.until("its breaker opened", lambda: not member.up)
                port = first.url.rpartition(":")[2]
                sims.enter_context(sim_engine.running("--port", port, "--max-num-seqs", "2", *speed, model="llama"))
                before = group.statuses()[200]
                member.breaker.open_until = time.monotonic()  # as after a few seconds
                await door.until("it is served again", lambda: group.statuses()[200] >= before + 20)
                await door.until("its new slots are known", lambda: rules(door).loads["a"].capacity == 2)
                over.set()
            assert set(group.statuses()) == {200, 502, 503}
            assert (rules(door).lines.count, rules(door).leased) == (0, set())


async def test_an_engine_that_hangs_is_full_and_goes_on_when_it_wakes(tmp_path: Path) -> None:
    """Stopped, it takes connections and answers nothing: neither requests nor scrapes."""
    flags = ("--max-num-seqs", "4", "--decode-tokens-per-second", "200")
    with sim_engine.running(*flags, model="llama") as sim:
        async with router(tmp_path, config=endpoint(sim.url)) as door:
            load = rules(door).loads["a"]
            member = door.app.gateway.table.members["a"]
            await door.until("its slots are known", lambda: load.capacity == 4)
            os.kill(sim.popen.pid, signal.SIGSTOP)
            try:
                async with trio.open_nursery() as nursery:
                    group = Group(door, nursery)
                    group.begin(20, band="silver", max_tokens=20)
                    await door.until("it is full", lambda: rules(door).lines.count == 17)
                    now = time.monotonic()
                    member.fresh_until = now  # as after three seconds
                    door.app.gateway.gate.sweep(now)
                    assert load.silent_until is not None
                    door.app.gateway.gate.sweep(now + 11)
                    assert (load.silent_until, load.heard_at) == (None, None)
                    assert (load.inflight, rules(door).lines.count) == (3, 17)
                    os.kill(sim.popen.pid, signal.SIGCONT)
            finally:
                os.kill(sim.popen.pid, signal.SIGCONT)
            assert group.statuses() == {200: 20}
            await door.until("it is heard again", lambda: load.heard_at is not None)


async def test_who_asks_llamacpp_for_what_it_was_not_started_for_takes_it_from_nobody(
    tmp_path: Path, llama_engine: LlamaEngine
) -> None:
    config = endpoint(llama_engine.url, model="tiny", engine="llamacpp")
    async with router(tmp_path, config=config) as door:
        await door.until("its slots are known", lambda: rules(door).loads["a"].capacity == 2)
        for _ in range(8):
            body = b'{"model": "tiny", "input": "x"}'
            answer = await door.ask(request("POST", "/v1/embeddings", body=body))
            assert answer.status == 501 and "embeddings" in answer.json()["error"]["message"]
        assert (await ask(door, model="tiny", max_tokens=2)).status == 200

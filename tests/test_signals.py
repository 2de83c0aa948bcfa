"""Signals that come early, late, and many at a time: a program that serves ends once, and whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from appliance.cli.signals import heeded
from tests.agent_process import agents, model
from tests.processes import Process
from tests.serve_process import processes

ROOT = Path(__file__).parent.parent
ALL = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def unheard() -> Iterator[list[int]]:
    """Signals that nobody has taken; by themselves they would end the tests."""
    heard: list[int] = []
    before = {each: signal.signal(each, lambda number, _: heard.append(number)) for each in ALL}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


async def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    await trio.testing.wait_all_tasks_blocked(0.02)


async def test_a_reload_waits_until_there_is_something_to_reload(unheard: list[int]) -> None:
    told: list[object] = []
    async with heeded(told.append, lambda: told.append("reload")) as signals:
        await send(signal.SIGHUP)
        await send(signal.SIGHUP)
        assert told == []
        signals.begun()
        assert told == ["reload"]
        await send(signal.SIGHUP)
        await send(signal.SIGTERM)
        await send(signal.SIGINT)
        assert told == ["reload", "reload", 1, 2]
    assert unheard == []
    async with heeded(told.append, lambda: told.append("another")) as signals:
        signals.begun()
    assert told == ["reload", "reload", 1, 2]


async def test_they_are_heeded_to_the_very_end(unheard: list[int]) -> None:
    told: list[int] = []
    with pytest.raises(ValueError, match="as it is"):
        async with heeded(told.append):
            with trio.CancelScope() as everything:
                everything.cancel()
                try:
                    await trio.sleep_forever()
                finally:
                    with trio.CancelScope(shield=True):
                        await send(signal.SIGTERM)
                        await send(signal.SIGHUP)  # nobody wants it: as if we were not here
            raise ValueError("as it is, and no group")
    assert told == [1]
    assert unheard == [signal.SIGHUP]


async def storm(process: Process, rng: random.Random) -> None:
    """All three for as long as it lives, at most 20 s; the first ones are reloads."""
    for _ in range(20):
        process.send(signal.SIGHUP)
        await trio.sleep(rng.random() * 0.02)
    with trio.move_on_after(20):
        while process.alive:
            process.send(rng.choice(ALL))
            await trio.sleep(rng.random() * 0.01)


def test_held_signals_are_kept_and_do_nothing_afterwards() -> None:
    code = """
import os, signal, trio
from appliance.cli.signals import heeded, held
told = []
async def main():
    os.kill(os.getpid(), signal.SIGHUP)
    async with heeded(told.append, lambda: told.append("reload")) as signals:
        with trio.move_on_after(0.2):
            while len(told) < 1:
                await trio.sleep(0.01)
        signals.begun()
with held():
    os.kill(os.getpid(), signal.SIGTERM)
    trio.run(main)
for number in (1, 2, 15):
    os.kill(os.getpid(), number)
print(told)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "[1, 'reload']\n"), done.stderr


async def test_an_agent_in_a_storm_ends_politely_and_leaves_its_engines(tmp_path: Path) -> None:
    async with agents(tmp_path) as scene:
        scene.configure(model("m"))
        agent = await scene.start()
        engine = (await agent.ready("m.1/0"))["pid"]
        await storm(agent, random.Random(3))
        assert await agent.ended() == 0
        assert "engines go on and are taken over by the next one" in agent.log[-1]
        assert not any("Traceback" in line for line in agent.log)
        second = await scene.start()
        assert (await second.ready("m.1/0"))["pid"] == engine


async def test_a_router_in_a_storm_stops(tmp_path: Path) -> None:
    async with processes(tmp_path) as routers:
        routers.configure("")
        router = await routers.start()
        await storm(router, random.Random(4))
        assert await router.ended() == 0
        assert "event=stopped" in router.log[-1]
        assert not any("Traceback" in line for line in router.log)
        assert sum("stopping now" in line for line in router.log) <= 1

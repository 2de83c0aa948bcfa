"""What comes to an agent's process from outside: signals while it starts, readers of its log that do not read, callers
that hold its connections."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import trio
from trio_websocket import open_websocket_url

from appliance.agent import web
from appliance.cli import logs
from appliance.cli.agent import Agent
from appliance.cli.config import load
from appliance.rules.fleet.backoff import LONGEST_S, Backoff, failed
from tests.agent_process import Agents
from tests.test_agent_status import ask, get, serving


@pytest.fixture
def unheard() -> Iterator[list[int]]:
    """Signals that nobody has taken; by themselves they would end the tests."""
    heard: list[int] = []
    before = {each: signal.signal(each, lambda number, _: heard.append(number)) for each in (1, 15)}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)
    structlog.reset_defaults()


async def test_a_reload_that_comes_while_it_starts_is_made_afterwards(
    tmp_path: Path, unheard: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Agents(tmp_path)
    scene.configure("")
    environment = scene.environment()
    agent = Agent(load(None, environment), lambda: load(None, environment))
    real = agent.tree.adopt

    async def adopt() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await trio.sleep(0.05)
        await real()

    agent.tree.adopt = adopt  # type: ignore[method-assign]
    logs.set_up("info", "logfmt")
    told = ""
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.run)
            while "configuration reloaded" not in told:
                await trio.sleep(0.01)
                told += capsys.readouterr().err
            os.kill(os.getpid(), signal.SIGTERM)
    assert told.index("agent runs") < told.index("configuration reloaded")
    assert unheard == []


async def test_an_agent_that_is_ended_while_it_adopts_ends(tmp_path: Path, unheard: list[int]) -> None:
    """As it waits for a child that a killed agent has left half born."""
    scene = Agents(tmp_path)
    scene.configure("")
    agent = Agent(load(None, scene.environment()), lambda: load(None, scene.environment()))
    (scene.state / "shards").mkdir(parents=True)
    with (scene.state / "shards" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with trio.fail_after(3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(agent.run)
                await trio.sleep(0.2)
                os.kill(os.getpid(), signal.SIGTERM)
    assert unheard == []


def test_a_reader_that_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(logs._Lines, "_lost", 0)
    # What the code must not do would hold the test up for ever.
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("it waited for the reader")))
    signal.alarm(10)
    try:
        with os.fdopen(write, "w") as stream, os.fdopen(read, "rb", buffering=0) as reader:
            monkeypatch.setattr(sys, "stderr", stream)
            lines = logs._Lines()
            for _ in range(200):
                lines.info("x" * 999)
            taken = reader.read(1 << 17).count(b"\n")
            assert 10 < taken < 100
            lines.info("after")
            assert reader.read(1 << 17) == f"[{200 - taken} lines are left out: nobody took them]\nafter\n".encode()
            lines.info("y" * 200_000)
            assert len(reader.read(1 << 17)) <= 1 << 16
            reader.close()
            lines.info("nobody is there any more")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_a_clock_that_is_set_back_makes_no_wait_longer() -> None:
    backoff = Backoff()
    now = 1e9
    for _ in range(12):
        backoff = failed(backoff, "x", now, random.Random(1))
        assert backoff.waits(now)
        assert not backoff.waits(backoff.until)
        assert not backoff.waits(now - 2 * LONGEST_S)
        now = backoff.until


async def test_connections_that_ask_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 8)
    async with serving() as scene:
        idle = [socket.create_connection(("127.0.0.1", scene.port)) for _ in range(40)]
        try:
            for each in idle:
                each.sendall(b"GET /sta")
            for _ in range(20):
                assert (await ask(scene.port, get("/healthz")))[0] == 200
        finally:
            for each in idle:
                each.close()


async def test_listeners_have_a_bound_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 8)
    monkeypatch.setattr(web, "MOST_LISTENERS", 2)
    async with serving() as scene, open_websocket_url(scene.events) as one, open_websocket_url(scene.events) as other:
        for client in (one, other):
            await client.get_message()
        asked = b"GET /events HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n\r\n"
        assert (await ask(scene.port, asked))[0] == 503
        idle = [socket.create_connection(("127.0.0.1", scene.port)) for _ in range(20)]
        assert (await ask(scene.port, get("/status")))[0] == 200
        # Those who listen are not the ones that are closed for it.
        await one.ping()
        await other.ping()
        for each in idle:
            each.close()

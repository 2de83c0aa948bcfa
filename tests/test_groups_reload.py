"""What of `[groups]` a SIGHUP changes while the router runs, and what it names as waiting for a restart."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import trio

from tests.fake_daemon import fake_daemon, free_udp_port
from tests.groups_outside import Outside, outside, restartable, url_of
from tests.mcp_door_scene import at
from tests.toolservers.scripted import Server

OF_THE_FILE = dict.fromkeys(("POLL_INTERVAL_S", "PROBE_INTERVAL_S", "PROBE_TIMEOUT_S", "ALLOWED_SOURCES"), "")
"""Blank in the environment, so that the file says them."""


async def reloaded(door: Outside, groups: str) -> str:
    """Change the file and tell the router; the line in which it says that it was taken."""
    door.routers.configure(f"[groups]\n{groups}\n")
    before = door.log.count('event="configuration reloaded"')
    os.kill(door.process.pid, signal.SIGHUP)
    return str(await door.process.logged('event="configuration reloaded"', before + 1))


async def test_times_hold_from_the_reload_on(tmp_path: Path) -> None:
    slow = "probe_interval_s = 3600\nprobe_fresh_s = 9999\npoll_interval_s = 3600\n"
    async with restartable() as engine, fake_daemon(events_open=False) as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, daemon.address, config=f"[groups]\n{slow}", **OF_THE_FILE) as door:
            await door.serves("llama")
            engine.stop()
            line = await reloaded(door, slow.replace("probe_interval_s = 3600", "probe_interval_s = 0.1"))
            assert "changed=groups.probe_interval_s" in line
            await door.gated("glm", "endpoint probe failed")
            # and how long requests wait, until when a group is shown
            answer = await door.chat("llama")
            assert answer.json()["error"]["message"].endswith("endpoint probe failed")
            quick = slow.replace("3600", "0.1")
            await reloaded(door, quick + "model_wait_s = 0.2\n")
            answer = await door.chat("llama")
            assert "groups.model_wait_s" in answer.json()["error"]["message"]
            await reloaded(door, quick + "model_ttl_s = 0.2\n")
            await door.until("it is retired", lambda shown: not shown["groups"])
            await reloaded(door, quick + "serving_timeout_s = 7\n")
            await engine.start()
            await door.serves("llama")
            answer = await door.chat("llama")
            record = await door.ctl("explain", "request", answer.headers["x-request-id"])
            assert record["deadlines"]["total_s"] == 7
            assert "need a restart" not in door.log


async def test_tools_are_named_as_the_file_says_now(tmp_path: Path) -> None:
    server = Server()
    async with fake_daemon() as daemon, at(server) as tools:
        daemon.group("one", mcp=tools)
        async with outside(tmp_path, daemon.address) as door:
            await door.until("it is known", lambda shown: shown["groups"])
            assert [tool["name"] for tool in await door.tools()] == ["serve_status", "one__add"]
            listed = len(server.asked("tools/list"))
            await reloaded(door, 'mcp_naming = "flat"\n')
            assert [tool["name"] for tool in await door.tools()] == ["serve_status", "add"]
            assert await door.call("add", __group="one") == (False, '["add", {}]')
            assert len(server.asked("tools/list")) == listed
            await reloaded(door, "tools_ttl_s = 0.001\n")
            for _ in range(3):
                await door.tools()
            assert len(server.asked("tools/list")) > listed
            waits = trio.Event()

            async def tool(params: object, notify: object) -> object:
                waits.set()
                await trio.sleep_forever()

            server.tool = tool
            await reloaded(door, "mcp_timeout_s = 0.2\n")
            failed, text = await door.call("one__add")
            assert (failed, waits.is_set()) == (True, True)
            assert "within 0.2 s" in text


async def test_a_call_that_runs_is_not_touched(tmp_path: Path) -> None:
    server = Server()
    waits, goes_on = trio.Event(), trio.Event()

    async def tool(params: object, notify: object) -> object:
        waits.set()
        await goes_on.wait()
        return {"content": [{"type": "text", "text": "done"}]}

    server.tool = tool
    async with fake_daemon() as daemon, at(server) as tools:
        daemon.group("one", mcp=tools)
        async with outside(tmp_path, daemon.address) as door:
            await door.until("it is known", lambda shown: shown["groups"])
            answers = []

            async def ask() -> None:
                answers.append(await door.call("one__add"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await waits.wait()
                for number in range(5):
                    await reloaded(door, f'mcp_naming = "{("flat", "prefix")[number % 2]}"\nmcp_timeout_s = 0.2\n')
                goes_on.set()
            assert answers == [(False, "done")]
            assert len(server.ran) == 1


async def test_who_is_not_allowed_any_more_is_let_go_of(tmp_path: Path) -> None:
    port = free_udp_port()
    environ = {**OF_THE_FILE, "MENTAT_ANNOUNCE_PORT": str(port), "PROBE_INTERVAL_S": "0.1"}
    config = '[groups]\nallowed_sources = ["127."]\n'
    async with restartable() as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, config=config, **environ) as door:
            daemon.announce(port)
            await door.serves("llama")
            # its address, and that of its clients here as well: the list was set
            line = await reloaded(door, 'allowed_sources = ["10.9.9.0/24"]\n')
            assert "changed=groups.allowed_sources" in line
            assert (await door.http.get(f"{door.base}/healthz")).status_code == 403
            await door.process.logged('event="group is gone"')
            daemon.announce(port)
            await door.process.logged("event=announce_source_not_allowed")
            await reloaded(door, 'allowed_sources = ["local"]\n')
            assert (await door.status())["daemons"] == {}
            daemon.announce(port)
            await door.serves("llama")


async def test_what_waits_for_a_restart_is_named(tmp_path: Path) -> None:
    async with fake_daemon() as daemon, outside(tmp_path, daemon.address) as door:
        await door.until("the daemon is watched", lambda shown: shown["daemons"][daemon.address]["connected"])
        assert "keys=" not in door.log
        await reloaded(
            door,
            'enabled = false\nuniverse = "blue"\ndiscover_peers = false\nsecret = "s3cret"\nannounce_interval_s = 9\n',
        )
        keys = str(await door.process.logged("some changes need a restart")).partition("keys=")[2].split(",")
        wanted = ("enabled", "universe", "discover_peers", "secret", "announce_interval_s")
        assert sorted(keys) == sorted(f"groups.{key}" for key in wanted)
        assert "s3cret" not in door.log
        assert (await door.status())["daemons"][daemon.address]["connected"] is True
        shown = await door.ctl("status")
        assert sorted(shown["needs_restart"]) == sorted(keys)

"""Daemons and engines that name more than anybody holds, and daemons that restart without a pause: bounds over all
groups together, and a router that goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import trio

from appliance.facts.mcp import McpSettings
from appliance.groups import groups as groups_module
from appliance.mcp import merge as merge_module
from appliance.rules.groups import skim
from tests.fake_daemon import engine_at, fake_daemon
from tests.fake_engine import CHAT, DONE, event, fake_engine, says, streamed, whole
from tests.groups_outside import outside, url_of
from tests.groups_scene import scene, until
from tests.toolservers.scripted import Server
from tests.toolservers.scripted import scene as tool_scene


async def test_models_of_all_groups_are_bounded_and_the_first_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred groups of a thousand names each made the router lay its table anew for seconds."""
    monkeypatch.setattr(groups_module, "MOST_NAMES", 20)
    many = [f"x{i}" for i in range(50)]
    async with (
        engine_at("m", "n") as engine,
        engine_at(*many) as greedy,
        engine_at("late") as late,
        fake_daemon() as honest,
        fake_daemon(node_id="liar") as liar,
        scene(daemons=[honest.address, liar.address]) as found,
    ):
        honest.group("z", openai=engine.url)
        await honest.tell()
        await found.serving("m", "n")
        liar.group("a", openai=greedy.url)
        await liar.tell()
        await until("the rest is full", lambda: len(found.models) == 20)
        assert {"m", "n"} <= set(found.models)
        liar.group("b", openai=late.url)
        await liar.tell()
        why = await found.gated("b", "endpoint probe failed: ")
        assert why == f"endpoint probe failed: {late.url}: all groups together may name 20 models, and do"
        hits = engine.hits
        await until("the first is probed again", lambda: engine.hits > hits + 3)
        assert {"m", "n"} <= set(found.models)
        greedy.models = ["x"]
        await found.serving("m", "n", "x", "late")


async def test_what_is_kept_of_entries_is_shared_among_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "MOST_ENTRY_BYTES", 4000)
    monkeypatch.setattr(groups_module, "LEAST_ENTRY_BYTES", 500)
    async with engine_at(*(f"m{i}" for i in range(100))) as engine, fake_daemon() as daemon:
        for number in range(8):
            daemon.group(f"g{number}", openai=engine.url)
        async with scene(daemons=[daemon.address]) as found:
            await until("all serve", lambda: len(found.groups.endpoints()) == 8)
            for entries in found.groups.listed().values():
                assert len(json.dumps(entries)) < 5000
                whole = [row for row in entries.values() if "max_model_len" in row]
                assert 0 < len(whole) < len(entries) < 100


def test_names_without_entries_are_bounded_too() -> None:
    body = json.dumps({"data": [{"id": f"{i}-" + "n" * 400, "x": "y" * 2000} for i in range(1000)]}).encode()
    found = skim.entries(body, 10_000)
    assert 4 <= len([row for row in found if "x" in row]) <= 5
    assert len(json.dumps(found)) < 2 * 10_000 + 1000


async def test_lists_of_tools_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_module, "MOST_LIST_BYTES", 20_000)
    monkeypatch.setattr(merge_module, "LEAST_LIST_BYTES", 1000)
    small, large = Server(tools=["a"]), Server(tools=[f"t{i}" for i in range(100)])
    servers = {"large": large}
    async with tool_scene(monkeypatch, servers, McpSettings(tools_ttl_s=0)) as here:
        assert len(await here.names()) == 101
        servers |= {f"s{i}": small for i in range(9)}
        assert await here.names() == ["serve_status", *(f"s{i}__a" for i in range(9))]
        (row,) = [row for row in here.merge.rows() if row["group"] == "large"]
        assert row["error"] == "an answer of more than 2000 bytes"
        assert await here.call("large__t1") == '["t1", null]'  # its tools can be called all the same


async def test_a_daemon_that_restarts_without_a_pause(tmp_path: Path) -> None:
    async with fake_engine() as engine, fake_daemon() as steady:
        steady.group("glm", openai=url_of(engine))
        port, stop = 0, trio.Event()
        restarts = 0

        async def storm(task_status: trio.TaskStatus[None]) -> None:
            nonlocal port, restarts
            while not stop.is_set():
                async with fake_daemon(port=port, node_id="N2", boot_id=f"{restarts:016x}") as daemon:
                    port = daemon.port
                    daemon.group(f"g{restarts % 2}", openai=url_of(engine))
                    if not restarts:
                        task_status.started()
                    restarts += 1
                    await daemon.tell()
                    await trio.sleep(0.01)
            async with fake_daemon(port=port, node_id="N2") as daemon:  # at last it stays
                daemon.group("last", openai=url_of(engine))
                await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            await nursery.start(storm)
            async with outside(tmp_path, steady.address, f"127.0.0.1:{port}") as door:
                await door.serves("llama")
                descriptors = f"/proc/{door.process.pid}/fd"
                before = len(os.listdir(descriptors))
                for _ in range(100):
                    assert (await door.chat("llama")).status_code == 200
                assert restarts > 50
                stop.set()
                await door.until("it is found as it is now", lambda shown: "last" in shown["groups"])
                assert len(os.listdir(descriptors)) <= before + 10
                assert door.log.count("daemon does not answer") < restarts / 5
                assert "Traceback" not in door.log
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_to_groups_leave_no_connections_behind(stream: bool, tmp_path: Path) -> None:
    """Each has a connection of its own, since one that is being closed would lose it: nobody would take it again."""
    script = says(*(streamed(event("a"), DONE) if stream else (whole(200, CHAT),)))
    async with fake_engine(script) as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, daemon.address, PROBE_INTERVAL_S="3600", PROBE_FRESH_S="9999") as door:
            await door.serves("llama")
            descriptors = f"/proc/{door.process.pid}/fd"
            before = len(os.listdir(descriptors))
            for _ in range(50):
                assert (await door.chat("llama", stream=stream)).status_code == 200
            assert len(os.listdir(descriptors)) <= before + 3
            assert engine.asked[-1].by_name["connection"] == "close"

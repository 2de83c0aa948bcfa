"""The agent's side of the link and the control plane's, against each other over mutual TLS."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from random import Random

import attrs
import pytest
import trio

from appliance.agent import conversation, redial
from appliance.agent.credentials import Credentials
from appliance.agent.link import Caller
from appliance.cli.agent_tree import secured
from appliance.facts.hardware import Gpu
from appliance.store.papers import Papers
from tests.agent_scene import NODE, machine
from tests.caller_scene import STANDING, LoggedShards
from tests.control_door import Cluster, cluster

HARDWARE = attrs.evolve(
    NODE, node="box", address="127.0.0.1", gpus=(Gpu("G0", 0, "NVIDIA L40S", "l40s-45g", 45 << 30),)
)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are not waited out."""
    monkeypatch.setattr(redial, "REFUSED_S", 0.05)
    monkeypatch.setattr(redial, "REFUSED_LONGEST_S", 0.2)
    monkeypatch.setattr(redial, "LONGEST_S", 0.2)


@asynccontextmanager
async def agent(it: Cluster, papers: Papers) -> AsyncIterator[tuple[Caller, LoggedShards]]:
    shards, credentials = LoggedShards(), Credentials(papers)
    dial = secured(it.url, credentials)
    caller = Caller(it.url, dial, STANDING, shards, machine(HARDWARE), Random(1), time.time, credentials=credentials)
    async with trio.open_nursery() as nursery:
        await nursery.start(caller.wake.relay, shards.changed.wait)
        nursery.start_soon(caller.keep)
        yield caller, shards
        nursery.cancel_scope.cancel()


async def until(true: Callable[[], object]) -> None:
    """Until something holds; the scene bounds how long."""
    while not true():  # noqa: ASYNC110
        await trio.sleep(0.01)


async def test_a_replica_is_started_published_kept_over_a_broken_link_and_its_log_read(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, agent(it, await it.papers("box")) as (caller, shards):
        await until(lambda: shards.asked)
        (asked,) = shards.asked
        shard_id = asked.removeprefix("start ")
        assert asked.startswith("start m.") and caller.line.connected
        shards.become(shard_id, "ready", 1.0, url="http://127.0.0.1:20000", port=20000)
        await until(it.plane.endpoints)
        (endpoint,) = it.plane.endpoints()
        assert (endpoint.id, endpoint.port, endpoint.models) == (shard_id.partition("/")[0], 20000, ("m",))
        assert endpoint.api_key == shards.told[shard_id].shard.key != ""

        it.plane.sessions["box"]._scope.cancel()  # as if the connection had broken
        await until(lambda: it.plane.world.nodes["box"].session == 2)
        assert it.plane.endpoints() == (endpoint,) and shards.asked == [asked]

        async with aclosing(it.plane.log(endpoint.id, 0, 3, False)) as log:
            assert [line async for piece in log for line in piece] == ["line 0", "line 1", "line 2"]

        await it.plane.scale("m", 0, "olga")
        await until(lambda: any(each.startswith(f"stop {shard_id}") for each in shards.asked))
        await until(lambda: not it.plane.endpoints())
        shards.become(shard_id, "stopped")
        await until(lambda: f"forget {shard_id}" in shards.asked)


async def test_both_sides_name_certificate_and_claim(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, agent(it, await it.papers("node-a")) as (caller, _):
        words = "certificate says node-a, agent claims box"
        await until(lambda: it.logged("agent refused"))
        assert it.logged("agent refused")[0]["reason"] == words
        await until(lambda: it.logged("control plane refuses this agent, engines go on"))
        told = it.logged("control plane refuses this agent, engines go on")[0]
        assert told["reason"] == words and "node-a, serial" in told["certificate"] and told["claim"] == "box"
        await until(lambda: caller.line.reason)
        assert len(it.logged("agent refused")) == 1


async def test_a_certificate_is_renewed_over_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "RENEW_LOOK_S", 0.1)
    async with cluster(tmp_path) as it:
        papers = await it.papers("box", age_s=80 * 86400.0)
        before = Credentials(papers).read().serial
        async with agent(it, papers) as (caller, _):
            await until(lambda: Credentials(papers).read().serial != before)
            known = await it.store.certificates("box")
            assert {before, Credentials(papers).read().serial} == {each.serial for each in known}
            assert caller.line.connected


async def test_a_revoked_agent_is_told_and_backs_off(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, agent(it, await it.papers("box")) as (caller, _):
        await until(lambda: caller.line.connected)
        await it.plane.revoke("box", "olga")
        await until(lambda: it.logged("control plane refuses this agent, engines go on"))
        told = it.logged("control plane refuses this agent, engines go on")[0]
        assert told["code"] == "revoked" and "agent claims box" in told["reason"]

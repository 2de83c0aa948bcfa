"""The agent's end of the link over real sockets with mutual TLS."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
import trio
from structlog.testing import capture_logs

from appliance.agent import redial
from appliance.agent.credentials import Credentials
from appliance.agent.link import Caller
from appliance.cli.agent_tree import secured
from appliance.facts import link as say
from appliance.facts.report import Report
from appliance.store.papers import Papers, put
from appliance.wire import link as wire
from tests.agent_scene import machine
from tests.caller_scene import STANDING, LoggedShards, shard
from tests.fake_control import Plane, control, cut, send_raw
from tests.link_papers import DAY_S, Cluster


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are not waited out."""
    monkeypatch.setattr(redial, "REFUSED_S", 0.05)
    monkeypatch.setattr(redial, "REFUSED_LONGEST_S", 0.2)
    monkeypatch.setattr(redial, "LONGEST_S", 0.2)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "plane")


@attrs.define(eq=False)
class Called:
    caller: Caller
    shards: LoggedShards
    lines: list[Any]

    async def told(self, event: str) -> dict[str, Any]:
        """The first line of the log that holds `event`, once it is there."""
        with trio.fail_after(30):
            while True:
                for line in self.lines:
                    if event in line["event"]:
                        return dict(line)
                await trio.sleep(0.01)


@asynccontextmanager
async def agent(plane: Plane, papers: Papers) -> AsyncIterator[Called]:
    shards, credentials = LoggedShards(), Credentials(papers)
    dial = secured(plane.url, credentials)
    caller = Caller(plane.url, dial, STANDING, shards, machine(), Random(1), time.time, credentials=credentials)
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            await nursery.start(caller.wake.relay, shards.changed.wait)
            nursery.start_soon(caller.keep)
            yield Called(caller, shards, lines)
            nursery.cancel_scope.cancel()


async def test_it_registers_on_every_connection(tmp_path: Path, cluster: Cluster) -> None:
    async with control(cluster.papers) as plane, agent(plane, cluster.join(tmp_path, "box")) as called:
        for number in range(3):
            called.shards.say(Report(shard(f"a.{number}"), "ready", 1.0))
            line, shown = await plane.call()
            assert (("commonName", "box"),) in shown["subject"]
            register = await line.welcome(clock=time.time())
            assert len(register.reports) == number + 1
            await line.say(say.Stop(f"a.{number}/0"))
            assert [each.state for each in (await line.hear(say.News)).reports] == ["draining"]
            await cut(line)


async def test_messages_that_are_none(tmp_path: Path, cluster: Cluster) -> None:
    async with control(cluster.papers) as plane, agent(plane, cluster.join(tmp_path, "box")) as called:
        line, _ = await plane.welcomed()
        await send_raw(line, b'{"type": "dance", "body": {"with": "whom"}}')
        assert "dance" in (await line.hear(say.Trouble)).message
        await send_raw(line, b'{"type": "stop", "body": {"shard_id": "x/0", "later": [1]}}')
        assert (await line.hear(say.News)).gone == ("x/0",), "unknown fields are passed over"
        await send_raw(line, b'{"type": "stop", "body": {"shard_id": 7}}')
        assert "not a message of the link" in (await line.hear(say.Trouble)).message
        line, _ = await plane.welcomed()
        await send_raw(line, wire.encode(say.Stop("y/0")), half=True)
        await cut(line)
        line, _ = await plane.welcomed()
        assert called.shards.taken() == []


async def test_a_message_that_is_too_large_ends_the_connection(tmp_path: Path, cluster: Cluster) -> None:
    async with control(cluster.papers) as plane, agent(plane, cluster.join(tmp_path, "box")) as called:
        line, _ = await plane.welcomed()
        with contextlib.suppress(trio.BrokenResourceError):  # it hangs up in the middle
            await send_raw(line, b"1" * (wire.MAX_MESSAGE_BYTES + 1))
        assert f"more than {wire.MAX_MESSAGE_BYTES} bytes" in (await called.told("control plane lost"))["reason"]
        await plane.welcomed()


@pytest.mark.parametrize("whose", ["the server's", "ours"])
async def test_another_root_is_named_with_certificate_claim_and_next_step(
    tmp_path: Path, cluster: Cluster, whose: str
) -> None:
    """The control plane was set up anew: its root is another one than we believe, or than signed us."""
    papers = Cluster(tmp_path / "before").join(tmp_path, "box")
    if whose == "ours":
        put(papers.root, cluster.root.pem)
    async with control(cluster.papers) as plane, agent(plane, papers) as called:
        line = await called.told("control plane refuses this agent")
        assert line["code"] == "tls"
        side = "the other side was not accepted" if whose == "the server's" else "our certificate was not signed by its"
        assert side in line["reason"]
        found = Credentials(papers).read()
        assert found.serial in line["certificate"]
        assert ("not of the root" in line["certificate"]) == (whose == "ours")
        assert found.root in line["certificate"]
        assert line["claim"] == "box"
        assert "if the control plane was set up anew, run 'appliance ctl node add NODE'" in line["next_step"]
        with trio.fail_after(30):
            while plane.connections < 4:  # noqa: ASYNC110 - sockets set no events
                await trio.sleep(0.01)
        assert len([each for each in called.lines if "refuses" in each["event"]]) == 1
        theirs = "was not signed by its root" if whose == "the server's" else "not signed by this cluster's root"
        assert theirs in plane.failures[0]


async def test_a_certificate_that_has_ended(tmp_path: Path, cluster: Cluster) -> None:
    papers = cluster.join(tmp_path, "box", time.time() - 91 * DAY_S)
    async with control(cluster.papers) as plane, agent(plane, papers) as called:
        line = await called.told("control plane refuses this agent")
        assert "expired" in line["reason"], line
        assert line["certificate"].startswith("box, serial ")


async def test_a_refusal_names_what_was_shown_and_what_was_claimed(tmp_path: Path, cluster: Cluster) -> None:
    async with control(cluster.papers) as plane, agent(plane, cluster.join(tmp_path, "node-a")) as called:
        line, _ = await plane.call()
        await line.hear(say.Register)
        await line.say(say.Refused("wrong_name", "certificate says node-a, agent claims box"))
        await line.link.aclose()
        told = await called.told("control plane refuses this agent")
        assert told["code"] == "wrong_name"
        assert told["certificate"].startswith("node-a, serial ")
        assert told["claim"] == "box"
        assert told["next_step"].startswith("set agent.node")


async def test_a_node_that_has_not_joined_calls_as_soon_as_it_has(tmp_path: Path, cluster: Cluster) -> None:
    papers = Papers.of(str(tmp_path))
    async with control(cluster.papers) as plane, agent(plane, papers) as called:
        line = await called.told("control plane refuses this agent")
        assert line["code"] == "no_certificate"
        assert "node.pem" in line["reason"]
        assert line["certificate"].startswith("none ")
        cluster.join(tmp_path, "box")
        await plane.welcomed()


async def test_what_is_no_control_plane_is_named(tmp_path: Path, cluster: Cluster) -> None:
    async with control(cluster.papers) as plane, agent(plane, cluster.join(tmp_path, "box")) as called:
        plane.mode = "teapot"
        told = await called.told("control plane refuses this agent")
        assert told["code"] == "http"
        assert "HTTP 418" in told["reason"]
        assert "agent.control_url" in told["next_step"]


async def test_a_certificate_is_renewed_and_shown_by_the_next_connection(tmp_path: Path, cluster: Cluster) -> None:
    papers = cluster.join(tmp_path, "box", time.time() - 61 * DAY_S)
    async with control(cluster.papers) as plane, agent(plane, papers) as called:
        line, before = await plane.call()
        await line.welcome(clock=time.time())
        asked = await line.hear(say.Renew)
        assert asked.csr.startswith("-----BEGIN CERTIFICATE REQUEST-----")
        await line.say(say.Renewed(reason="the disk is full"))
        assert (await called.told("the certificate was not renewed"))["reason"] == "the disk is full"
        await line.say(say.Renewed(cluster.fresh("box", time.time())))
        assert (await called.told("the new certificate is not taken"))["reason"] == "what came is for another key"
        await line.say(say.Renewed(cluster.root.sign_csr(asked.csr, "box", time.time()).pem))
        await called.told("certificate renewed")
        await cut(line)
        line, after = await plane.call()
        assert after["serialNumber"] != before["serialNumber"]
        await line.welcome(clock=time.time(), beat_s=0.05)
        await line.only_beats(5)


async def test_a_fresh_certificate_is_not_renewed(tmp_path: Path, cluster: Cluster) -> None:
    async with control(cluster.papers) as plane, agent(plane, cluster.join(tmp_path, "box")):
        line, _ = await plane.welcomed(beat_s=0.05)
        await line.only_beats(5)

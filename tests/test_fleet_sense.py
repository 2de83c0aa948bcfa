"""An agent that talks nonsense is refused, and nothing of what it said is reckoned with."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio.testing

from appliance.facts.hardware import Cpus, Gpu, Inventory
from appliance.facts.link import Look, News, Refused, Register, Start
from appliance.facts.report import Report
from appliance.rules.fleet.sense import MOST_SHARDS, TAIL_CHARACTERS, nonsense
from tests.control_scene import control, next_of, register, report

GPU = Gpu("G0", 0, "NVIDIA L40S", "l40s-45g", 45 << 30)


def of(**others: Any) -> Report:
    """A report that is wrong in one place; `shard__rank` and the like go one deeper."""
    good = report()
    inner = {key.removeprefix("shard__"): value for key, value in others.items() if key.startswith("shard__")}
    outer = {key: value for key, value in others.items() if not key.startswith("shard__")}
    return attrs.evolve(good, shard=attrs.evolve(good.shard, **inner), **outer)


WIDE = attrs.evolve(report().shard.profile, nodes=10**18)
REPORTS = [
    (of(url="http://["), "it serves at 'http://['"),
    (of(url="http://h:99999"), "it serves at"),
    (of(url="http://h:-1"), "it serves at"),
    (of(url="http://h"), "it serves at"),
    (of(url="file:///etc/passwd"), "it serves at"),
    (of(shard__rank=5), "there is no rank 5 on 1 nodes"),
    (of(shard__rank=-1), "there is no rank -1"),
    (of(shard__profile=WIDE), "its profile spans 1000000000000000000 nodes"),
    (of(shard__replica=""), "no name"),
    (of(shard__replica="a/b"), "no name"),
    (of(shard__replica="m" * 300), "no name"),
    (of(tail=("x" * TAIL_CHARACTERS, "y")), "the tail of its log"),
]
INVENTORIES = [
    (Inventory(gpus=(GPU, GPU)), "it has GPU G0 twice"),
    (Inventory(gpus=(attrs.evolve(GPU, uuid=""),)), "without UUID"),
    (Inventory(cpus=Cpus(count=0)), "it has 0 CPUs"),
    (Inventory(gpus=tuple(attrs.evolve(GPU, uuid=str(n)) for n in range(2000))), "it has 2000 GPUs"),
]


@pytest.mark.parametrize(("wrong", "words"), REPORTS)
def test_a_report_that_cannot_be(wrong: Report, words: str) -> None:
    assert words in nonsense(News((report(), wrong)), {})
    assert words in nonsense(register(reports=(wrong,)), {})


@pytest.mark.parametrize(("wrong", "words"), INVENTORIES)
def test_hardware_that_cannot_be(wrong: Inventory, words: str) -> None:
    assert words in nonsense(Look(wrong), {})
    assert words in nonsense(register(inventory=wrong), {})


@pytest.mark.parametrize("ports", [(20100, 20000), (0, 0), (-5, -1), (1, 10**9)])
def test_ports_that_cannot_be(ports: tuple[int, int]) -> None:
    assert f"its ports are {ports[0]} to {ports[1]}" == nonsense(register(port_range=ports), {})


def test_more_shards_than_a_node_can_have_also_by_and_by() -> None:
    known = {str(n): report() for n in range(MOST_SHARDS)}
    assert nonsense(News(()), known) == ""
    assert nonsense(News((report(),)), known) == f"it has {MOST_SHARDS + 1} shards"


def test_what_sound_agents_say_is_none() -> None:
    idle = of(state="starting", url="", port=0)
    for message in (register(), register(reports=(report(), idle)), News((report(), idle)), Look(Inventory())):
        assert nonsense(message, {}) == ""


WRONG: list[Register] = [
    register("node-b", reports=(attrs.evolve(report(node="node-b"), url="http://["),)),
    register("node-b", reports=(of(shard__profile=WIDE, shard__node="node-b"),)),
    register("node-b", port_range=(20100, 20000)),
]


@pytest.mark.parametrize("wrong", WRONG)
async def test_it_is_refused_and_the_others_are_decided_for(
    autojump_clock: trio.testing.MockClock, wrong: Register
) -> None:
    async with control(real=True) as it:
        refused = await it.refused(wrong)
        assert refused.code == "malformed" and "agent claims node-b; it registers that " in refused.message
        assert isinstance(await next_of(await it.join(), Start), Start)


async def test_it_is_refused_later_too(autojump_clock: trio.testing.MockClock) -> None:
    async with control(real=True) as it:
        bad = await it.join(register("node-b"))
        await bad.send(News((attrs.evolve(report(replica="m.zzzzz", node="node-b"), url="http://h:99999"),)))
        refused = await next_of(bad, Refused)
        assert refused.code == "malformed" and "http://h:99999" in refused.message
        assert "m.zzzzz" not in it.plane.world.replicas

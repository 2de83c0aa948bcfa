"""The port on which the ranks of a replica meet: drawn by the control plane, refused by the leader's agent where some
other process has it. That is no fault of the model, and no port is tried twice in vain."""

from __future__ import annotations

from random import Random

import attrs
from hypothesis import given
from hypothesis import strategies as st

from appliance.rules.fleet.backoff import FIRST_S
from appliance.rules.fleet.members import REFUSED_S
from appliance.rules.fleet.starting import make
from appliance.rules.fleet.world import World
from appliance.rules.placement.spots import Placement, Seat
from tests.fleet_scene import Agent, Scene, inventory, model

WIDE = model("wide", nodes=2, gpus_per_node=1, tensor_parallel=2)
FIRST = 20000


def world_of(ports: int) -> World:
    world = World()
    agent = Agent("a", inventory("a"), ports=(FIRST, FIRST + ports - 1))
    world.register(agent.register(), 0.0)
    world.register(attrs.evolve(agent, name="b").register(), 0.0)
    return world


def draw(world: World, now: float, rng: Random) -> int:
    seats = (Seat("a", "10.0.0.1", ("GPU-a-0",)), Seat("b", "10.0.0.2", ("GPU-b-0",)))
    placed = make(world, WIDE, Placement(WIDE.profiles[0], seats, "l40s-45g", "x"), now, rng)
    return placed.shards[0].rendezvous_port


@given(ports=st.integers(1, 80), free=st.sets(st.integers(0, 79), max_size=3), seed=st.integers(0, 1000))
def test_the_last_free_port_is_found_with_one_try_for_each_stranger(ports: int, free: set[int], seed: int) -> None:
    world, rng = world_of(ports), Random(seed)
    strangers = {FIRST + port for port in range(ports) if port not in free}
    tried: list[int] = []
    while (port := draw(world, float(len(tried)), rng)) in strangers and len(tried) < ports:
        assert FIRST <= port < FIRST + ports
        assert world.refuse_port("a", port, float(len(tried))), "each is news once"
        tried.append(port)
    assert len(set(tried)) == len(tried)
    assert port not in strangers or len(strangers) == ports


def test_where_all_are_taken_the_one_refused_longest_ago_is_tried_and_that_is_no_news() -> None:
    world, rng = world_of(3), Random(1)
    order = [FIRST + 2, FIRST, FIRST + 1]
    for at, port in enumerate(order):
        world.refuse_port("a", port, float(at))
    assert draw(world, 10.0, rng) == order[0]
    assert not world.refuse_port("a", order[0], 10.0)
    assert draw(world, 11.0, rng) == order[1]


def test_a_refused_port_is_worth_a_try_after_a_while_and_then_not_remembered() -> None:
    world, rng = world_of(1), Random(1)
    world.refuse_port("a", FIRST, 5.0)
    assert world.nodes["a"].refused_ports(5.0 + REFUSED_S - 1) == {FIRST}
    assert world.nodes["a"].refused_ports(5.0 + REFUSED_S) == set()
    assert draw(world, 5.0 + REFUSED_S, rng) == FIRST
    world.refuse_port("a", FIRST + 1, 6.0 + REFUSED_S)
    assert set(world.nodes["a"].refused) == {FIRST + 1}
    assert not world.refuse_port("nobody", FIRST, 0.0)


def scene_of(free: set[int], ports: int = 40) -> Scene:
    scene = Scene([inventory(name, 1, "x") for name in ("a", "b")], [WIDE])
    last = FIRST + ports - 1
    scene.strangers = set(range(FIRST, last + 1)) - free
    for agent in scene.agents.values():
        agent.ports = (FIRST, last)
    scene.connect()
    return scene


def test_a_range_full_of_strangers_is_gone_through_at_an_even_pace() -> None:
    scene = scene_of({FIRST + 17})
    # At worst one try for each port, of a few passes each; with waits that grow it would be most of an hour.
    tries_s = 20 + 40 * 6
    while not scene.ready("wide") and scene.now < 1000 + tries_s:
        scene.tick()
    assert len(scene.ready("wide")) == 1
    refused = scene.told("replica_failed")
    assert len(refused) > 3, "by these dice the free port is not the first, or this would prove nothing"
    assert all(float(str(event.fields["retry_in_s"])) < FIRST_S / 2 + 0.1 for event in refused)
    assert len({event.fields["reason"] for event in refused}) == len(refused)
    assert scene.fleet.history.backoffs["wide"].failures == 0
    assert scene.fleet.history.avoided == {}, "and no node is tried last for it"
    scene.run(100)
    assert scene.fleet.history.backoffs == {}


def test_it_says_that_it_was_the_port_while_it_waits() -> None:
    scene = scene_of(set(), 3)
    while not scene.told("replica_failed"):
        scene.tick()
    told = scene.fleet.explain("wide", scene.now).missing
    assert told.startswith("rendezvous port 200") and "; it is tried again in 1 s" in told, told


def test_where_no_port_is_left_the_waits_grow_as_after_any_failure() -> None:
    scene = scene_of(set(), 3)
    scene.run(300)
    waits = [float(str(event.fields["retry_in_s"])) for event in scene.told("replica_failed")]
    assert waits.count(1.0) == 6, "three ports of the first node, and three of the other one, which leads then"
    grown = [wait for wait in waits if wait != 1.0]
    assert grown == sorted(grown) and grown[-1] > 30
    assert scene.fleet.history.avoided["wide"] == {"a", "b"}


def test_an_agent_that_refuses_ports_nobody_asked_for_has_failed() -> None:
    scene = Scene([inventory("a", 1)], [model()])
    scene.connect()
    scene.run(21)
    for turn in range(200):
        for agent in scene.agents.values():
            for report in agent.live:
                agent.become(report.shard.id, "failed", scene.now, reason="no", refused_port=20000 + turn)
        scene.tick()
    assert scene.fleet.history.backoffs["llama"].failures > 3
    assert scene.world.nodes["a"].refused == {}

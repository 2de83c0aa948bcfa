"""A drain outlives the control plane: it goes on with the grace it had, whatever was done to the clock."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from appliance.control.plane import Plane
from appliance.facts.control import ControlSettings
from appliance.rules.fleet.expiry import drained_since
from appliance.rules.fleet.rooming import why_not
from appliance.store import migrate
from appliance.store.migrations import MIGRATIONS
from appliance.store.rows import Certificate, JoinToken
from appliance.store.store import open_store
from tests.control_scene import SETTINGS, WALL, FakeStore, control
from tests.fleet_scene import Scene, inventory, model

GRACE_S = SETTINGS.control.drain_grace_s


@given(
    gone_s=st.integers(-(10**8), 10**8) | st.integers(-10, 10**4), now=st.floats(0, 1e6), grace_s=st.integers(0, 10**4)
)
def test_a_grace_is_never_longer_than_it_was_and_never_over_before_anybody_looked(
    gone_s: int, now: float, grace_s: int
) -> None:
    ends_at = drained_since(WALL, WALL + gone_s, now, grace_s) + grace_s
    left_s = ends_at - now
    assert -1e-3 <= left_s <= grace_s + 1e-3
    if 0 <= gone_s < grace_s:
        assert left_s == pytest.approx(grace_s - gone_s, abs=1e-2)
    else:
        assert left_s == pytest.approx(grace_s, abs=1e-2)


@pytest.mark.parametrize(("gone_s", "left_s"), [(100.0, GRACE_S - 100), (GRACE_S + 5, GRACE_S), (-7200.0, GRACE_S)])
async def test_the_next_control_plane_goes_on_with_it(
    gone_s: float, left_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    store = FakeStore()
    store.give("node-a")
    await store.drain("node-a", "olga", WALL)
    plane = Plane(SETTINGS, store, Random(1), trio.current_time, wall=lambda: WALL + gone_s)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(plane.run)
        since = plane.world.nodes["node-a"].draining_since
        assert since is not None and since + GRACE_S - trio.current_time() == pytest.approx(left_s, abs=0.5)
        nursery.cancel_scope.cancel()


async def test_a_second_word_changes_nothing_and_uncordon_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    async with control() as scene:
        await scene.join()
        assert await scene.plane.drain("node-a", "olga")
        since = scene.plane.world.nodes["node-a"].draining_since
        await trio.sleep(50)
        assert not await scene.plane.drain("node-a", "nils")
        assert scene.plane.world.nodes["node-a"].draining_since == since
        assert await scene.plane.uncordon("node-a", "olga")
        assert scene.plane.world.nodes["node-a"].draining_since is None and not scene.store.cordoned


def test_what_runs_goes_elsewhere_although_the_control_plane_starts_again_in_between() -> None:
    scene = Scene([inventory(name) for name in ("a", "b")], [model()], ControlSettings(settle_s=5, drain_grace_s=60))
    scene.connect()
    scene.run(30)
    [first] = scene.ready("llama")
    home = scene.world.replicas[first].nodes[0]
    scene.world.drain(home, scene.now)
    scene.cordons[home] = scene.now
    assert why_not(scene.world.nodes[home]) == "it is being drained"
    scene.tick()
    scene.restart()
    scene.connect()
    scene.run(40)
    [second] = scene.ready("llama")
    assert scene.world.replicas[second].nodes[0] != home
    assert not scene.agents[home].live
    assert why_not(scene.world.nodes[home]) == "it is drained"


def test_why_nothing_goes_there_is_told_anew_once_it_is_drained() -> None:
    scene = Scene([inventory("a")], [model()], ControlSettings(settle_s=5, drain_grace_s=3))
    scene.connect()
    scene.run(30)
    scene.world.drain("a", scene.now)
    while scene.agents["a"].live:
        scene.tick(0.1)
    scene.run(0.5, 0.1)
    assert "a: it is drained" in scene.fleet.stand("llama", scene.now).missing
    assert not scene.told("overslept")


# -- the store


async def test_a_drain_is_kept_with_its_beginning(tmp_path: Path) -> None:
    async with open_store("", str(tmp_path)) as store:
        assert await store.drain("a", "root", WALL)
        assert not await store.drain("a", "anna", WALL + 5)
        assert await store.cordon("b", "anna", WALL) and await store.drain("b", "root", WALL + 7)
    async with open_store("", str(tmp_path)) as store:
        kept = await store.cordons()
        assert [(each.node, each.at, each.by, each.drained_at) for each in kept.values()] == [
            ("a", WALL, "root", WALL),
            ("b", WALL, "anna", WALL + 7),
        ]
        assert await store.uncordon("a", "root", WALL + 9) and list(await store.cordons()) == ["b"]
        told = [(entry.by, entry.action, entry.target, entry.detail) for entry in reversed(await store.entries())]
    assert told == [
        ("root", "cordon", "a", "to drain it"),
        ("root", "drain", "a", ""),
        ("anna", "cordon", "b", ""),
        ("root", "drain", "b", ""),
        ("root", "uncordon", "a", ""),
    ]


async def test_a_name_that_is_given_back_is_not_cordoned_for_its_next_machine(tmp_path: Path) -> None:
    async with open_store("", str(tmp_path)) as store:
        await store.add_token(JoinToken("t", "a", WALL + 60), "root", WALL)
        assert await store.redeem("t", Certificate("a", "5e41", WALL + 1e6, WALL), "a")
        for node in ("a", "here"):
            await store.drain(node, "root", WALL)
            await store.revoke(node, "root", WALL + 1)
        assert list(await store.cordons()) == ["here"], "the machine of the router itself has no certificate"
        assert (await store.entries(3))[-1].detail == "serial 5e41, its cordon"


async def test_cordons_of_the_version_before_are_cordons(tmp_path: Path) -> None:
    file = tmp_path / "appliance.db"
    connection = sqlite3.connect(file, isolation_level=None)
    migrate.migrate(connection, str(file), MIGRATIONS[:1])
    connection.execute("INSERT INTO cordons VALUES ('a', 5.0, 'root')")
    connection.close()
    async with open_store("", str(tmp_path)) as store:
        [kept] = (await store.cordons()).values()
        assert (kept.node, kept.at, kept.by, kept.drained_at) == ("a", 5.0, "root", None)

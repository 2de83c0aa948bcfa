"""A coroutine that is carried on by whoever has news: at once and without its task, and home again for all the rest."""

from __future__ import annotations

import gc
import random
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from appliance.nursery.carried import Carried
from appliance.nursery.sleeper import Cut, Sleeper


class Reason(Cut):
    pass


class Scene:
    """A task that runs `work` carried; what happened in it, and in whose task that was."""

    def __init__(self, nursery: trio.Nursery, work: Callable[[Scene], Awaitable[None]]) -> None:
        self.sleeper = Carried()
        self.seen: list[str] = []
        self.ended: list[object] = []
        self.scope = trio.CancelScope()
        self._work = work
        self._task: trio.lowlevel.Task | None = None
        nursery.start_soon(self._run)

    def see(self, what: str) -> None:
        at_home = trio.lowlevel.current_task() is self._task
        self.seen.append(what if at_home else f"{what} (away)")

    async def _run(self) -> None:
        self._task = trio.lowlevel.current_task()
        with self.scope:
            try:
                await self.sleeper.run(self._coroutine())
            except BaseException as error:
                self.ended.append(error)
                raise
            finally:
                self.ended.append("ended")

    async def _coroutine(self) -> None:
        try:
            await self._work(self)
        except BaseException as error:
            self.see(type(error).__name__)
            raise


settled = trio.testing.wait_all_tasks_blocked


async def pauses(scene: Scene) -> None:
    while True:
        try:
            await scene.sleeper.pause()
        except Reason as reason:
            scene.see(f"cut {reason}")
        else:
            scene.see("on")


async def test_news_carry_a_pausing_coroutine_on_at_once(nursery: trio.Nursery) -> None:
    scene = Scene(nursery, pauses)
    await settled()
    scene.sleeper.carry_on()
    scene.sleeper.carry_on()
    assert scene.seen == ["on (away)", "on (away)"], "before any other task has run"
    nursery.cancel_scope.cancel()


async def test_a_wake_goes_on_at_home_whatever_news_come_before(nursery: trio.Nursery) -> None:
    scene = Scene(nursery, pauses)
    await settled()
    scene.sleeper.wake()
    scene.sleeper.carry_on()
    scene.sleeper.wake()
    assert scene.seen == []
    await settled()
    assert scene.seen == ["on"], "one wake is one turn"
    scene.sleeper.carry_on()
    assert scene.seen == ["on", "on (away)"]
    nursery.cancel_scope.cancel()


async def test_a_cut_reaches_it_at_home_and_before_later_news(nursery: trio.Nursery) -> None:
    scene = Scene(nursery, pauses)
    await settled()
    scene.sleeper.cut(Reason("first"))
    scene.sleeper.carry_on()
    scene.sleeper.cut(Reason("second"))
    await settled()
    assert scene.seen == ["cut first", "cut second"]
    nursery.cancel_scope.cancel()


async def test_a_cut_while_it_is_away_ends_its_next_pause(nursery: trio.Nursery) -> None:
    async def work(scene: Scene) -> None:
        await scene.sleeper.pause()
        scene.sleeper.cut(Reason("late"))
        await pauses(scene)

    scene = Scene(nursery, work)
    await settled()
    scene.sleeper.carry_on()
    assert scene.seen == ["cut late (away)"]
    nursery.cancel_scope.cancel()


async def test_a_wake_of_its_own_while_it_is_away_is_no_event(nursery: trio.Nursery) -> None:
    async def work(scene: Scene) -> None:
        await scene.sleeper.pause()
        scene.sleeper.wake()
        scene.sleeper.carry_on()
        scene.see("first")
        await pauses(scene)

    scene = Scene(nursery, work)
    await settled()
    scene.sleeper.carry_on()
    await settled()
    assert scene.seen == ["first (away)"]
    nursery.cancel_scope.cancel()


async def test_a_sleep_after_a_pause_is_slept_at_home(nursery: trio.Nursery) -> None:
    async def work(scene: Scene) -> None:
        await scene.sleeper.pause()
        for _ in range(3):
            await scene.sleeper.sleep()
            scene.see("slept")
        await pauses(scene)

    scene = Scene(nursery, work)
    await settled()
    scene.sleeper.carry_on()
    assert scene.seen == []
    scene.sleeper.carry_on()  # on its way home: no event
    await settled()
    assert scene.seen == ["slept"], "the way home is a wake for nothing"
    scene.sleeper.carry_on()
    assert scene.seen == ["slept"], "news wake a sleep, they do not carry it on"
    await settled()
    assert scene.seen == ["slept"] * 2
    scene.sleeper.wake()
    await settled()
    scene.sleeper.carry_on()
    assert scene.seen == ["slept"] * 3 + ["on (away)"]
    nursery.cancel_scope.cancel()


async def test_a_cut_ends_the_sleep_to_which_it_comes_home(nursery: trio.Nursery) -> None:
    async def work(scene: Scene) -> None:
        await scene.sleeper.pause()
        scene.sleeper.cut(Reason("waits"))
        await scene.sleeper.sleep()

    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as inner:
            scene = Scene(inner, work)
            await settled()
            scene.sleeper.carry_on()
    assert caught.group_contains(Reason, match="waits")
    assert scene.seen == ["Reason (away)"]


async def test_a_checkpoint_takes_it_home_where_it_may_open_a_nursery(nursery: trio.Nursery) -> None:
    async def work(scene: Scene) -> None:
        await scene.sleeper.pause()
        await trio.lowlevel.checkpoint()
        scene.see("checkpoint")
        async with trio.open_nursery() as own:
            own.start_soon(trio.sleep, 0)
        scene.see("nursery")
        await pauses(scene)

    scene = Scene(nursery, work)
    await settled()
    scene.sleeper.carry_on()
    assert scene.seen == []
    await settled()
    assert scene.seen == ["checkpoint", "nursery"]
    scene.sleeper.carry_on()
    assert scene.seen[2:] == ["on (away)"]
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("carried", [0, 1])
async def test_trio_cancels_a_pause(nursery: trio.Nursery, carried: int) -> None:
    scene = Scene(nursery, pauses)
    await settled()
    for _ in range(carried):
        scene.sleeper.carry_on()
    scene.scope.cancel()
    scene.sleeper.carry_on()
    await settled()
    assert scene.seen == ["on (away)"] * carried + ["Cancelled"]
    assert scene.ended[-1] == "ended"
    scene.sleeper.carry_on()  # late news
    scene.sleeper.wake()


@pytest.mark.parametrize("then", ["pause", "sleep", "end"])
async def test_trio_cancels_it_while_it_is_away(nursery: trio.Nursery, then: str) -> None:
    """What it does at that moment may make Trio cancel it: then its next wait ends."""

    async def work(scene: Scene) -> None:
        await scene.sleeper.pause()
        scene.scope.cancel()
        scene.see("on")
        match then:
            case "pause":
                await scene.sleeper.pause()
            case "sleep":
                while True:
                    await scene.sleeper.sleep()

    scene = Scene(nursery, work)
    await settled()
    scene.sleeper.carry_on()
    scene.sleeper.carry_on()
    await settled()
    assert scene.seen == ["on (away)"] + ["Cancelled"] * (then != "end")
    assert scene.ended[-1] == "ended"


async def test_a_coroutine_that_ends_away_ends_its_task(nursery: trio.Nursery) -> None:
    scene = Scene(nursery, lambda scene: scene.sleeper.pause())
    await settled()
    scene.sleeper.carry_on()
    assert scene.ended == []
    await settled()
    assert scene.ended == ["ended"]


async def test_an_error_away_is_its_tasks_to_raise() -> None:
    async def work(scene: Scene) -> None:
        await scene.sleeper.pause()
        raise ValueError("broken")

    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as inner:
            scene = Scene(inner, work)
            await settled()
            scene.sleeper.carry_on()
    assert caught.group_contains(ValueError, match="broken")
    assert scene.seen == ["ValueError (away)"]


async def test_without_run_it_is_an_ordinary_place_to_sleep(nursery: trio.Nursery) -> None:
    sleeper = Carried()
    woken = []

    async def task() -> None:
        await sleeper.pause()
        woken.append(1)
        await sleeper.sleep()
        woken.append(2)

    nursery.start_soon(task)
    for count in range(3):
        await settled()
        assert len(woken) == count
        sleeper.carry_on()
    await settled()


async def test_an_ordinary_sleeper_pauses_by_sleeping(nursery: trio.Nursery) -> None:
    sleeper = Sleeper()
    woken = []

    async def work() -> None:
        await sleeper.pause()
        woken.append(1)

    async def task() -> None:
        await sleeper.run(work())

    nursery.start_soon(task)
    await settled()
    sleeper.carry_on()
    assert woken == []
    await settled()
    assert woken == [1]


async def test_an_end_leaves_no_cycle_behind(nursery: trio.Nursery) -> None:
    """The collector would have to find it, and each holds a connection's buffers."""

    class Held:
        gone = 0

        def __del__(self) -> None:
            Held.gone += 1

    async def ends(scene: Scene) -> None:
        held = Held()
        await scene.sleeper.pause()
        del held
        kept = Held()  # in the frame to its end
        assert kept

    async def is_cut(scene: Scene) -> None:
        kept = Held()
        try:
            await scene.sleeper.pause()
        except Reason:
            assert kept

    gc.collect()
    gc.disable()
    try:
        one, other = Scene(nursery, ends), Scene(nursery, is_cut)
        await settled()
        one.sleeper.carry_on()
        other.sleeper.cut(Reason())
        await settled()
        assert one.ended == other.ended == ["ended"]
        assert Held.gone == 3
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(60))
async def test_in_whatever_order_things_happen_news_carry_it_on(nursery: trio.Nursery, seed: int) -> None:
    """It finds its way home, and never comes to rest where news do not reach it."""
    rng = random.Random(seed)
    turns = 0

    async def work(scene: Scene) -> None:
        nonlocal turns
        sleeper = scene.sleeper
        while True:
            turns += 1
            step = rng.choice(["pause", "pause", "pause", "sleep", "checkpoint", "nursery", "wake", "cut"])
            try:
                match step:
                    case "pause":
                        await sleeper.pause()
                    case "sleep":
                        await sleeper.sleep()
                    case "wake":
                        sleeper.wake()
                        sleeper.carry_on()
                    case "cut":
                        sleeper.cut(Reason("own"))
                    case _:
                        await trio.lowlevel.checkpoint()
                        scene.see("home")
                        if step == "nursery":
                            async with trio.open_nursery() as own:
                                own.start_soon(trio.lowlevel.checkpoint)
            except Reason:
                continue

    scene = Scene(nursery, work)
    for _ in range(100):
        match rng.choice(["news", "news", "wake", "cut", "round", "round"]):
            case "news":
                scene.sleeper.carry_on()
            case "wake":
                scene.sleeper.wake()
            case "cut":
                scene.sleeper.cut(Reason("late"))
            case "round":
                await trio.lowlevel.checkpoint()
    for _ in range(20):
        await settled()
        before = turns
        scene.sleeper.carry_on()
        await settled()
        assert turns > before
    assert set(scene.seen) == {"home"}
    scene.scope.cancel()
    scene.sleeper.carry_on()
    await settled()
    assert scene.ended[-1] == "ended"

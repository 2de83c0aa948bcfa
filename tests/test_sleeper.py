"""Where a task sleeps: no wake is lost, a cut is told once and to the right sleep, Trio's own cancellation works."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from appliance.nursery.sleeper import SWEEP_S, Cut, DeadlinePassed, Sleeper, breathe, sweep, sweep_once


class Reason(Cut):
    pass


async def asleep(sleeper: Sleeper, nursery: trio.Nursery) -> list[str]:
    """A task that sleeps once; what became of it."""
    became: list[str] = []

    async def task() -> None:
        try:
            await sleeper.sleep()
        except Cut as cut:
            became.append(f"cut {cut}")
        except trio.Cancelled:
            became.append("cancelled")
            raise
        else:
            became.append("woken")

    nursery.start_soon(task)
    await trio.testing.wait_all_tasks_blocked()
    return became


async def test_a_wake_ends_a_sleep(nursery: trio.Nursery) -> None:
    sleeper = Sleeper()
    became = await asleep(sleeper, nursery)
    assert became == []
    sleeper.wake()
    sleeper.wake()
    await trio.testing.wait_all_tasks_blocked()
    assert became == ["woken"]


async def test_a_wake_without_a_sleeper_is_not_remembered(nursery: trio.Nursery) -> None:
    sleeper = Sleeper()
    sleeper.wake()
    assert await asleep(sleeper, nursery) == []
    nursery.cancel_scope.cancel()


async def test_a_cut_ends_the_present_sleep(nursery: trio.Nursery) -> None:
    sleeper = Sleeper()
    became = await asleep(sleeper, nursery)
    sleeper.cut(Reason("first"))
    sleeper.cut(Reason("second"))
    await trio.testing.wait_all_tasks_blocked()
    assert became == ["cut first"]
    with pytest.raises(Reason, match="second"):
        sleeper.check()
    sleeper.check()


async def test_a_cut_ends_the_next_sleep_and_the_first_reason_stands(nursery: trio.Nursery) -> None:
    sleeper = Sleeper()
    sleeper.cut(Reason("first"))
    sleeper.cut(Reason("second"))
    assert await asleep(sleeper, nursery) == ["cut first"]
    sleeper.check()


async def test_a_cut_right_after_a_wake_waits_for_the_next_sleep() -> None:
    """The task has been woken and has not run yet: its wake stands, and the cut is not lost."""
    sleeper = Sleeper()
    became = []

    async def task() -> None:
        await sleeper.sleep()
        became.append("woken")
        with pytest.raises(Reason):
            await sleeper.sleep()
        became.append("cut")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(task)
        await trio.testing.wait_all_tasks_blocked()
        sleeper.wake()
        sleeper.cut(Reason())
    assert became == ["woken", "cut"]


async def test_disarming_forgets_the_deadline_and_a_late_cut(nursery: trio.Nursery) -> None:
    sleeper = Sleeper()
    sleeper.arm(5.0, "head_s")
    sweep_once([sleeper], 6.0)
    sleeper.disarm()
    assert sleeper.due == math.inf
    assert await asleep(sleeper, nursery) == []
    nursery.cancel_scope.cancel()


async def test_trio_cancels_a_sleep_and_later_wakes_are_harmless() -> None:
    sleeper = Sleeper()
    async with trio.open_nursery() as nursery:
        became = await asleep(sleeper, nursery)
        nursery.cancel_scope.cancel()
    assert became == ["cancelled"]
    sleeper.wake()
    sleeper.cut(Reason("late"))
    with pytest.raises(Reason, match="late"):
        sleeper.check()


@pytest.mark.parametrize("first", ["wake", "cancel"])
async def test_a_wake_and_a_cancellation_in_one_tick(first: str) -> None:
    sleeper = Sleeper()
    async with trio.open_nursery() as nursery:
        became = await asleep(sleeper, nursery)
        steps = [sleeper.wake, nursery.cancel_scope.cancel]
        for step in steps if first == "wake" else steps[::-1]:
            step()
    assert became == (["woken"] if first == "wake" else ["cancelled"])


# -- the sweeper -------------------------------------------------------------------------------------------------------


def test_the_sweeper_cuts_what_is_due_and_lets_others_look() -> None:
    due, later, never = Sleeper(), Sleeper(), Sleeper()
    seen: list[float] = []
    due.arm(5.0, "idle_s")
    later.arm(5.1, "idle_s")
    for sleeper in (due, later, never):
        sleeper.on_sweep = seen.append
    sweep_once([due, later, never], 5.0)
    assert seen == [5.0, 5.0]
    with pytest.raises(DeadlinePassed) as caught:
        due.check()
    assert caught.value.name == "idle_s"
    assert due.due == math.inf, "a deadline strikes once"
    later.check()
    never.check()


async def test_the_sweeper_looks_a_few_times_a_second(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    sleepers: set[Sleeper] = set()
    nursery.start_soon(sweep, sleepers, trio.current_time)
    await trio.sleep(10)
    sleeper = Sleeper()
    sleepers.add(sleeper)
    sleeper.arm(trio.current_time() + 3.0, "total_s")
    began = trio.current_time()
    with pytest.raises(DeadlinePassed):
        await sleeper.sleep()
    assert 3.0 <= trio.current_time() - began <= 3.0 + SWEEP_S
    nursery.cancel_scope.cancel()


async def test_a_sleeper_may_leave_while_the_sweeper_looks() -> None:
    """`on_sweep` may end a stream, whose task takes its sleeper out."""
    sleepers = {Sleeper() for _ in range(3)}
    for sleeper in sleepers:
        sleeper.on_sweep = lambda now: sleepers.clear()
    sweep_once(tuple(sleepers), 1.0)


async def test_every_sixteenth_breath_is_a_checkpoint() -> None:
    turns = []
    for turn in range(33):
        with trio.CancelScope() as scope:
            scope.cancel()
            await breathe(turn)
        if scope.cancelled_caught:
            turns.append(turn)
    assert turns == [0, 16, 32]

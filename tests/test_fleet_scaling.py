"""How many replicas the load asks for, and a model that sleeps at zero and is woken."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts.catalog import Scaling
from appliance.facts.demand import NO_DEMAND, Demand
from appliance.rules.fleet.scaling import DOWN_AFTER_S, UNASKED_S, UP_AFTER_S, begin, follow
from tests.fleet_scene import Scene, inventory, model

WIDE = Scaling(1, 4)
SLEEPY = Scaling(0, 2, idle_s=60.0)


class Watch:
    """A model whose demand is looked at each second; by default all that are wanted serve."""

    def __init__(self, scaling: Scaling, running: int) -> None:
        self.scaling, self.now, self.scaler = scaling, 0.0, begin(scaling, running, 0.0)

    def after(self, seconds: float, demand: Demand = NO_DEMAND, serving: int | None = None) -> int:
        """How many are wanted once this has been the demand for so long."""
        for second in range(int(seconds) + 1):
            there = self.scaler.wanted if serving is None else serving
            self.scaler = follow(self.scaler, self.scaling, demand, there, there, self.now + second)
        self.now += int(seconds)
        return self.scaler.wanted


def test_what_runs_at_the_start_stays_within_the_limits() -> None:
    assert [begin(WIDE, running, 0.0).wanted for running in (0, 1, 3, 9)] == [1, 1, 3, 4]
    assert [begin(SLEEPY, running, 0.0).wanted for running in (0, 1)] == [0, 1]


@pytest.mark.parametrize("demand", [Demand(waiting=1), Demand(running=9, slots=10)])
def test_one_more_after_a_while_of_it_and_not_before(demand: Demand) -> None:
    watch = Watch(WIDE, 1)
    assert watch.after(UP_AFTER_S - 1, demand) == 1
    assert watch.after(1, demand) == 2


@pytest.mark.parametrize("demand", [Demand(running=8, slots=10), Demand(running=50, slots=0), NO_DEMAND])
def test_none_more_below_the_line_or_where_the_slots_are_unknown(demand: Demand) -> None:
    assert Watch(WIDE, 1).after(100, demand) == 1


def test_a_break_in_it_starts_the_time_anew() -> None:
    watch = Watch(WIDE, 1)
    watch.after(UP_AFTER_S - 1, Demand(waiting=1))
    watch.after(1)
    assert watch.after(UP_AFTER_S - 1, Demand(waiting=1)) == 1


def test_none_more_while_the_last_one_is_not_there() -> None:
    assert Watch(WIDE, 2).after(100, Demand(waiting=5), serving=1) == 2


def test_never_above_the_most() -> None:
    assert Watch(WIDE, 1).after(100, Demand(waiting=5)) == 4


def test_one_less_after_a_long_while_in_which_the_rest_would_do() -> None:
    quiet = Demand(running=1, slots=16)
    watch = Watch(WIDE, 4)
    assert watch.after(DOWN_AFTER_S - 1, quiet) == 4
    assert watch.after(1, quiet) == 3
    assert watch.after(DOWN_AFTER_S - 1, quiet) == 3
    assert watch.after(10 * DOWN_AFTER_S, quiet) == 1


def test_none_less_when_the_rest_would_be_too_busy() -> None:
    # Three of four would have 12 slots, and 70% of them are 8.4.
    assert Watch(WIDE, 4).after(1000, Demand(running=9, slots=16)) == 4
    assert Watch(WIDE, 4).after(200, Demand(running=8, slots=16)) == 3


def test_unknown_slots_take_one_back_only_when_nothing_runs() -> None:
    assert Watch(WIDE, 2).after(1000, Demand(running=1)) == 2
    assert Watch(WIDE, 2).after(1000) == 1


@given(
    st.integers(0, 3),
    st.integers(0, 4),
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(0, 16), st.integers(0, 4), st.floats(0.1, 300)),
        max_size=40,
    ),
)
def test_never_outside_the_limits_and_one_step_at_a_time(
    least: int, more: int, looks: list[tuple[int, int, int, int, float]]
) -> None:
    scaling = Scaling(least, least + more, idle_s=50.0)
    now, scaler = 0.0, begin(scaling, 0, 0.0)
    for waiting, running, slots, serving, seconds in looks:
        now += seconds
        before, asked = scaler.wanted, now if waiting else -math.inf
        scaler = follow(scaler, scaling, Demand(waiting, running, slots, asked), serving, serving, now)
        assert least <= scaler.wanted <= scaling.most
        assert scaler.wanted - before <= 1
        assert before - scaler.wanted <= 1 or scaler.wanted == 0


def test_new_limits_hold_at_once() -> None:
    assert follow(begin(WIDE, 4, 0.0), Scaling(1, 2), NO_DEMAND, 4, 4, 1.0).wanted == 2
    assert follow(begin(WIDE, 1, 0.0), Scaling(3, 4), NO_DEMAND, 1, 1, 1.0).wanted == 3


# -- zero


def test_it_sleeps_after_its_time_without_a_request() -> None:
    watch = Watch(SLEEPY, 1)
    assert watch.after(100, Demand(running=1)) == 1
    assert watch.after(59) == 1
    assert watch.after(1) == 0


def test_without_an_idle_time_it_stays_awake() -> None:
    assert Watch(Scaling(0, 1), 1).after(5000) == 1


@pytest.mark.parametrize("demand", [Demand(waiting=1), Demand(asked_at=200.5)])
def test_only_a_request_after_it_fell_asleep_wakes_it(demand: Demand) -> None:
    asleep = follow(follow(begin(SLEEPY, 1, 0.0), SLEEPY, NO_DEMAND, 1, 1, 0.0), SLEEPY, NO_DEMAND, 1, 1, 200.0)
    assert asleep.wanted == 0
    assert follow(asleep, SLEEPY, Demand(asked_at=199.0), 0, 0, 201.0).wanted == 0
    assert follow(asleep, SLEEPY, demand, 0, 0, 201.0).wanted == 1


def test_what_was_woken_is_kept_until_it_served_and_was_idle() -> None:
    scaler = follow(begin(SLEEPY, 0, 0.0), SLEEPY, Demand(waiting=1), 0, 0, 1.0)
    # The client has left, and it loads for much longer than the idle time.
    for now in range(2, 500):
        scaler = follow(scaler, SLEEPY, NO_DEMAND, 0, 1, float(now))
    assert scaler.wanted == 1
    for now in range(500, 559):
        scaler = follow(scaler, SLEEPY, NO_DEMAND, 1, 1, float(now))
    assert scaler.wanted == 1
    assert follow(scaler, SLEEPY, NO_DEMAND, 1, 1, 561.0).wanted == 0


def test_what_could_not_be_started_and_nobody_asks_for_is_given_up() -> None:
    scaler = follow(begin(SLEEPY, 0, 0.0), SLEEPY, Demand(waiting=1), 0, 0, 1.0)
    assert follow(scaler, SLEEPY, NO_DEMAND, 0, 0, UNASKED_S).wanted == 1
    assert follow(scaler, SLEEPY, Demand(asked_at=30.0), 0, 0, 1.0 + UNASKED_S).wanted == 1
    assert follow(scaler, SLEEPY, NO_DEMAND, 0, 0, 1.0 + UNASKED_S).wanted == 0


def test_the_whole_way_to_zero_and_back() -> None:
    scene = Scene([inventory("a")], [model(least=0, most=1, idle_s=30.0)])
    scene.connect()
    scene.run(60)
    assert scene.running == []
    assert scene.fleet.waking(scene.now) == {"llama": "it is about to be started"}
    scene.demand["llama"] = Demand(waiting=1, asked_at=scene.now)
    scene.step()
    # The client leaves; loading goes on.
    scene.demand["llama"] = Demand(asked_at=scene.now)
    scene.load_s = 100.0
    scene.run(50)
    assert "loading on a" in scene.fleet.waking(scene.now)["llama"]
    scene.run(55)
    assert len(scene.ready("llama")) == 1
    assert scene.fleet.waking(scene.now) == {}
    scene.run(24)
    assert len(scene.ready("llama")) == 1
    scene.run(10)
    assert scene.running == []


def test_a_sleeper_that_cannot_be_started_makes_nobody_wait() -> None:
    scene = Scene([inventory("a")], [model(least=0, most=1, idle_s=30.0)])
    scene.connect()
    scene.breaks = lambda report: True
    scene.run(30)
    scene.demand["llama"] = Demand(waiting=1, asked_at=scene.now)
    scene.run(13)
    assert scene.fleet.waking(scene.now) == {}
    assert "no such file" in scene.fleet.troubles(scene.now)["llama"]
    assert "no such file" in scene.fleet.explain("llama", scene.now).missing


def test_a_sleeper_without_a_place_makes_nobody_wait_and_starts_when_there_is_one() -> None:
    lazy = model(least=0, most=1, idle_s=30.0)
    scene = Scene([inventory("a", gpus=1), inventory("b", gpus=1)], [model("first"), lazy])
    scene.world.cordon("b")
    scene.connect()
    scene.run(40)
    scene.demand["llama"] = Demand(waiting=1, asked_at=scene.now)
    scene.tick()
    assert scene.fleet.waking(scene.now) == {}
    assert "GPU 0 has first." in scene.fleet.troubles(scene.now)["llama"]
    scene.world.uncordon("b")
    scene.run(20)
    assert len(scene.ready("llama")) == 1


def test_a_wake_waits_for_room_that_another_one_is_leaving() -> None:
    scene = Scene([inventory("a", gpus=1)], [model("first", 0, 1), model(least=0, most=1)])
    scene.connect()
    scene.run(25)
    scene.demand["first"] = Demand(waiting=1, asked_at=scene.now)
    scene.run(20)
    scene.demand.clear()
    scene.busy = True
    scene.fleet.scale("first", 0, scene.now)
    scene.tick()
    scene.demand["llama"] = Demand(waiting=1, asked_at=scene.now)
    scene.run(5)
    assert scene.fleet.waking(scene.now)["llama"] == "it waits for room that another replica is leaving"
    scene.busy = False
    scene.run(20)
    assert len(scene.ready("llama")) == 1


def test_load_brings_more_and_its_end_takes_them_back() -> None:
    scene = Scene([inventory("a")], [model(least=1, most=3)])
    scene.connect()
    scene.run(40)
    scene.demand["llama"] = Demand(waiting=3, running=4, slots=4, asked_at=scene.now)
    scene.run(60)
    assert len(scene.ready("llama")) == 3
    scene.demand["llama"] = Demand(running=1, slots=12, asked_at=scene.now)
    scene.run(170)
    assert len(scene.ready("llama")) == 3
    scene.run(400)
    assert len(scene.ready("llama")) == 1


def test_an_operators_word_holds_until_it_is_taken_back() -> None:
    scene = Scene([inventory("a")], [model(least=1, most=2)])
    scene.connect()
    scene.run(40)
    scene.fleet.scale("llama", 4, scene.now)
    scene.run(400)
    assert len(scene.ready("llama")) == 4
    scene.fleet.scale("llama", 0, scene.now)
    scene.demand["llama"] = Demand(waiting=2, asked_at=scene.now)
    scene.run(100)
    assert scene.running == []
    assert scene.fleet.waking(scene.now) == {}
    assert scene.fleet.troubles(scene.now) == {"llama": "an operator has stopped it"}
    scene.fleet.scale("llama", None, scene.now)
    scene.run(20)
    assert len(scene.ready("llama")) >= 1
    with pytest.raises(KeyError):
        scene.fleet.scale("nothing", 1, scene.now)


def test_a_pass_is_due_when_a_model_may_change_by_mere_time() -> None:
    scene = Scene([inventory("a")], [model(least=1, most=2)])
    scene.connect()
    scene.run(40)
    assert scene.again_at <= scene.now + 1.0
    scene.configure(model(least=1))
    scene.run(10)
    assert scene.again_at > scene.now + 10.0


def test_who_asked_while_the_control_plane_settled_is_heard_when_it_has() -> None:
    scene = Scene([inventory("a")], [model(least=0, most=1)])
    scene.connect("a")
    scene.demand["llama"] = Demand(waiting=1, asked_at=scene.now)
    assert scene.tick(scene.fleet.settings.settle_s - 1) == 0
    assert scene.tick() == 1


def test_an_operator_who_lets_go_leaves_what_runs() -> None:
    scene = Scene([inventory("a")], [model(least=0, most=4)])
    scene.connect("a")
    scene.run(30)
    scene.fleet.scale("llama", 2, scene.now)
    scene.run(30)
    scene.fleet.scale("llama", None, scene.now)
    assert (scene.fleet.wanted("llama"), scene.fleet.because("llama")) == (2, "as many were running")
    scene.run(5)
    assert len(scene.ready("llama")) == 2

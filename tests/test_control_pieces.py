"""The small parts of the control plane by themselves: what was told already, what waits, what is published."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from appliance.control import told
from appliance.control.claims import Claim, judge
from appliance.control.logs import HELD_BYTES, Logs, Reading
from appliance.control.outbox import Outbox
from appliance.control.publish import Published
from appliance.control.told import AGAIN_S, MOST_PEERS, MOST_REASONS, Told
from appliance.facts.endpoint import Endpoint
from appliance.facts.errors import Refusal
from appliance.facts.link import AskLog, Beat, Down, EndLog, Forget, LogLines
from appliance.store.rows import Certificate
from tests.control_scene import WALL, register

Clock = trio.testing.MockClock


# -- what was told -----------------------------------------------------------------------------------------------------


def test_a_trouble_is_told_once_an_hour_until_it_is_over() -> None:
    heard = Told()
    assert heard.worth("a", "no root", 0.0) and not heard.worth("a", "no root", 1.0)
    assert heard.worth("a", "expired", 1.0) and heard.worth("b", "no root", 1.0)
    assert not heard.worth("a", "no root", AGAIN_S - 1) and heard.worth("a", "no root", AGAIN_S)
    assert heard.succeeded("a") and not heard.succeeded("a")
    assert heard.worth("a", "no root", AGAIN_S + 1)


def test_neither_many_peers_nor_many_reasons_fill_the_log_or_the_memory() -> None:
    heard = Told()
    assert sum(heard.worth("a", f"reason {number}", float(number)) for number in range(1000)) == MOST_REASONS
    assert heard.worth("a", "another", AGAIN_S + 1)
    for number in range(2 * MOST_PEERS):
        heard.worth(f"peer {number}", "x", AGAIN_S + 2)
    assert len(heard._peers) == MOST_PEERS


def test_a_peer_that_goes_on_is_not_the_one_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "MOST_PEERS", 2)
    heard = Told()
    heard.worth("a", "x", 0.0)
    heard.worth("b", "x", 0.0)
    heard.worth("a", "x", 1.0)
    heard.worth("c", "x", 1.0)
    assert not heard.worth("a", "x", 2.0) and heard.worth("b", "x", 2.0)


# -- what waits --------------------------------------------------------------------------------------------------------


async def test_an_outbox_gives_in_order_and_says_when_it_is_full(autojump_clock: Clock) -> None:
    box = Outbox(most=2)
    assert box.put(Forget("a")) and box.put(Forget("b")) and not box.put(Forget("c"))
    assert [await box.take(1.0), await box.take(1.0)] == [Forget("a"), Forget("b")]
    before = trio.current_time()
    assert await box.take(5.0) is None and trio.current_time() - before == 5.0
    async with trio.open_nursery() as nursery:
        taken: list[Down | None] = []

        async def wait() -> None:
            taken.append(await box.take(5.0))

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        box.put(Beat(1.0))
    assert taken == [Beat(1.0)] and trio.current_time() - before == 5.0


# -- what is published -------------------------------------------------------------------------------------------------


def test_only_what_the_router_must_know_is_a_change() -> None:
    published, one = Published(), Endpoint("m.a", "10.0.0.1", 20000)
    two = attrs.evolve(one, id="m.b")
    assert not published.say((), {})
    assert published.say((one, two), {}) and not published.say((two, one), {})
    assert published.say((two, one), {"m": "since 1 s"}) and not published.say((two, one), {"m": "since 2 s"})
    assert published.waking == {"m": "since 2 s"}
    assert published.say((one,), {"m": "since 3 s"}) and published.say((one,), {})


# -- who may register --------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["node-a", "node-b"])
SERIALS = st.sampled_from(["1", "2"])
ROWS = st.builds(
    Certificate,
    NAMES,
    SERIALS,
    st.sampled_from([WALL - 1, WALL + 1]),
    st.just(WALL - 10),
    st.sampled_from([None, WALL - 5]),
)


@given(NAMES, SERIALS, NAMES, st.lists(ROWS, max_size=3), st.sets(SERIALS, max_size=1))
def test_nobody_registers_but_under_a_good_certificate_of_that_name(
    name: str, serial: str, claimed: str, rows: list[Certificate], revoked: set[str]
) -> None:
    known = [row for row in rows if row.node == name]
    refused = judge(register(claimed), Claim(name, serial), known, revoked, WALL)
    row = next((each for each in known if each.serial == serial), None)
    allowed = name == claimed and serial not in revoked and row is not None and row.good(WALL)
    assert (refused is None) == allowed
    if refused is not None:
        assert f"certificate says {name}" in refused.message and f"agent claims {claimed}" in refused.message


# -- logs --------------------------------------------------------------------------------------------------------------


class Talker:
    """A connection that keeps what is said."""

    def __init__(self, name: str = "node-a") -> None:
        self.name = name
        self.said: list[Down] = []

    def say(self, message: Down) -> None:
        self.said.append(message)


@given(st.lists(st.lists(st.integers(0, 300_000), max_size=5), max_size=10))
def test_what_waits_for_a_reader_is_bounded_and_the_newest(sizes: list[list[int]]) -> None:
    reading, given_lines, number = Reading(Talker(), "1"), [], 0
    for piece in sizes:
        lines = []
        for size in piece:
            lines.append(f"{number} " + "x" * size)
            number += 1
        given_lines += lines
        reading.add(tuple(lines))
    taken = list(reading.take())
    dropped = int(taken.pop(0)[1:].split()[0]) if taken and taken[0].startswith("[") else 0
    assert given_lines[dropped:] == taken
    assert len(taken) <= 1 or sum(map(len, taken)) <= HELD_BYTES
    assert reading.take() == ()


async def test_lines_come_from_the_connection_that_was_asked_and_no_other(autojump_clock: Clock) -> None:
    logs, asked, other = Logs(), Talker(), Talker()
    log = logs.read(lambda: (asked, "m.abcde/0"), 5, True)
    async with trio.open_nursery() as nursery:
        got: list[tuple[str, ...]] = []

        async def read() -> None:
            got.append(await anext(log))

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        assert asked.said == [AskLog("1", "m.abcde/0", 5, True)]
        logs.arrived(other, LogLines("1", ("forged",)))
        logs.parted(other, "it is gone")
        logs.arrived(asked, LogLines("1", ("true",)))
    assert got == [("true",)]
    await log.aclose()
    assert asked.said[-1] == EndLog("1") and not logs.readings
    logs.arrived(asked, LogLines("1", ("late",)))


async def test_only_so_many_logs_are_read_at_a_time(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.control.logs.MOST_READERS", 1)
    logs, talker = Logs(), Talker()
    first = logs.read(lambda: (talker, "m.abcde/0"), 5, True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(anext, first, None)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Refusal, match="1 logs are being read"):
            await anext(logs.read(lambda: (talker, "m.abcde/0"), 5, True))
        logs.arrived(talker, LogLines("1", ("a",)))
    await first.aclose()
    assert not logs.readings

"""Whether a datagram is believed: every step in its order, what is told of it, and what a flood leaves behind."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts.groups import Claim, Told
from appliance.rules.groups.once import MOST_SOURCES
from appliance.rules.groups.reception import MOST_NODES, Heard, Reception
from appliance.rules.groups.sources import Sources
from appliance.wire import datagram

KEY = b"hunter2"
NOW = 1_787_862_155
OWN = [ipaddress.ip_network("10.0.0.0/24"), ipaddress.ip_network("127.0.0.0/8")]
PAYLOAD: dict[str, Any] = {
    "node_id": "n",
    "boot_id": "b",
    "seq": 1,
    "t": NOW,
    "http": "192.168.7.7:6380",
    "universe": "default",
    "addrs": ["192.168.7.7", "10.0.0.9"],
}


@attrs.define
class Ear:
    """`say` sends one datagram and gives what came of it; `key` is ours."""

    key: bytes = KEY
    universes: tuple[str, ...] = ("default", "appliance")
    allowed: tuple[str, ...] = ("local",)
    reception: Reception = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        key = self.key
        verify: Callable[[Claim], bool] = lambda claim: datagram.verified(claim, key)  # noqa: E731
        self.reception = Reception(self.universes, Sources(self.allowed), key=bool(key), verified=verify)

    def raw(self, data: bytes, source: str = "10.0.0.5", now: float = NOW) -> Heard | Told | None:
        return self.reception.judge(datagram.read(data), source, OWN, now)

    def say(
        self, source: str = "10.0.0.5", now: float = NOW, key: bytes | None = None, form: str = "both", **changed: Any
    ) -> Heard | Told | None:
        key = self.key if key is None else key
        payload = {name: value for name, value in {**PAYLOAD, **changed}.items() if value is not ...}
        if form != "old" and "proto" not in changed:
            payload.setdefault("proto", "0.99")
        if form != "new" and "mentat_announce" not in changed:
            payload.setdefault("mentat_announce", 2 if key else 1)
        if not key:
            return self.raw(datagram.canonical(payload), source, now)
        signed = b'{"p":%b,"sig":"%b"}' % (datagram.canonical(payload), datagram.sign(payload, key).encode())
        return self.raw(signed, source, now)


def event(found: Heard | Told | None) -> str | None:
    return found.event if isinstance(found, Told) else None if found is None else "heard"


@pytest.mark.parametrize("form", ["old", "new", "both"])
def test_either_form_is_heard_when_it_is_signed(form: str) -> None:
    assert Ear().say(form=form) == Heard("n", ("10.0.0.9:6380", "10.0.0.5:6380"))


def test_unsigned_only_the_older_form_counts() -> None:
    assert event(Ear(b"").say(form="old")) == "heard"
    assert event(Ear(b"").say(form="both")) == "heard"
    assert Ear(b"").say(form="new") is None
    assert Ear(b"").say(mentat_announce=2) is None
    assert Ear(b"").say(mentat_announce=True) is None


def test_nothing_unsigned_counts_where_there_is_a_key() -> None:
    ear = Ear()
    told = ear.say(key=b"")
    assert event(told) == "announce_rejected"
    assert ear.say(key=b"") is None
    assert ear.say(key=b"another") is None
    assert event(ear.say()) == "heard"


def test_a_signed_one_cannot_be_told_from_a_forged_one_without_a_key() -> None:
    ear = Ear(b"")
    assert event(ear.say(key=KEY)) == "announce_unverifiable"
    assert ear.say(key=KEY) is None


@pytest.mark.parametrize("key", [KEY, b""])
def test_foreign_universes_are_passed_over_before_anything_else(key: bytes) -> None:
    used = []
    reception = Reception(["blue"], Sources(["local"]), key=True, verified=lambda claim: bool(used.append(claim)))
    for claim in (Claim({"universe": "red"}, "aa", "red"), Claim({}, "aa"), Claim(None)):
        assert reception.judge(claim, "10.0.0.5", OWN, NOW) is None
    assert used == []
    assert Ear(key, universes=("blue",)).say(key=b"wrong", universe="red") is None
    assert event(Ear(key, universes=("blue",)).say(universe="blue")) == "heard"


def test_no_universe_is_the_default_one() -> None:
    assert event(Ear().say(universe=...)) == "heard"
    assert Ear(universes=("appliance",)).say(universe=...) is None
    assert event(Ear().say(universe="appliance")) == "heard"


@pytest.mark.parametrize("proto", ["0.99", "1.0", "0.1", "1.99"])
def test_versions_that_are_understood(proto: str) -> None:
    assert event(Ear().say(form="new", proto=proto)) == "heard"


@pytest.mark.parametrize("proto", ["2.0", "1", "", "x.y", "1.0.0", 1.0, None, "1.²"])
def test_versions_that_are_not(proto: Any) -> None:
    ear = Ear()
    if isinstance(proto, float):
        return  # cannot be signed
    assert event(ear.say(form="new", proto=proto)) == "announce_proto_mismatch"
    assert ear.say(form="new", proto=proto) is None
    assert event(ear.say(form="both", proto=proto)) == "heard"  # the older form is there too


def test_neither_form_is_passed_over() -> None:
    assert Ear().say(form="both", proto=..., mentat_announce=1) is None


@pytest.mark.parametrize("off", [-31, 31, 86400])
def test_a_clock_that_is_off_is_told_once(off: int) -> None:
    ear = Ear()
    told = ear.say(t=NOW + off)
    assert isinstance(told, Told)
    assert (told.event, told.fields["off_s"]) == ("announce_stale", off)
    assert ear.say(t=NOW + off, seq=2) is None
    assert event(ear.say(t=NOW - 30, seq=3)) == "heard"


@pytest.mark.parametrize("t", ["1", None, True, -1, [1]])
def test_a_time_that_is_none(t: Any) -> None:
    assert Ear().say(t=t) is None


@pytest.mark.parametrize("changed", [{"node_id": ""}, {"boot_id": ""}, {"node_id": ...}, {"boot_id": 5}])
def test_whoever_signs_says_who_it_is(changed: dict[str, Any]) -> None:
    assert Ear().say(**changed) is None


def test_the_same_number_is_not_heard_twice() -> None:
    ear = Ear()
    assert event(ear.say(seq=5)) == "heard"
    assert ear.say(seq=5) is None
    assert ear.say(seq=4) is None
    assert event(ear.say(seq=6)) == "heard"
    assert event(ear.say(seq=0, boot_id="c")) == "heard"  # it started again
    assert ear.say(seq=6) is None  # and what it said before is known still
    assert ear.say(seq=0, boot_id="c") is None
    assert event(ear.say(seq=0, node_id="other")) == "heard"
    for seq in (None, "7", True, -1):
        assert ear.say(seq=seq, boot_id="d") is None


def test_a_number_is_used_up_by_a_datagram_that_is_refused_later() -> None:
    ear = Ear()
    assert event(ear.say(seq=5, source="172.16.0.1")) == "announce_source_not_allowed"
    assert ear.say(seq=5) is None


def test_unsigned_has_neither_clock_nor_numbers() -> None:
    ear = Ear(b"")
    for _ in range(2):
        assert event(ear.say(t=0, seq=..., boot_id=...)) == "heard"
    assert ear.say(node_id=...) == Heard("", ("10.0.0.9:6380", "10.0.0.5:6380"))


@pytest.mark.parametrize(
    "http", ["10.0.0.1", "10.0.0.1:", ":6380", "10.0.0.1:0", "10.0.0.1:65536", "x:-1", 6380, None, ...]
)
def test_no_port_to_ask_at(http: Any) -> None:
    assert Ear().say(http=http) is None


def test_only_the_port_of_http_counts() -> None:
    assert Ear().say(http="[fe80::1]:99", addrs=[]) == Heard("n", ("10.0.0.5:99",))


def test_where_to_ask() -> None:
    def addresses(addrs: Any, source: str = "10.0.0.5", allowed: tuple[str, ...] = ("local",)) -> tuple[str, ...]:
        found = Ear(allowed=allowed).say(addrs=addrs, source=source)
        assert isinstance(found, Heard)
        return found.addresses

    assert addresses(...) == addresses([]) == addresses("10.0.0.9") == addresses([5, None]) == ("10.0.0.5:6380",)
    assert addresses(["10.0.0.9", "10.0.0.8", "10.0.0.5"]) == ("10.0.0.9:6380", "10.0.0.8:6380", "10.0.0.5:6380")
    assert addresses(["127.0.0.1"]) == ("10.0.0.5:6380",)  # its loopback is not ours
    assert addresses(["127.0.0.1"], "127.0.0.1") == ("127.0.0.1:6380",)
    assert addresses(["10.0.0.9"], allowed=("10.0.0.5",)) == ("10.0.0.5:6380",)  # not allowed
    assert addresses(["192.168.7.7"], allowed=("local", "192.168.")) == ("10.0.0.5:6380",)  # on no network of ours


def test_sources() -> None:
    def allowed(address: str, *patterns: str) -> bool:
        return Sources(patterns).allow(address, OWN)

    assert allowed("10.0.0.200", "local")
    assert not allowed("10.0.1.200", "local")
    assert allowed("::ffff:10.0.0.1", "local")
    assert allowed("172.17.3.4", "172.16.0.0/12")
    assert not allowed("172.32.0.1", "172.16.0.0/12")
    assert allowed("172.32.0.1", "172.")
    assert allowed("::1", "::1")
    assert not allowed("::11", "::1")
    assert allowed("192.168.1.77", "local", "10.9.0.0/16", "192.168.1.")
    assert not allowed("192.168.11.7", "192.168.1.")
    assert not allowed("box", "local", "0.0.0.0/0")
    assert allowed("::5", "::/0")


def test_faults_of_one_source_do_not_hide_each_other() -> None:
    ear = Ear()
    assert event(ear.say(key=b"x")) == "announce_rejected"
    assert event(ear.say(t=0)) == "announce_stale"
    assert event(ear.say(source="10.0.0.6", key=b"x")) == "announce_rejected"
    assert event(ear.reception.too_large("10.0.0.5")) == "announce_oversize"
    assert ear.reception.too_large("10.0.0.5") is None


def test_a_flood_from_everywhere_fills_neither_log_nor_memory() -> None:
    ear = Ear()
    lines = [ear.raw(b"garbage", f"10.0.{i // 250}.{i % 250}") for i in range(2000)]
    told = [line for line in lines if line is not None]
    assert len(told) == MOST_SOURCES
    assert isinstance(told[-1], Told) and "more" in told[-1].fields and "more" not in told[0].fields  # type: ignore[union-attr]
    assert ear.reception.remembered <= MOST_SOURCES
    foreign = [ear.say(universe="red", key=b"theirs") for _ in range(2000)]
    assert set(foreign) == {None}
    assert ear.reception.remembered <= MOST_SOURCES


def test_many_senders_do_not_fill_memory() -> None:
    ear = Ear()
    for i in range(MOST_NODES + 100):
        ear.reception._replayed(f"n{i}", "b", 1)
    for i in range(100):
        ear.reception._replayed("n", f"b{i}", 1)
    assert ear.reception.remembered == MOST_NODES


@given(st.lists(st.tuples(st.sampled_from("xy"), st.sampled_from("ab"), st.integers(0, 6)), max_size=30))
def test_nothing_is_heard_twice(said: list[tuple[str, str, int]]) -> None:
    ear = Ear()
    heard = [one for one in said if isinstance(ear.say(node_id=one[0], boot_id=one[1], seq=one[2]), Heard)]
    assert len(heard) == len(set(heard))
    for node, boot in {one[:2] for one in heard}:
        seqs = [one[2] for one in heard if one[:2] == (node, boot)]
        assert seqs == sorted(seqs)


@given(
    st.binary(max_size=200)
    | st.dictionaries(st.sampled_from(list(PAYLOAD)), st.none() | st.integers() | st.text()).map(
        lambda changed: json.dumps({**PAYLOAD, "mentat_announce": 1, **changed}).encode()
    )
)
def test_no_datagram_makes_it_fail(data: bytes) -> None:
    for key in (KEY, b""):
        found = Ear(key).raw(data)
        assert found is None or isinstance(found, Heard | Told)

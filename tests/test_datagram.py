"""Announcements as bytes: the pinned signatures, what is read, and what cannot be signed."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts.groups import Claim
from appliance.wire.datagram import MOST_BYTES, NotCanonical, build, canonical, read, secret, sign, verified

LINE = (
    '{"addr_tags":{"10.0.0.1":["connectx","rdma"]},"addrs":["10.0.0.1","192.168.1.11"],"boot_id":"6d6474919bbe7beb",'
    '"control":"10.0.0.1:6379","http":"10.0.0.1:6380",'
    '"node_id":"6d656e7461743a31302e302e302e3100000000000000000000000000","proto":"0.99","seq":41,"t":1787862155,'
    '"universe":"default"}'
)
PAYLOAD: dict[str, Any] = json.loads(LINE)
SIGNED = "2a008f57eb5df50ca1e87d05819a93ef18d33e3666b64a296505593fc9d66c85"
OLDER = {name: value for name, value in PAYLOAD.items() if name not in ("addr_tags", "proto")} | {"mentat_announce": 2}
OLDER_SIGNED = "94ebaba55dca899fc32990554ee7e760354b9356d3820f78a6e181be8e2ca23d"
OTHERS = {"b": [2, {"d": 4, "c": 3}], "a": 1, "universe": "kü"}
OTHERS_SIGNED = "ec381f4b20bc7eb6b1f18c7f15b06a5c7c60aca04b4ffcba2c1910ac6262ed39"


def envelope(payload: object, sig: object, **more: object) -> bytes:
    return json.dumps({"p": payload, "sig": sig, **more}).encode()


@pytest.mark.parametrize(
    ("payload", "key", "signature"),
    [(PAYLOAD, b"hunter2", SIGNED), (OLDER, b"hunter2", OLDER_SIGNED), (OTHERS, b"k", OTHERS_SIGNED)],
)
def test_the_pinned_signatures(payload: dict[str, Any], key: bytes, signature: str) -> None:
    assert sign(payload, key) == signature
    for shown in (signature, signature.upper()):
        assert verified(read(envelope(payload, shown, extra=1)), key)
    assert not verified(read(envelope(payload, signature)), key + b"x")
    assert not verified(read(envelope({**payload, "seq": 42}, signature)), key)


def test_the_pinned_bytes() -> None:
    assert canonical(PAYLOAD) == LINE.encode()
    whole = b'{"p":%b,"sig":"%b"}' % (LINE.encode(), SIGNED.encode())
    assert len(whole) == 368
    assert verified(read(whole), b"hunter2")


def test_what_is_signed_is_the_payload_written_anew_and_not_the_bytes_that_came() -> None:
    loose = json.dumps({"sig": SIGNED, "p": dict(reversed(PAYLOAD.items()))}, indent=3).encode()
    assert verified(read(loose), b"hunter2")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"\xff\xfe",
        b"[]",
        b"1",
        b'{"p":1,"sig":"aa"}',
        b'{"universe":"\\ud800"}',
        b'{"t":NaN}',
        b'{"t":Infinity}',
        b"[" * 5000,
        b'{"universe":"default"',
    ],
)
def test_garbage_is_a_claim_of_nothing(data: bytes) -> None:
    assert read(data) == Claim(None)
    assert not verified(read(data), b"k")


@pytest.mark.parametrize("sig", [None, 5, "", "zz", "é" * 64, ["a"], SIGNED[:-1], SIGNED + "0"])
def test_a_signature_of_a_wrong_shape_is_a_wrong_one(sig: object) -> None:
    claim = read(envelope(PAYLOAD, sig))
    assert claim.signature is not None
    assert not verified(claim, b"hunter2")


def test_an_envelope_without_a_signature_is_no_unsigned_announcement() -> None:
    assert read(b'{"p":{"mentat_announce":1}}').signature == ""


@pytest.mark.parametrize("value", [1.0, float("nan"), 2**64, -(2**63) - 1, "\ud800", {1: 2}, b"x"])
def test_what_parsers_write_differently_cannot_be_signed(value: object) -> None:
    with pytest.raises(NotCanonical):
        sign({"a": [value]}, b"k")


def test_a_float_on_the_way_is_never_verified() -> None:
    forged = json.dumps({"a": 1.0}, separators=(",", ":")).encode()
    sig = hmac.new(b"k", forged, hashlib.sha256).hexdigest()
    assert not verified(read(envelope({"a": 1.0}, sig)), b"k")


def test_blanks_around_a_key_are_not_part_of_it() -> None:
    assert secret(b" \t\r\n\fhunter 2\n") == b"hunter 2"
    assert secret(b"\x0bk") == b"\x0bk"


def test_what_is_built_holds_both_forms() -> None:
    unsigned = read(build({"universe": "appliance"}))
    assert unsigned == Claim({"universe": "appliance", "proto": "0.99", "mentat_announce": 1}, None, "appliance")
    signed = read(build({"universe": "appliance"}, b"k"))
    assert signed.payload == {"universe": "appliance", "proto": "0.99", "mentat_announce": 2}
    assert verified(signed, b"k")
    assert not verified(signed, b"K")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4).filter(str.isprintable), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=6), JSON, max_size=5))
def test_what_is_built_is_read_again(payload: dict[str, Any]) -> None:
    payload.pop("p", None)
    datagram = build(payload, b"key")
    assert verified(read(datagram), b"key")
    assert not verified(read(datagram), b"kez")
    claim = read(build(payload))
    assert claim.payload == payload | {"proto": "0.99", "mentat_announce": 1}


@given(st.binary(max_size=MOST_BYTES))
def test_no_bytes_make_it_fail(data: bytes) -> None:
    assert not verified(read(data), b"k")

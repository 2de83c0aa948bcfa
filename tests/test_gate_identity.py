"""Who asks: the band that is believed, whose turn it takes, and how long its answer may be."""

from __future__ import annotations

import msgspec
import pytest

from appliance.facts.bands import AdmissionSettings, Band
from appliance.facts.call import Ask
from appliance.facts.errors import Refusal
from appliance.gateway.identity import answer_bound, answer_count, band_of, caller_of, prompt_bytes, session_of

SETTINGS = AdmissionSettings()
PEER = "10.0.0.7:40000"


def ask(**fields: object) -> Ask:
    return msgspec.json.decode(msgspec.json.encode({"model": "m", **fields}), type=Ask)


@pytest.mark.parametrize(
    ("headers", "fields", "tenant", "session"),
    [
        ({}, {}, "10.0.0.7", b""),
        ({}, {"user": "ann"}, "ann", b'"ann"'),
        ({}, {"session_id": "s", "user": "ann"}, "s", b'"s"'),
        ({b"x-session-id": b"h"}, {"session_id": "s", "user": "ann"}, "h", b"h"),
        ({b"x-session-id": b""}, {"user": "ann"}, "ann", b'"ann"'),
        ({}, {"user": ""}, "10.0.0.7", b""),
        ({}, {"user": 7}, "10.0.0.7", b""),
        ({}, {"user": None, "session_id": ["s"]}, "10.0.0.7", b""),
        ({b"x-session-id": b"\xff\xfe"}, {}, "\ufffd\ufffd", b"\xff\xfe"),
    ],
)
def test_the_tenant_is_the_session_or_the_address(
    headers: dict[bytes, bytes], fields: dict[str, object], tenant: str, session: bytes
) -> None:
    caller = caller_of(headers, ask(**fields), PEER, SETTINGS)
    assert (caller.tenant, caller.session, caller.band, caller.key_id) == (tenant, session, "silver", "")
    assert session_of(headers, ask(**fields)) == session


def test_addresses_of_one_client_are_one_tenant() -> None:
    tenants = {caller_of({}, ask(), peer, SETTINGS).tenant for peer in ("[2001:db8::1]:9", "[2001:db8::1]:10")}
    assert tenants == {"[2001:db8::1]"}


def test_a_long_session_is_cut_and_stays_the_same_tenant() -> None:
    tenant = caller_of({b"x-session-id": b"s" * 5000}, ask(), PEER, SETTINGS).tenant
    assert tenant == "s" * 200


@pytest.mark.parametrize("band", ["platinum", "gold", "silver", "bronze"])
def test_a_known_band_is_believed(band: str) -> None:
    assert band_of({b"x-appliance-band": band.encode()}, SETTINGS) == band


@pytest.mark.parametrize("band", [b"", b"Gold", b"gold ", b"iron", b"\xff", b"x" * 1000])
def test_an_unknown_band_is_named_with_those_there_are(band: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        band_of({b"x-appliance-band": band}, SETTINGS)
    assert (refused.value.status, refused.value.code, refused.value.should_retry) == (400, "unknown_band", False)
    assert "platinum, gold, silver, bronze" in refused.value.message
    assert len(refused.value.message) < 200


def test_without_a_word_the_default_band_holds() -> None:
    settings = AdmissionSettings(default_band="only", bands=(Band("only", 1.0, 1, 1.0),))
    assert band_of({}, settings) == "only"


@pytest.mark.parametrize(
    ("fields", "bound", "count"),
    [
        ({}, None, 1),
        ({"max_tokens": 5}, 5, 1),
        ({"max_tokens": 5, "max_completion_tokens": 7, "n": 3}, 7, 3),
        ({"max_tokens": -1, "n": 0}, None, 1),
        ({"max_tokens": "9", "n": "2"}, None, 1),
        ({"max_tokens": 1e30, "n": 10**9}, None, 1),
    ],
)
def test_bounds_that_make_no_sense_are_none(fields: dict[str, object], bound: int | None, count: int) -> None:
    assert (answer_bound(ask(**fields)), answer_count(ask(**fields))) == (bound, count)


@pytest.mark.parametrize(
    ("fields", "size"),
    [({}, 0), ({"prompt": "abc"}, 5), ({"input": ["a", "b"]}, 9), ({"messages": [], "prompt": "a"}, 2)],
)
def test_the_length_of_a_prompt_is_that_of_its_json(fields: dict[str, object], size: int) -> None:
    assert prompt_bytes(ask(**fields)) == size

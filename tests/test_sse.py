"""Server-sent events: wherever the bytes are cut, the same events come out, and all bytes with them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.wire.sse import KEPT_EDGE_BYTES, PING, EventCutter, data_of, is_comment, type_of

EVENTS = (
    b'data: {"a": "\xc3\xa9\xf0\x9f\x98\x80"}\n\n',
    b"event: message_stop\ndata: {}\n\n",
    b": ping\n\n",
    b"data: one\r\ndata: two\r\n\r\n",
    b"data: one\rdata: two\r\r",
    b"id: 5\ndata:\n\n",
    b"data: mixed\n\r\n",
    b"data: mixed\r\n\n",
    b"retry: 1000\n\n",
    b"data: [DONE]\n\n",
)


def cut(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    cutter = EventCutter()
    events = [event for piece in pieces for event in cutter.feed(piece)]
    return events, cutter.finish()


def data(events: list[bytes]) -> list[bytes]:
    """What a client reads of them; a lone line end that a cut has pushed into the next event is none."""
    return [data_of(event) for event in events if event.strip(b"\r\n")]


@pytest.mark.parametrize("event", EVENTS, ids=repr)
def test_an_event_is_cut_at_every_place(event: bytes) -> None:
    raw = event + EVENTS[0]
    whole = data(cut([raw])[0])
    for first in range(1, len(raw)):
        for second in range(first, len(raw)):
            events, rest = cut([raw[:first], raw[first:second], raw[second:]])
            assert b"".join(events) + rest == raw
            assert data(events) == whole
            assert not rest.strip(b"\r\n")


@given(st.lists(st.sampled_from(EVENTS), max_size=6), st.lists(st.integers(0, 1000), max_size=6))
@settings(max_examples=300, deadline=None)
def test_streams_are_cut_anywhere(events: list[bytes], places: list[int]) -> None:
    raw = b"".join(events)
    at = sorted({place % (len(raw) + 1) for place in places} | {0, len(raw)})
    found, rest = cut([raw[start:stop] for start, stop in pairwise(at)])
    assert b"".join(found) + rest == raw
    assert data(found) == [data_of(event) for event in events]
    bytewise, rest = cut([raw[place : place + 1] for place in range(len(raw))])
    assert b"".join(bytewise) + rest == raw
    assert data(bytewise) == [data_of(event) for event in events]


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"data: x", b": c"]), max_size=12))
@settings(max_examples=500, deadline=None)
def test_every_event_ends_with_an_empty_line(parts: list[bytes]) -> None:
    raw = b"".join(parts)
    events, rest = cut([raw])
    assert b"".join(events) + rest == raw
    for event in events:
        assert re.search(rb"(\r\n|\n|\r)(\r\n|\n|\r)\Z", event)
    assert not re.search(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)", rest)


def test_whether_something_may_be_put_in() -> None:
    cutter = EventCutter()
    assert not cutter.pending
    for piece, pending in (
        (b"data: a", True), (b"\n", True), (b"\n", False), (b"data: b\r\n\r", False), (b"\n", False), (b":", True),
        (b" c\n\n", False),
    ):  # fmt: skip
        cutter.feed(piece)
        assert cutter.pending is pending, piece
    cutter.feed(PING)
    assert not cutter.pending


def test_a_huge_event_keeps_its_edges() -> None:
    cutter = EventCutter()
    cutter.feed(b"event: image\ndata: start")
    for _ in range(64):
        assert cutter.feed(b"x" * 65536) == []
        assert len(cutter._held) <= 4 * KEPT_EDGE_BYTES + 65536
    (event,) = cutter.feed(b'"usage": 1}\n\n')
    assert type_of(event) == b"image"
    assert event.endswith(b'"usage": 1}\n\n')
    assert cutter.feed(EVENTS[0]) == [EVENTS[0]]


@pytest.mark.parametrize(
    ("event", "wanted"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data:  x\n\n", b" x"),
        (b"data: x", b"x"),
        (b"data: x\n", b"x"),
        (b"data: x\r\n\r\n", b"x"),
        (b"data: x\r\r", b"x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\rdata: b\n\n", b"a\nb"),
        (b"data: a\r\ndata: b\r\n\r\n", b"a\nb"),
        (b"data: a\n: c\ndata\ndata: b\n\n", b"a\nb"),
        (b"event: data: x\n\n", b""),
        (b"dataset: x\n\n", b""),
        (b": data: x\n\n", b""),
        (b"\n\n", b""),
    ],
)
def test_the_data_of_an_event(event: bytes, wanted: bytes) -> None:
    assert data_of(event) == wanted


@pytest.mark.parametrize(
    ("event", "kind", "comment"),
    [
        (b"event: a\ndata: b\n\n", b"a", False),
        (b"data: b\r\nevent:a\r\n\r\n", b"a", False),
        (b"event: a\nevent: b\n\n", b"b", False),
        (b"data: event: a\n\n", b"", False),
        (b": event: a\n\n", b"", True),
        (b":\r\r", b"", True),
        (b"\n: a\n: b\n\n", b"", True),
        (b": a\nid: 1\n\n", b"", False),
    ],
)
def test_the_type_of_an_event(event: bytes, kind: bytes, comment: bool) -> None:
    assert type_of(event) == kind
    assert is_comment(event) is comment

"""The chunked framing: cut anywhere, it gives the same payload; what is none is refused at its first wrong byte."""

from __future__ import annotations

import itertools

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appliance.wire.framing import LAST_CHUNK, MAX_SIZE_LINE_BYTES, MAX_TRAILER_BYTES, BadFraming, Chunked, chunk
from tests.smuggling import CHUNKS, Shape

TAIL = b"GET /next HTTP/1.1\r\n\r\n"
EXTENSIONS = (b"", b";a", b";a=b", b' ; a="q;x"', b"\t;\xff")
TRAILERS = (b"", b"a: b\r\n", b"Content-Length: 5\r\nx:\r\n", b"a:\t\xe9 \r\n")


@st.composite
def bodies(draw: st.DrawFn, *, plain: bool = False) -> tuple[bytes, bytes]:
    """A chunked body and its payload."""
    pieces = draw(st.lists(st.one_of(st.binary(min_size=1, max_size=40), st.just(b"\r\n0\r\n\r\n")), max_size=5))
    extension = st.just(b"") if plain else st.sampled_from(EXTENSIONS)
    zeros, size = st.sampled_from((b"", b"0", b"000")), st.sampled_from((b"%x", b"%X"))
    raw = b"".join(
        draw(zeros) + draw(size) % len(piece) + draw(extension) + b"\r\n" + piece + b"\r\n" for piece in pieces
    )
    trailers = b"" if plain else draw(st.sampled_from(TRAILERS))
    return raw + draw(zeros) + b"0" + draw(extension) + b"\r\n" + trailers + b"\r\n", b"".join(pieces)


def cut(raw: bytes, at: list[int]) -> list[bytes]:
    places = [0, *sorted({place % (len(raw) + 1) for place in at}), len(raw)]
    return [raw[start:stop] for start, stop in itertools.pairwise(places) if start < stop]


def read(pieces: list[bytes], *, plain: bool = False) -> tuple[bytes, bytes]:
    """The payload of a body and what came after it."""
    cutter = Chunked(plain=plain)
    payload = b""
    rest = b""
    for piece in pieces:
        if cutter.done:
            rest += piece
        else:
            payload += b"".join(cutter.feed(piece))
            rest = cutter.rest
    assert cutter.done
    return payload, rest


@given(bodies(), st.lists(st.integers(0, 10_000), max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_body_is_read_however_it_is_cut(body: tuple[bytes, bytes], at: list[int]) -> None:
    raw, payload = body
    assert read(cut(raw + TAIL, at)) == (payload, TAIL)
    assert read([raw[place : place + 1] for place in range(len(raw))]) == (payload, b"")


def test_a_body_is_read_at_every_cut() -> None:
    raw = b"5;a\r\nhello\r\nA\r\n\r\n0\r\n\r\n123\r\n00\r\na: b\r\nc: d\r\n\r\n" + TAIL
    for first in range(1, len(raw)):
        for second in range(first, len(raw)):
            assert read([raw[:first], raw[first:second], raw[second:]]) == (b"hello\r\n0\r\n\r\n123", TAIL)


@given(bodies(plain=True), st.lists(st.integers(0, 10_000), max_size=8))
@settings(max_examples=200, deadline=None)
def test_what_is_passed_on_in_its_own_framing_is_whole(body: tuple[bytes, bytes], at: list[int]) -> None:
    """What the stream does with a plain body: everything but the held bytes goes on at once, and may be followed by
    a chunk of ours exactly where `between` says so."""
    raw, payload = body
    cutter = Chunked(plain=True)
    passed = b""
    waiting = b""
    for piece in cut(raw, at):
        cutter.feed(piece)
        data = waiting + piece
        waiting = cutter.held
        passed += data[: len(data) - len(waiting)]
        if cutter.between:
            assert read([passed + LAST_CHUNK], plain=True)[0] == payload[: len(read([passed + LAST_CHUNK])[0])]
    assert cutter.done
    assert passed == raw
    assert cutter.last + cutter.rest == raw[raw.rindex(cutter.last) :]
    assert read([passed]) == (payload, b"")


@pytest.mark.parametrize(
    "raw", [b"5;a\r\nhello\r\n" + LAST_CHUNK, b"5 ;\r\nhello\r\n", b"0;a\r\n\r\n", b"0\r\na: b\r\n\r\n"]
)
def test_extensions_and_trailers_are_not_passed_on(raw: bytes) -> None:
    with pytest.raises(BadFraming):
        Chunked(plain=True).feed(raw)
    Chunked().feed(raw)


@pytest.mark.parametrize("shape", CHUNKS, ids=lambda shape: shape.name)
def test_no_smuggling_shape_passes(shape: Shape) -> None:
    body = shape.raw.partition(b"\r\n\r\n")[2]
    if shape.status == 413:  # in order, but for its size
        assert b"".join(Chunked().feed(body)) == b"a" * 4096
        return
    with pytest.raises(BadFraming):
        Chunked().feed(body)
    bytewise = Chunked()
    with pytest.raises(BadFraming):
        for place in range(len(body)):
            bytewise.feed(body[place : place + 1])


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b"", b"x"), (b"5", b"\n"), (b"5", b"g"), (b"5\r", b"h"), (b"5\r\nhello", b"\n"), (b"5\r\nhello\r", b"0"),
        (b"5;a", b"\n"), (b"5;", b"\x00"), (b"5 ", b"5"), (b"1" * 15, b"1"), (b"5;" + b"a" * 253, b"a"),
        (b"0\r\na: b", b"\n"),
    ],
)  # fmt: skip
def test_the_first_wrong_byte_is_refused(good: bytes, bad: bytes) -> None:
    """Not the last possible one: a peer that waits for our answer meanwhile would wait for ever."""
    Chunked().feed(good)
    with pytest.raises(BadFraming):
        Chunked().feed(good + bad)


def test_the_longest_lines() -> None:
    line = b"5;" + b"a" * (MAX_SIZE_LINE_BYTES - 4) + b"\r\n"
    assert Chunked().feed(line + b"hello") == [b"hello"]
    with pytest.raises(BadFraming):
        Chunked().feed(b"5;a" + line[2:] + b"hello")
    for length, verdict in ((MAX_TRAILER_BYTES, (b"", TAIL)), (MAX_TRAILER_BYTES + 1, None)):
        trailers = b"x: " + b"a" * (length - 7) + b"\r\n\r\n"
        raw = b"0\r\n" + trailers + TAIL
        assert len(trailers) == length
        assert verdict_of([raw]) == verdict
        assert verdict_of([raw[place : place + 1] for place in range(len(raw))]) == verdict


def test_what_is_still_to_come_of_a_chunk() -> None:
    cutter = Chunked()
    for data, left in (
        (b"", 0),
        (b"a", 0),
        (b"\r\n", 10),
        (b"abc", 7),
        (b"defghij", 0),
        (b"\r\n0", 0),
        (b"\r\n\r\n", 0),
    ):
        cutter.feed(data)
        assert cutter.left == left


@given(st.binary(min_size=1, max_size=300))
def test_chunk_makes_what_is_read(data: bytes) -> None:
    assert read([chunk(data) + LAST_CHUNK]) == (data, b"")


@given(
    st.lists(
        st.sampled_from([b"5", b"0", b"A", b"\r", b"\n", b"\r\n", b";", b" ", b"hello", b"x: y", b"\x00"]), max_size=14
    )
)
@example([b"5", b"\r\n", b"hello", b"\r\n", b"0", b"\r\n", b"\r\n"])
@settings(max_examples=600, deadline=None)
def test_h11_reads_the_same(parts: list[bytes]) -> None:
    """Whatever is accepted here is the same body to h11; cut byte by byte, the verdict is the same as whole."""
    raw = b"".join(parts)
    whole = verdict_of([raw] if raw else [])
    assert verdict_of([raw[place : place + 1] for place in range(len(raw))]) == whole
    if whole is None:
        return
    http = h11.Connection(h11.SERVER)
    http.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + raw)
    assert isinstance(http.next_event(), h11.Request)
    payload = b""
    while not isinstance(event := http.next_event(), h11.EndOfMessage):
        assert isinstance(event, h11.Data), event
        payload += bytes(event.data)
    assert (payload, bytes(http.trailing_data[0])) == whole


def verdict_of(pieces: list[bytes]) -> tuple[bytes, bytes] | None:
    try:
        cutter = Chunked()
        payload = rest = b""
        for piece in pieces:
            if cutter.done:
                rest += piece
            else:
                payload += b"".join(cutter.feed(piece))
                rest = cutter.rest
    except BadFraming:
        return None
    return (payload, rest) if cutter.done else None

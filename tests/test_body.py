"""Bodies: what of them is read, what is refused, and that expanding one stays within its bound."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Iterator

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.door import body as bodies
from appliance.door.body import MOST_MEMBERS, PIECE_BYTES, codings, expanding, read_json, read_multipart
from appliance.door.buffers import Buffers, Gathered
from appliance.facts.errors import Refusal

MB = 1 << 20


def raw_deflate(data: bytes) -> bytes:
    return zlib.compress(data, wbits=-15)


PACKERS = {
    b"gzip": gzip.compress,
    b"x-gzip": gzip.compress,
    b"deflate": zlib.compress,
    b"zstd": zstandard.ZstdCompressor().compress,
}


def expanded(body: bytes, encoding: bytes, limit_bytes: int = MB) -> bytes:
    for coding in codings(encoding):
        body = b"".join(expanding(body, coding, limit_bytes))
    return body


def refusal(body: bytes, encoding: bytes, limit_bytes: int = MB) -> tuple[int, str]:
    with pytest.raises(Refusal) as caught:
        expanded(body, encoding, limit_bytes)
    return caught.value.status, caught.value.code


# -- Content-Encoding --------------------------------------------------------------------------------------------------


@given(st.binary(max_size=5000), st.sampled_from(sorted(PACKERS)))
@settings(max_examples=100, deadline=None)
def test_a_body_comes_back_as_it_was(data: bytes, coding: bytes) -> None:
    assert expanded(PACKERS[coding](data), coding) == data


@pytest.mark.parametrize("coding", PACKERS)
def test_a_large_body_comes_back(coding: bytes) -> None:
    data = b"".join(b"%d " % (number * 7919 % 100_003) for number in range(500_000))
    assert expanded(PACKERS[coding](data), coding, len(data)) == data
    assert refusal(PACKERS[coding](data), coding, len(data) - 1) == (413, "body_too_large")


def test_the_raw_form_of_deflate() -> None:
    assert expanded(raw_deflate(b"hello"), b"deflate") == b"hello"


@pytest.mark.parametrize(
    ("encoding", "names"),
    [
        (b"", []),
        (b"identity", []),
        (b" GZip ", [b"gzip"]),
        (b"gzip, identity,", [b"gzip"]),
        (b"zstd,gzip", [b"gzip", b"zstd"]),
    ],
)
def test_codings_from_the_outside_in(encoding: bytes, names: list[bytes]) -> None:
    assert codings(encoding) == names


def test_two_codings() -> None:
    assert expanded(gzip.compress(PACKERS[b"zstd"](b"hello")), b"zstd, gzip") == b"hello"


@pytest.mark.parametrize(
    "encoding", [b"br", b"compress", b"gzip, br", b"gzip gzip", b"\xff", b"gzip," * 3, b"zstd," * 9999]
)
def test_codings_that_are_not_understood(encoding: bytes) -> None:
    """A long list of known ones too: each may expand to the whole limit."""
    with pytest.raises(Refusal) as caught:
        codings(encoding)
    assert (caught.value.status, caught.value.should_retry) == (415, False)
    assert dict(caught.value.headers) == {"Accept-Encoding": "gzip, zstd, deflate"}
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("coding", PACKERS)
def test_a_body_that_is_cut_off(coding: bytes) -> None:
    """At every place: a part of a body must never pass for the whole."""
    packed = PACKERS[coding](b'{"model": "llama"}' + b" " * 300_000)
    for cut in range(1, len(packed)):
        assert refusal(packed[:cut], coding) == (400, "invalid_encoding"), cut


@pytest.mark.parametrize("coding", PACKERS)
def test_a_body_that_is_something_else(coding: bytes) -> None:
    packed = PACKERS[coding](b"hello")
    for wrong in (b"hello", b"\x00" * 40, packed + b"x", b"x" + packed, packed[:-1] + b"\xff"):
        if coding == b"zstd" and wrong == packed[:-1] + b"\xff":
            continue  # its checksum is optional, and this writer leaves it out
        assert refusal(wrong, coding) == (400, "invalid_encoding"), wrong


@pytest.mark.parametrize("coding", [b"gzip", b"zstd"])
def test_joined_files(coding: bytes) -> None:
    pack = PACKERS[coding]
    assert expanded(pack(b"a") + pack(b"") + pack(b"b"), coding) == b"ab"
    assert expanded(pack(b"a") * MOST_MEMBERS, coding) == b"a" * MOST_MEMBERS
    assert refusal(pack(b"a") * (MOST_MEMBERS + 1), coding) == (400, "invalid_encoding")


BOMBS = {
    b"gzip": gzip.compress(b"\0" * (64 * MB)),
    b"deflate": zlib.compress(b"\0" * (64 * MB)),
    b"zstd": zstandard.ZstdCompressor(level=19).compress(b"\0" * (64 * MB)),
}


@pytest.mark.parametrize("coding", BOMBS)
def test_a_bomb_goes_off_in_pieces(coding: bytes) -> None:
    """What is held at a time is bounded, and so is what is done before the bound is seen."""
    assert len(BOMBS[coding]) < MB // 8
    size = 0
    pieces: Iterator[bytes] = expanding(BOMBS[coding], coding, 4 * MB)
    tracemalloc.start()
    try:
        with pytest.raises(Refusal) as caught:
            for piece in pieces:
                size += len(piece)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.status == 413
    assert size <= 4 * MB
    assert most <= 18 * PIECE_BYTES


def test_a_window_larger_than_promised_is_refused() -> None:
    """It would take memory that nobody counts."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    body = packed.compress(b"a" * (9 * MB)) + packed.flush()
    assert refusal(body, b"zstd", 16 * MB) == (400, "invalid_encoding")


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"llama"}',
        b' \r\n\t{ "model" : "llama" } \n',
        b'{"a":1e999999,"b":' + b"9" * 5000 + b',"c":-0.0,"model":"llama"}',
        b'{"x":"\xff\xfe not UTF-8","model":"llama"}',
        b'{"\xff":1,"model":"llama"}',
        b'{"x":"\\u00e9\\ud83d\\ude00\\/","model":"llama"}',
        b'{"mod\\u0065l":"llama"}',
        b'{"model":"ll\\u0061ma"}',
        b'{"a":1,"a":2,"model":"llama"}',
        b'{"a":{"model":1,"model":2},"model":"llama"}',
        b'{"messages":[{"model":"x"}],"metadata":{"model":"y"},"model":"llama"}',
        b'{"Model":"x","MODEL":"y","model ":"z","model":"llama"}',
        b'{"x":' + b"[" * 100 + b"]" * 100 + b',"model":"llama"}',
        b'{"max_tokens":"many","n":[],"stream_options":7,"user":{},"model":"llama"}',
    ],
)
def test_odd_bodies_that_are_in_order(body: bytes) -> None:
    assert read_json(body).model == "llama"


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"", "invalid_json", "it is empty"),
        (b" ", "invalid_json", "not valid JSON"),
        (b"hello", "invalid_json", "not valid JSON"),
        (b'{"model":"llama"', "invalid_json", "cut off"),
        (b'{"model":"llama"} x', "invalid_json", "trailing"),
        (b'{"model":"llama"}\x00', "invalid_json", "trailing"),
        (b'{"model":"llama",}', "invalid_json", "trailing comma"),
        (b"{'model':'llama'}", "invalid_json", "not valid JSON"),
        (b'{"model":"llama","n":NaN}', "invalid_json", "not valid JSON"),
        (b'{"model":"llama","n":Infinity}', "invalid_json", "not valid JSON"),
        (b'{"model":"llama","n":01}', "invalid_json", "not valid JSON"),
        (b'{"model":"llama","x":"a\nb"}', "invalid_json", "not valid JSON"),
        (b'{"model":"llama","x":"\\ud83d"}', "invalid_json", "half of a \\u pair"),
        (b'{"model":"llama","x":"\\ude00\\ud83d"}', "invalid_json", "not valid JSON"),
        (b'{"model":"llama","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json", "nested too deeply"),
        (b'{"x":' * 100_000, "invalid_json", "nested too deeply"),
        (b'\xef\xbb\xbf\xef\xbb\xbf{"model":"llama"}', "invalid_json", "not valid JSON"),
        ('{"model":"llama"}'.encode("utf-16"), "invalid_json", "not valid JSON"),
        (b"[]", "invalid_json", "must be a JSON object"),
        (b'"llama"', "invalid_json", "must be a JSON object"),
        (b"null", "invalid_json", "must be a JSON object"),
        (b"{}", "model_missing", "is missing"),
        (b'{"model":null}', "model_missing", "is missing"),
        (b'{"model":""}', "model_missing", "not empty"),
        (b'{"model":5}', "model_missing", "must be a string"),
        (b'{"model":["llama"]}', "model_missing", "must be a string"),
        (b'{"model":"\xff"}', "invalid_json", "not valid JSON"),
        (b'{"model":"a","model":"b"}', "duplicate_field", "`model` is there twice"),
        (b'{"model":"a","model":"a"}', "duplicate_field", "`model` is there twice"),
        (b'{"model":"a","x":[1,{"y":2}],"mod\\u0065l":"b"}', "duplicate_field", "`model` is there twice"),
        (b'{"\\u006d\\u006F\\u0064\\u0065\\u006C":"a","model":"b"}', "duplicate_field", "`model` is there twice"),
        (b'{"stream":true,"model":"a","stream":false}', "duplicate_field", "`stream` is there twice"),
        (b'{"\\u0073tream":true,"model":"a","stream":false}', "duplicate_field", "`stream` is there twice"),
        (b'{"x":[' + b"[]," * 200_000 + b'1],"model":"a","model":"b"}', "duplicate_field", "cannot be told"),
    ],
)
def test_odd_bodies_that_are_refused(body: bytes, code: str, said: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_json(body)
    assert (caught.value.status, caught.value.code) == (400, code)
    assert said in caught.value.message
    assert len(caught.value.message) < 300


@given(st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)), st.lists, max_leaves=5))
def test_whether_a_stream_is_asked_for(value: object) -> None:
    ask = read_json(json.dumps({"stream": value, "model": "llama"}, ensure_ascii=False).encode("utf-8", "replace"))
    assert (bytes(ask.stream) == b"true") is (value is True)


@given(st.binary(max_size=60))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_read_or_refused(noise: bytes) -> None:
    for body in (noise, b'{"model":"a",' + noise + b"}", b'{"model":"' + noise + b'"}'):
        try:
            assert isinstance(read_json(body).model, str)
        except Refusal as refused:
            assert refused.status == 400


# -- forms -------------------------------------------------------------------------------------------------------------

TYPE = b"multipart/form-data; boundary=b0"


def form(**values: bytes) -> bytes:
    parts = (
        b'--b0\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (k.encode(), v) for k, v in values.items()
    )
    return b"".join(parts) + b"--b0--\r\n"


def test_the_fields_of_a_form() -> None:
    ask = read_multipart(form(file=b"\x00" * 5000, stream=b"true", model=b"whisper"), TYPE)
    assert (ask.model, bytes(ask.stream)) == ("whisper", b"true")
    assert bytes(read_multipart(form(model=b"whisper"), TYPE).stream) == b"false"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (form(file=b"x"), "model_missing"),
        (form(model=b""), "model_missing"),
        (form(model=b"\xff"), "model_missing"),
        (form(model=b"a")[:-12] + form(model=b"b"), "invalid_multipart"),
        (form(model=b"a").replace(b"--b0--\r\n", b"") + form(model=b"b"), "duplicate_field"),
        (form(stream=b"true").replace(b"--b0--\r\n", b"") + form(model=b"b", stream=b"false"), "duplicate_field"),
        (b'{"model":"llama"}', "invalid_multipart"),
        (b"", "invalid_multipart"),
    ],
)
def test_forms_that_are_refused(body: bytes, code: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_multipart(body, TYPE)
    assert (caught.value.status, caught.value.code) == (400, code)


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_not_counted() -> None:
    buffers = Buffers(10)
    buffers.reserve(6)
    with pytest.raises(Refusal) as caught:
        buffers.reserve(5)
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "buffers_full", 1)
    assert buffers.held_bytes == 6
    buffers.reserve(4)
    buffers.release(10)
    assert buffers.held_bytes == 0


@given(st.lists(st.one_of(st.binary(max_size=5), st.integers(1, 30_000).map(bytes)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_pieces_are_put_together_in_order(pieces: list[bytes]) -> None:
    gathered = Gathered()
    for piece in pieces:
        gathered.add(piece)
    assert gathered.size == sum(map(len, pieces))
    assert gathered.whole() == b"".join(pieces)


def test_crumbs_weigh_what_they_hold() -> None:
    gathered = Gathered()
    for _ in range(200_000):
        gathered.add(b"ab")
    assert len(gathered._pieces) < 10
    assert gathered.whole() == b"ab" * 200_000


def test_the_decoder_keeps_what_is_not_read() -> None:
    """The few fields stay raw: numbers no float can hold, escapes, order."""
    ask = bodies.read_json(b'{"model":"m","messages":[1e400,"\\u00e9",{"b":1,"a":2}]}')
    assert bytes(msgspec.Raw(ask.messages)) == b'[1e400,"\\u00e9",{"b":1,"a":2}]'

"""Heads: what is accepted and how it is read, what is refused, and that a remembered line changes neither."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from appliance.wire import head, headlines
from appliance.wire.head import BadHead, check_beginning, end_of_head, read_request, read_response
from tests.smuggling import HEADS, Shape


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Every test starts and leaves without remembered lines."""
    known = (
        headlines._known_fields,
        headlines.known_requests,
        headlines.known_statuses,
        head._known_request_heads,
        head._known_response_heads,
    )
    for memory in known:
        memory.clear()
    yield
    for memory in known:
        memory.clear()


def judged(raw: bytes) -> int:
    """The status a request's bytes are refused with, 0 when its head is accepted, -1 while more is awaited."""
    try:
        end = end_of_head(raw)
        if end < 0:
            check_beginning(raw)
            return -1
        read_request(raw[:end])
    except BadHead as bad:
        return bad.status
    return 0


# Over the body's cap: the head is in order, the connection refuses it.
_OF_THE_BODY = {413}


@pytest.mark.parametrize("shape", HEADS, ids=lambda shape: shape.name)
def test_no_smuggling_shape_passes(shape: Shape) -> None:
    wanted = 0 if shape.status in _OF_THE_BODY else shape.status
    assert judged(shape.raw) == wanted
    assert judged(shape.raw) == wanted, "another verdict when its lines were seen before"


GET = b"GET /v1/models?a=b%20c HTTP/1.1\r\nHost: x\r\n"


def test_a_request_is_read() -> None:
    raw = GET + b"X-Long-Name:\t a  b \t\r\nEmpty:\r\nX-High: \xc3\xa9\r\n\r\n"
    request = read_request(raw)
    assert (request.method, request.target, request.minor) == (b"GET", b"/v1/models?a=b%20c", 1)
    assert (request.path, request.query) == (b"/v1/models", b"a=b%20c")
    assert request.fields == ((b"host", b"x"), (b"x-long-name", b"a  b"), (b"empty", b""), (b"x-high", b"\xc3\xa9"))
    assert (request.length, request.chunked, request.keep_alive, request.expects_continue) == (0, False, True, False)


@pytest.mark.parametrize(
    ("line", "fields", "keeps"),
    [
        (b"HTTP/1.1", [], True),
        (b"HTTP/1.1", [b"connection: close"], False),
        (b"HTTP/1.1", [b"connection: Close"], False),
        (b"HTTP/1.1", [b"connection: foo,\tclose , bar"], False),
        (b"HTTP/1.1", [b"connection: close, keep-alive"], False),
        (b"HTTP/1.1", [b"connection: keep-alive", b"connection: close"], False),
        (b"HTTP/1.1", [b"connection: closed"], True),
        (b"HTTP/1.1", [b"connection:"], True),
        (b"HTTP/1.0", [], False),
        (b"HTTP/1.0", [b"connection: keep-alive"], True),
        (b"HTTP/1.0", [b"connection: x", b"Connection: Keep-Alive"], True),
        (b"HTTP/1.0", [b"connection: keep-alive, close"], False),
        (b"HTTP/1.0", [b"connection:"], False),
    ],
)
def test_whether_the_connection_is_kept(line: bytes, fields: list[bytes], keeps: bool) -> None:
    assert read_request(b"\r\n".join((b"GET / " + line, b"host: x", *fields, b"", b""))).keep_alive is keeps


@pytest.mark.parametrize(
    ("url", "host", "target"),
    [
        (b"http://x/v1/models?a", b"x", b"/v1/models?a"),
        (b"HTTP://X:80/v1", b"x:80", b"/v1"),
        (b"https://x", b"x", b"/"),
        (b"http://[::1]:8/a", b"[::1]:8", b"/a"),
    ],
)
def test_a_whole_url_as_target(url: bytes, host: bytes, target: bytes) -> None:
    request = read_request(b"GET %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (url, host))
    assert request.target == target
    assert request.path + (b"?" + request.query if request.query else b"") == target


def test_http_1_0_needs_no_host() -> None:
    assert read_request(b"GET / HTTP/1.0\r\n\r\n").minor == 0


def test_an_expectation_of_http_1_0_is_not_met() -> None:
    raw = b"POST / HTTP/1.%d\r\nhost: x\r\nexpect: 100-Continue\r\ncontent-length: 1\r\n\r\n"
    assert read_request(raw % 1).expects_continue
    assert not read_request(raw % 0).expects_continue


def test_the_end_of_a_head_is_found_wherever_it_is_cut() -> None:
    raw = GET + b"\r\n"
    for cut in range(1, len(raw)):
        assert end_of_head(raw[:cut]) == -1, cut
    assert end_of_head(raw) == len(raw)
    assert end_of_head(raw + b"body\r\n\r\n") == len(raw)


@pytest.mark.parametrize("raw", [b"GET / HTTP/1.1\n", b"GET / HTTP/1.1\r\nhost: x\n", b"\x16\x03\x01", b" ", b"\r\r"])
def test_what_can_become_no_head_is_refused_at_once(raw: bytes) -> None:
    assert judged(raw) == 400


def test_the_largest_head() -> None:
    raw = GET + b"x: " + b"a" * (head.MAX_HEAD_BYTES - len(GET) - 3)
    assert end_of_head(raw) == -1
    assert end_of_head(raw + b"\r\n\r\n") == len(raw) + 4
    assert judged(raw + b"a") == 431
    fields = [b"x-%d: 1" % number for number in range(headlines.MAX_FIELDS)]
    assert judged(b"\r\n".join((b"GET / HTTP/1.1", b"host: x", *fields[1:], b"", b""))) == 0
    assert judged(b"\r\n".join((b"GET / HTTP/1.1", b"host: x", *fields, b"", b""))) == 431


def test_the_longest_target() -> None:
    assert judged(b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"a" * (headlines.MAX_TARGET_BYTES - 1))) == 0
    assert judged(b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"a" * headlines.MAX_TARGET_BYTES)) == 431


@pytest.mark.parametrize(
    ("fields", "length", "chunked", "keeps"),
    [
        ([b"content-length: 5"], 5, False, True),
        ([b"transfer-encoding: Chunked"], None, True, True),
        ([], None, False, False),
        ([b"content-length: 5", b"connection: close"], 5, False, False),
    ],
)
def test_a_response_is_read(fields: list[bytes], length: int | None, chunked: bool, keeps: bool) -> None:
    response = read_response(b"\r\n".join((b"HTTP/1.1 200 OK", *fields, b"", b"")))
    assert (response.status, response.length, response.chunked, response.keep_alive) == (200, length, chunked, keeps)


@pytest.mark.parametrize("status", [b"100", b"204", b"304"])
def test_responses_without_a_body(status: bytes) -> None:
    for framing in (b"content-length: 5", b"transfer-encoding: chunked"):
        response = read_response(b"HTTP/1.1 %b X\r\n%b\r\n\r\n" % (status, framing))
        assert (response.length, response.chunked) == (0, False)


def test_the_answer_to_a_head_request_has_no_body() -> None:
    response = read_response(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", to_head_request=True)
    assert (response.length, response.keep_alive) == (0, True)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx : y\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: y\r\n z\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: y\nz: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\nx: y\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 099 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"200 OK\r\n\r\n",
        b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 129 + b"\r\n",
    ],
)
def test_responses_that_are_refused(raw: bytes) -> None:
    for _ in range(2):
        with pytest.raises(BadHead):
            read_response(raw)


# -- remembered lines --------------------------------------------------------------------------------------------------


def test_the_memory_of_lines_is_bounded() -> None:
    """A flood of lines that are all new: neither more lines than the bound, nor more bytes than is promised."""
    filler = b"a" * (headlines.LONGEST_KNOWN_LINE - 30)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(headlines.MOST_KNOWN_LINES - 1):
            target = b"/%d%b?%d" % (number, filler[8:], number)
            read_request(b"GET %b HTTP/1.1\r\nhost: x\r\nx-%d: %b\r\n\r\n" % (target, number, filler))
            read_response(b"HTTP/1.1 200 %d%b\r\nx-%d: %b\r\n\r\n" % (number, filler, number, filler))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most - before < headlines.KNOWN_BYTES
    assert len(headlines.known_requests) == len(headlines.known_statuses) == headlines.MOST_KNOWN_LINES - 1
    for number in range(10):
        read_request(b"GET /again%d HTTP/1.1\r\nhost: x\r\ny-%d: 1\r\n\r\n" % (number, number))
        assert len(headlines.known_requests) <= headlines.MOST_KNOWN_LINES
        assert len(headlines._known_fields) <= headlines.MOST_KNOWN_LINES


def test_long_lines_are_not_remembered() -> None:
    long = b"a" * headlines.LONGEST_KNOWN_LINE
    read_request(b"GET /%b HTTP/1.1\r\nhost: x\r\nx: %b\r\n\r\n" % (long, long))
    read_response(b"HTTP/1.1 200 %b\r\nx: %b\r\n\r\n" % (long, long))
    assert not headlines.known_requests and not headlines.known_statuses
    assert list(headlines._known_fields) == [b"host: x"]


def test_what_was_read_is_read_again() -> None:
    raw = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: a\r\nconnection: b\r\n\r\n"
    for _ in range(2):
        request = read_request(raw)
        assert request.by_name == {b"host": b"x", b"connection": b"a,b"}
        assert request.fields == ((b"host", b"x"), (b"connection", b"a"), (b"connection", b"b"))


# -- remembered heads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"content-length", b"Content-Length"])
def test_a_known_head_is_read_as_if_it_were_new(name: bytes) -> None:
    """All but the length is taken from the first such head, and nothing from any other."""
    lines = b"\r\nhost: x\r\nConnection: close\r\nexpect: 100-continue\r\n" + name + b": %d\r\nx: y\r\n\r\n"
    for length in (5, 70, 123456789012345678, 0):
        request = read_request(b"POST /a?b HTTP/1.1" + lines % length)
        assert (request.method, request.target, request.path, request.query) == (b"POST", b"/a?b", b"/a", b"b")
        assert (request.length, request.chunked, request.keep_alive, request.minor) == (length, False, False, 1)
        assert request.expects_continue
        assert request.fields[2:] == ((b"expect", b"100-continue"), (b"x", b"y"))
        assert request.by_name == dict(request.fields)
        response = read_response(b"HTTP/1.1 200 OK" + lines % length)
        assert (response.status, response.length, response.told_length, response.chunked) == (
            200,
            length,
            length,
            False,
        )
        assert not response.keep_alive
        assert response.fields == request.fields and response.by_name == request.by_name
    assert len(head._known_request_heads) == len(head._known_response_heads) == 1


def test_a_known_head_lets_nothing_in() -> None:
    """What differs by more than the digits of one length is judged anew."""
    good = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"
    assert read_request(good).length == 5
    for bad in (
        b"",
        b"+5",
        b"5 5",
        b"0x5",
        b"5, 5",
        b"1" * 19,
        b"5\r\nContent-Length: 5",
        b"5\r\ntransfer-encoding: chunked",
    ):
        for _ in range(2):
            with pytest.raises(BadHead):
                read_request(good.replace(b"5", bad))
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
    assert read_response(answer).length == 5
    assert read_response(answer, to_head_request=True).length == 0
    for status in (b"100", b"204", b"304"):
        for length in (b"5", b"6"):
            assert read_response(answer.replace(b"200", status).replace(b"5", length)).length == 0


def test_the_length_stands_in_no_field_of_a_head() -> None:
    """Heads share their fields whatever their lengths. That nobody changes them the types tell (`Mapping`, a tuple)."""
    for raw in (b"POST / HTTP/1.1\r\nhost: x\r\nContent-Length: 5\r\n\r\n", b"\r\ncontent-length:5\r\nhost: x\r\n\r\n"):
        for _ in range(2):
            request = read_request(raw if raw[:4] == b"POST" else b"POST / HTTP/1.1" + raw)
            assert (request.length, request.fields, request.by_name) == (5, ((b"host", b"x"),), {b"host": b"x"})
            response = read_response(b"HTTP/1.1 200 OK" + raw[raw.index(b"\r\n") :])
            assert (response.length, response.told_length) == (5, 5)
            assert (response.fields, response.by_name) == (((b"host", b"x"),), {b"host": b"x"})


@pytest.mark.parametrize("status", [200, 204, 304])
def test_a_length_without_a_body_is_told(status: int) -> None:
    for length in (5, 70, 5):
        response = read_response(
            b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n\r\n" % (status, length), to_head_request=True
        )
        assert (response.length, response.told_length) == (0, length)
    assert read_response(b"HTTP/1.1 200 OK\r\n\r\n", to_head_request=True).told_length is None


def test_the_memory_of_heads_is_bounded() -> None:
    """A flood of heads that are all new, each as heavy as may be."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(2 * head.MOST_KNOWN_HEADS):
            fields = b"".join(b"%x-%d: 1\r\n" % (number, each) for each in range(120))
            read_request(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n" + fields + b"\r\n")
            headlines._known_fields.clear()
            assert len(head._known_request_heads) <= head.MOST_KNOWN_HEADS
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most - before < head.KNOWN_HEADS_BYTES
    long = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nx: %b\r\n\r\n" % (b"a" * head.LONGEST_KNOWN_HEAD)
    known = len(head._known_request_heads)
    assert read_request(long).length == 5 and len(head._known_request_heads) == known

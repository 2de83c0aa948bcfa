"""HTTP/1.1 heads: the request's and the response's, read by one strict grammar.

A head is taken whole: the caller finds its end (`end_of_head`), then `read_request` or `read_response` cuts it into
lines and judges each (`headlines`). (llhttp was tried in its place: httptools 0.9 accepts a missing or a second Host,
HTTP/0.9, RTSP, transfer-encoding on HTTP/1.0 and `gzip, chunked`, so every rule here was needed all the same, and its
callbacks cost twice as much as all of this. `tests/test_head_against_h11.py` holds us to h11's reading.)

What makes it cheap: most often the length of the body is all that differs between the heads of a client, so a head is
found again by its bytes without those digits. An official client sends eighteen lines, which take 4.3 microseconds one
by one and 1.7 at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from .headlines import (
    BadHead,
    Fields,
    KnownFields,
    fields_of,
    keeps_alive,
    known_requests,
    known_statuses,
    length_of,
    request_line,
    status_line,
)

__all__ = (
    "HEAD_END",
    "MAX_HEAD_BYTES",
    "BadHead",
    "Fields",
    "RequestHead",
    "ResponseHead",
    "check_beginning",
    "end_of_head",
    "read_request",
    "read_response",
)

HEAD_END = b"\r\n\r\n"
MAX_HEAD_BYTES = 65536
MOST_KNOWN_HEADS = 256
LONGEST_KNOWN_HEAD = 2048
KNOWN_HEADS_BYTES = 12 << 20
"""Bounds of the two memories of heads, and what each holds when somebody fills it on purpose. A full one is emptied."""

_LENGTH_LINE = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,18})\r\n")
_HOST = re.compile(rb"[A-Za-z0-9.\-_~%!$&'()*+;=:\[\]]*")
_ONCE = frozenset(
    (
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"content-type",
        b"content-encoding",
        b"authorization",
        b"x-api-key",
        b"expect",
    )
)
_ONCE_IN_RESPONSE = frozenset((b"content-length", b"transfer-encoding"))
_NO_BODY = frozenset((204, 304))


class RequestHead:
    """What a request's head says. `target` is in origin form; `path` is it without the query, percent-escapes kept.
    `by_name` holds the last value of each field, and all of a repeated Connection. Content-Length is in neither: it is
    `length`. So heads that differ in nothing else share their fields, which nobody may change."""

    __slots__ = (
        "by_name",
        "chunked",
        "expects_continue",
        "fields",
        "keep_alive",
        "length",
        "method",
        "minor",
        "path",
        "query",
        "target",
    )

    by_name: Mapping[bytes, bytes]
    chunked: bool
    expects_continue: bool
    fields: KnownFields
    keep_alive: bool
    length: int
    method: bytes
    minor: int
    path: bytes
    query: bytes
    target: bytes


class ResponseHead:
    """What a response's head says, as in a request's. `length` None: the body ends with the chunked framing or with the
    connection. `told_length` is what Content-Length says, also where there is no body: of the one there would be."""

    __slots__ = ("by_name", "chunked", "fields", "keep_alive", "length", "status", "told_length")

    by_name: Mapping[bytes, bytes]
    chunked: bool
    fields: KnownFields
    keep_alive: bool
    length: int | None
    status: int
    told_length: int | None


_known_request_heads: dict[bytes, RequestHead] = {}
_known_response_heads: dict[bytes, ResponseHead] = {}
Head = TypeVar("Head", RequestHead, ResponseHead)


def read_request(head: bytes) -> RequestHead:
    """Read a request head, given whole with its empty line. Raises BadHead."""
    told = _LENGTH_LINE.search(head)
    if told is None or len(head) > LONGEST_KNOWN_HEAD:
        return _judge_request(head)
    start, end = told.span(1)
    rest = head[:start] + head[end:]
    like = _known_request_heads.get(rest)
    if like is None:
        like = _remember(_known_request_heads, rest, _judge_request(head))
    request = RequestHead()
    request.method = like.method
    request.target = like.target
    request.path = like.path
    request.query = like.query
    request.minor = like.minor
    request.chunked = False
    request.expects_continue = like.expects_continue
    request.keep_alive = like.keep_alive
    request.length = int(told[1])
    request.fields = like.fields
    request.by_name = like.by_name
    return request


def read_response(head: bytes, *, to_head_request: bool = False) -> ResponseHead:
    """Read an upstream's response head, given whole with its empty line. Raises BadHead."""
    told = _LENGTH_LINE.search(head)
    if told is None or to_head_request or len(head) > LONGEST_KNOWN_HEAD:
        return _judge_response(head, to_head_request)
    start, end = told.span(1)
    rest = head[:start] + head[end:]
    like = _known_response_heads.get(rest)
    if like is None:
        judged = _judge_response(head, to_head_request)
        if judged.status < 200 or judged.status in _NO_BODY:
            return judged  # its length is not that of a body
        like = _remember(_known_response_heads, rest, judged)
    response = ResponseHead()
    response.status = like.status
    response.chunked = False
    response.keep_alive = like.keep_alive
    response.length = response.told_length = int(told[1])
    response.fields = like.fields
    response.by_name = like.by_name
    return response


def _remember(known: dict[bytes, Head], rest: bytes, head: Head) -> Head:
    """Keep a head that was found good, by its bytes without the digits of its only content-length. No other head has
    these bytes: one with an empty length is refused, and never looked up."""
    if len(known) >= MOST_KNOWN_HEADS:
        known.clear()
    known[rest] = head
    return head


def _without_length(fields: Fields, by_name: dict[bytes, bytes]) -> tuple[KnownFields, bytes | None]:
    """The fields without Content-Length, which is taken out of `by_name` too, and its value."""
    length = by_name.pop(b"content-length", None)
    if length is None:
        return tuple(fields), None
    return tuple([field for field in fields if field[0] != b"content-length"]), length


def _judge_request(head: bytes) -> RequestHead:
    lines = head[:-4].split(b"\r\n")
    known = known_requests.get(lines[0]) or request_line(lines[0])
    fields, by_name = fields_of(lines, _ONCE)
    request = RequestHead()
    request.method, request.target, request.path, request.query, minor = known
    request.fields, length = _without_length(fields, by_name)
    request.by_name = by_name
    request.minor = minor
    request.chunked = request.expects_continue = False
    get = by_name.get
    host = get(b"host")
    if host is None:
        if minor == 1:
            raise BadHead("a Host header is required")
    elif _HOST.fullmatch(host) is None:
        raise BadHead("malformed Host header")
    if not request.target.startswith(b"/"):
        _take_absolute(request, host)
    request.length = 0 if length is None else length_of(length)
    coding = get(b"transfer-encoding")
    if coding is not None:
        if minor == 0:
            raise BadHead("transfer-encoding is not part of HTTP/1.0")
        if length is not None:
            raise BadHead("a request has either a content-length or a transfer-encoding")
        if coding.lower() != b"chunked":
            raise BadHead("the only transfer-encoding understood is chunked", status=501)
        request.chunked = True
    connection = get(b"connection")
    request.keep_alive = minor == 1 if connection is None else keeps_alive(connection, minor)
    expect = get(b"expect")
    if expect is not None:
        if expect.lower() != b"100-continue":
            raise BadHead("the only expectation understood is 100-continue", status=417)
        request.expects_continue = minor == 1
    return request


def _judge_response(head: bytes, to_head_request: bool) -> ResponseHead:
    lines = head[:-4].split(b"\r\n")
    minor, status = known_statuses.get(lines[0]) or status_line(lines[0])
    fields, by_name = fields_of(lines, _ONCE_IN_RESPONSE)
    response = ResponseHead()
    response.status = status
    response.fields, length = _without_length(fields, by_name)
    response.by_name = by_name
    response.chunked = False
    get = by_name.get
    response.length = response.told_length = None if length is None else length_of(length)
    coding = get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked" or length is not None or minor == 0:
            raise BadHead("response with an ambiguous length")
        response.chunked = True
    if status < 200 or status in _NO_BODY or to_head_request:
        response.length = 0
        response.chunked = False
    connection = get(b"connection")
    response.keep_alive = (minor == 1 if connection is None else keeps_alive(connection, minor)) and (
        response.chunked or response.length is not None
    )
    return response


def end_of_head(data: bytes | bytearray) -> int:
    """Where the head at the beginning of `data` ends (the index after its empty line), or -1 while it is incomplete.

    Raises BadHead: 431 once more than `MAX_HEAD_BYTES` have come without an end, 400 at the first bare LF. Whoever ends
    lines with LF alone would otherwise wait for an answer, and we for the end of a head that is complete in his eyes.
    """
    end = data.find(HEAD_END)
    if end > MAX_HEAD_BYTES or (end < 0 and len(data) > MAX_HEAD_BYTES):
        raise BadHead(f"header larger than {MAX_HEAD_BYTES} bytes", status=431)
    if end >= 0:
        return end + 4
    if data.count(b"\n") != data.count(b"\r\n"):
        raise BadHead("a bare LF in the header")
    return -1


def check_beginning(data: bytes) -> None:
    """Refuse the beginning of a request that can become none: TLS on a plain port, a stray body, another protocol.

    Raises BadHead. Only asked while a head is incomplete.
    """
    if not b"A" <= data[:1] <= b"Z":
        tls = data[:2] == b"\x16\x03"
        raise BadHead("this is TLS, and plain HTTP is spoken here" if tls else "malformed request line")


def _take_absolute(request: RequestHead, host: bytes | None) -> None:
    """A client that takes us for its proxy names the whole URL: scheme and authority go."""
    url = request.target
    if not url.lower().startswith((b"http://", b"https://")):
        raise BadHead("the request target must begin with /")
    authority, slash, rest = url.partition(b"//")[2].partition(b"/")
    if not authority or b"?" in authority or (host is not None and authority.lower() != host.lower()):
        raise BadHead("target and Host disagree")
    request.target = slash + rest or b"/"
    request.path, _, request.query = request.target.partition(b"?")

"""HTTP/1.1 heads: the request's and the response's, read by llhttp and by a stricter rule of our own.

A head is taken whole: the caller finds its end (`HEAD_END`), then `read_request` or `read_response` judges it. One
regular expression first refuses what two parsers could read differently (bare CR or LF, folding, control characters,
spaces before a colon, anything but HTTP/1.0 and 1.1), then llhttp (httptools) cuts it into fields, then the framing
rules are applied. httptools 0.9 alone accepts a missing or a second Host, HTTP/0.9, RTSP, transfer-encoding on HTTP/1.0
and `gzip, chunked`.

Framing after the head is not llhttp's: it has no pause, so a pipelined second request would be parsed before the first
was answered. See `framing.py`.
"""

from __future__ import annotations

import re

import httptools

HEAD_END = b"\r\n\r\n"
MAX_HEAD_BYTES = 65536
MAX_FIELDS = 128

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_FIELDS = rb"(?:" + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n)*\r\n"
_REQUEST = re.compile(rb"[A-Z]{1,24} [!-~]+ HTTP/1\.[01]\r\n" + _FIELDS)
_RESPONSE = re.compile(rb"HTTP/1\.[01] [1-9][0-9]{2}(?: [\t\x20-\x7e\x80-\xff]*)?\r\n" + _FIELDS)
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

Fields = list[tuple[bytes, bytes]]
"""Header fields in their order: lower-case name, value without surrounding blanks."""


class BadHead(Exception):
    """A head that is refused. `status` is the answer it deserves."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class RequestHead:
    """What a request's head says. `target` is in origin form; `path` is it without the query, percent-escapes kept."""

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

    def __init__(self, method: bytes, target: bytes, minor: int, fields: Fields, by_name: dict[bytes, bytes]) -> None:
        self.method = method
        self.target = target
        path, _, query = target.partition(b"?")
        self.path = path
        self.query = query
        self.minor = minor
        self.fields = fields
        self.by_name = by_name
        self.length: int = 0
        self.chunked = False
        self.keep_alive = minor == 1
        self.expects_continue = False


class ResponseHead:
    """What a response's head says. `length` None: the body ends with the chunked framing or with the connection."""

    __slots__ = ("by_name", "chunked", "fields", "keep_alive", "length", "status")

    def __init__(self, status: int, fields: Fields, by_name: dict[bytes, bytes]) -> None:
        self.status = status
        self.fields = fields
        self.by_name = by_name
        self.length: int | None = None
        self.chunked = False
        self.keep_alive = False


class _Collector:
    """Receives llhttp's calls."""

    __slots__ = ("fields", "url")

    def __init__(self) -> None:
        self.fields: Fields = []
        self.url = b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value.rstrip(b" \t")))


def read_request(head: bytes) -> RequestHead:
    """Read a request head, given whole with its empty line. Raises BadHead."""
    if _REQUEST.fullmatch(head) is None:
        raise BadHead(_why_malformed(head))
    seen = _Collector()
    parser = httptools.HttpRequestParser(seen)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # an offer to switch protocols, which a server may ignore; the door looks at it (`door/routes.py`)
    except httptools.HttpParserError as error:
        raise BadHead(f"malformed request: {error}") from None
    fields = seen.fields
    by_name = _index(fields)
    minor = head[head.index(b"\r\n") - 1] - 48
    request = RequestHead(parser.get_method(), _origin_form(seen.url, by_name), minor, fields, by_name)
    if b"host" not in by_name:
        if minor == 1:
            raise BadHead("a Host header is required")
    elif _HOST.fullmatch(by_name[b"host"]) is None:
        raise BadHead("malformed Host header")
    if b"transfer-encoding" in by_name:
        if minor == 0:
            raise BadHead("transfer-encoding is not part of HTTP/1.0")
        if b"content-length" in by_name:
            raise BadHead("a request has either a content-length or a transfer-encoding")
        if by_name[b"transfer-encoding"].lower() != b"chunked":
            raise BadHead("the only transfer-encoding understood is chunked", status=501)
        request.chunked = True
    elif b"content-length" in by_name:
        request.length = _length(by_name[b"content-length"])
    if b"connection" in by_name:
        request.keep_alive = _keeps_alive(by_name[b"connection"], minor)
    if b"expect" in by_name:
        if by_name[b"expect"].lower() != b"100-continue":
            raise BadHead("the only expectation understood is 100-continue", status=417)
        request.expects_continue = minor == 1
    return request


def read_response(head: bytes, *, to_head_request: bool = False) -> ResponseHead:
    """Read an upstream's response head, given whole with its empty line. Raises BadHead."""
    if _RESPONSE.fullmatch(head) is None:
        raise BadHead("malformed response head")
    seen = _Collector()
    parser = httptools.HttpResponseParser(seen)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        raise BadHead("the upstream switched protocols unasked") from None
    except httptools.HttpParserError as error:
        raise BadHead(f"malformed response: {error}") from None
    by_name = _index(seen.fields, once=(b"content-length", b"transfer-encoding"))
    response = ResponseHead(int(head[9:12]), seen.fields, by_name)
    minor = head[7] - 48
    if b"transfer-encoding" in by_name:
        if by_name[b"transfer-encoding"].lower() != b"chunked" or b"content-length" in by_name or minor == 0:
            raise BadHead("response with an ambiguous length")
        response.chunked = True
    elif b"content-length" in by_name:
        response.length = _length(by_name[b"content-length"])
    if to_head_request or response.status in (204, 304) or response.status < 200:
        response.length = 0
        response.chunked = False
    response.keep_alive = _keeps_alive(by_name.get(b"connection", b""), minor) and (
        response.chunked or response.length is not None
    )
    return response


def parse_or_none(data: bytes | bytearray, start: int = 0) -> int:
    """Where the head that begins at `start` ends (the index after its empty line), or -1 while it is incomplete.

    Raises BadHead (431) once more than `MAX_HEAD_BYTES` have come without an end.
    """
    end = data.find(HEAD_END, start)
    if end < 0:
        if len(data) - start > MAX_HEAD_BYTES:
            raise BadHead(f"request header larger than {MAX_HEAD_BYTES} bytes", status=431)
        return -1
    if end - start > MAX_HEAD_BYTES:
        raise BadHead(f"request header larger than {MAX_HEAD_BYTES} bytes", status=431)
    return end + 4


def _index(fields: Fields, once: tuple[bytes, ...] | frozenset[bytes] = _ONCE) -> dict[bytes, bytes]:
    """Fields by name; a repeated one keeps its last value, and one that must not be repeated is refused."""
    by_name = dict(fields)
    if len(by_name) != len(fields):
        if len(fields) > MAX_FIELDS:
            raise BadHead(f"more than {MAX_FIELDS} header fields", status=431)
        names = [name for name, _ in fields]
        for name in once:
            if names.count(name) > 1:
                raise BadHead(f"more than one {name.decode()} header")
        if b"connection" in by_name:
            by_name[b"connection"] = b",".join(value for name, value in fields if name == b"connection")
    elif len(fields) > MAX_FIELDS:
        raise BadHead(f"more than {MAX_FIELDS} header fields", status=431)
    return by_name


def _length(value: bytes) -> int:
    # isdigit on bytes is ASCII only; the bound keeps a length of a thousand digits from becoming an integer
    if not value.isdigit() or len(value) > 18:
        raise BadHead("malformed content-length")
    return int(value)


def _keeps_alive(connection: bytes, minor: int) -> bool:
    if not connection:
        return minor == 1
    tokens = [token.strip(b" \t").lower() for token in connection.split(b",")]
    if b"close" in tokens:
        return False
    return minor == 1 or b"keep-alive" in tokens


def _origin_form(url: bytes, by_name: dict[bytes, bytes]) -> bytes:
    """The target as a path. An absolute target (a client that takes us for its proxy) loses scheme and authority."""
    if url.startswith(b"/"):
        target = url
    elif url.lower().startswith((b"http://", b"https://")):
        authority, slash, rest = url.partition(b"//")[2].partition(b"/")
        if not authority or b"?" in authority or (b"host" in by_name and authority.lower() != by_name[b"host"].lower()):
            raise BadHead("target and Host disagree")
        target = slash + rest or b"/"
    else:
        raise BadHead("the request target must begin with /")
    if b"#" in target:
        raise BadHead("a request target has no fragment")
    return target


def _why_malformed(head: bytes) -> str:
    line, _, rest = head.partition(b"\r\n")
    if re.fullmatch(rb"[A-Z]{1,24} [!-~]+ HTTP/1\.[01]", line) is None:
        if re.search(rb" HTTP/[0-9.]+$", line) and not re.search(rb" HTTP/1\.[01]$", line):
            return "only HTTP/1.0 and HTTP/1.1 are spoken here"
        return "malformed request line"
    if re.search(rb"\r(?!\n)|(?<!\r)\n", head):
        return "a bare CR or LF in the request header"
    if re.search(rb"\r\n[ \t]", b"\r\n" + rest):
        return "a folded header line"
    return "malformed header field"

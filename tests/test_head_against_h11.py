"""Whatever we accept, h11 reads the same way: method, target, fields, where the body ends, what comes after it.

h11 is a careful second reader. Heads are made by Hypothesis out of parts that matter to framing, then mutated byte by
byte; both readers get the same bytes, a body and a second request behind them. We may refuse more than h11, never less.
"""

from __future__ import annotations

import h11
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appliance.wire.framing import BadFraming, Chunked
from appliance.wire.head import BadHead, RequestHead, ResponseHead, end_of_head, read_request, read_response
from appliance.wire.headlines import KnownFields

NAMES = (
    b"Host", b"content-length", b"Content-Length", b"transfer-encoding", b"Transfer-Encoding", b"connection", b"Expect",
    b"expect", b"X-A", b"x_a", b"authorization", b"Upgrade", b"te", b"trailer",
)  # fmt: skip
VALUES = (
    b"x", b"0", b"5", b"05", b"17", b"+5", b"-5", b"5, 5", b"5,6", b"0x5", b"5 ", b"\t5", b"", b"chunked", b"Chunked",
    b"gzip, chunked", b"chunked, chunked", b"identity", b"close", b"keep-alive", b"Close, x", b"100-continue", b"a b",
    b"a\tb", b"\xe9\x80", b'"q"', b"a\x00b", b"a\x0bb", b"99999999999999999999",
)  # fmt: skip
BLANKS = (b": ", b":", b":\t ", b" : ", b"\t:")
ENDS = (b"\r\n",) * 300 + (b"\n", b"\r", b"\r\n ", b"\r\r\n", b"\n\r\n")
LINES = (
    b"GET / HTTP/1.1", b"POST /v1/x?a=b HTTP/1.1", b"POST /v1/x HTTP/1.0", b"HEAD /a%2Fb HTTP/1.1", b"PUT / HTTP/1.1",
    b"GET http://x/ HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET / HTTP/1.2", b"GET /", b"get / HTTP/1.1", b"M / X",
    b"GET  / HTTP/1.1", b"GET / HTTP/1.1 ", b"PLAY / RTSP/1.0", b"GET /\xe9 HTTP/1.1", b"",
)  # fmt: skip
STATUS_LINES = (
    b"HTTP/1.1 200 OK", b"HTTP/1.1 200", b"HTTP/1.1 200 ", b"HTTP/1.0 200 OK", b"HTTP/1.1 204 No", b"HTTP/1.1 304 No",
    b"HTTP/1.1 500 a\tb", b"HTTP/1.1 200 \xe9", b"HTTP/1.1 20 x", b"HTTP/1.1 2000 x", b"HTTP/2 200", b"HTTP/1.1  200",
    b"HTTP/1.1 999 x", b"ICY 200 OK", b"HTTP/1.1 200 a\x00b", b"",
)  # fmt: skip
BODIES = (
    b"hello" * 4,
    b"5\r\nhello\r\n0\r\n\r\n",
    b"5;a=b\r\nhello\r\n00\r\nt: u\r\n\r\n",
    b"5 \r\nhello\r\n0\r\n\r\n",
    b"05\r\nhello\r\nA\r\n0123456789\r\n0\r\n\r\n",
    b"5\nhello\r\n0\r\n\r\n",
    b"5\r\nhello0\r\n\r\n",
    b"0\r\n\r\n",
    b"0\r\nt: u\r\n x\r\n\r\n",
    b"",
)
NEXT = b"GET /next HTTP/1.1\r\nhost: y\r\n\r\n"

ORDERLY = (
    (), (b"Content-Length: 5",), (b"content-length:\t20 ",), (b"Content-Length: 0",), (b"transfer-encoding: chunked",),
    (b"Transfer-Encoding:Chunked",), (b"Connection: close",), (b"connection: keep-alive", b"content-length: 05"),
    (b"X-A: a\tb", b"x-a:"), (b"transfer-encoding: chunked", b"content-length: 5"), (b"content-length: 5",) * 2,
)  # fmt: skip
odd = st.tuples(st.sampled_from(NAMES), st.sampled_from(BLANKS), st.sampled_from(VALUES)).map(b"".join)


@st.composite
def heads(draw: st.DrawFn, lines: tuple[bytes, ...]) -> bytes:
    """A head: three times in four one that is in order."""
    strange = draw(st.sampled_from((False, False, False, True)))
    line = draw(st.sampled_from(lines if strange else lines[:5]))
    fields = [b"Host: x", *draw(st.sampled_from(ORDERLY)), *(draw(st.lists(odd, max_size=3)) if strange else ())]
    raw = b"".join(part + draw(st.sampled_from(ENDS)) for part in (line, *draw(st.permutations(fields))))
    return raw + draw(st.sampled_from(ENDS))


@st.composite
def mutated(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> bytes:
    """The same with up to three bytes cut out, put in or exchanged."""
    raw = bytearray(draw(source))
    for _ in range(draw(st.sampled_from((0, 0, 1, 3)))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        byte = draw(st.sampled_from(b'\r\n\t :;,\x00\x0b\x7f\x80\xff0159aZ/\\%#?"=+-_'))
        match draw(st.sampled_from(["cut", "put", "set"])):
            case "cut":
                del raw[at : at + draw(st.integers(1, 3))]
            case "put":
                raw.insert(at, byte)
            case _ if raw:
                raw[at] = byte
    return bytes(raw)


Read = tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes, bytes, bool | None]
"""Method or status, target, fields, payload, what comes after, whether the connection is kept (None: not yet known)."""


def read_by_h11(raw: bytes, role: type[h11.Sentinel], *, ended: bool = False) -> Read | None:
    """None where h11 refuses. `ended`: the connection ends after these bytes."""
    http = h11.Connection(role)
    if role is h11.CLIENT:
        http.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        http.send(h11.EndOfMessage())
    try:
        http.receive_data(raw)
        head = http.next_event()
        while isinstance(head, h11.InformationalResponse):
            head = http.next_event()
        assert isinstance(head, h11.Request | h11.Response), head
        payload = b""
        if ended:
            http.receive_data(b"")
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                return None
            assert isinstance(event, h11.Data), event
            payload += bytes(event.data)
    except h11.RemoteProtocolError:
        return None
    kept = {h11.DONE: True, h11.MIGHT_SWITCH_PROTOCOL: None}.get(http.their_state, False)
    first, target = (head.method, head.target) if isinstance(head, h11.Request) else (b"%d" % head.status_code, b"")
    return first, target, list(head.headers), payload, bytes(http.trailing_data[0]), kept


def as_h11(fields: KnownFields, length: int | None) -> list[tuple[bytes, bytes]]:
    """h11 gives the name of a coding in lower case; names of codings have no case."""
    told = [] if length is None else [(b"content-length", b"%d" % length)]
    return [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in fields] + told


def length_last(fields: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Ours has no place among the fields."""
    told = [(name, b"%d" % int(value)) for name, value in fields if name == b"content-length"]
    return [field for field in fields if field[0] != b"content-length"] + told


def framed(head: RequestHead | ResponseHead, rest: bytes) -> tuple[bytes, bytes] | None:
    """The payload and what comes after it, as our framing cuts them; None where it refuses or waits."""
    if head.chunked:
        cutter = Chunked()
        try:
            payload = b"".join(cutter.feed(rest))
        except BadFraming:
            return None
        return (payload, cutter.rest) if cutter.done else None
    if head.length is None:
        return rest, b""
    return (rest[: head.length], rest[head.length :]) if head.length <= len(rest) else None


@given(mutated(heads(LINES)), st.sampled_from(BODIES))
@example(b"GET http://x/a HTTP/1.1\r\nhost: x\r\n\r\n", b"")
@example(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", BODIES[2])
@settings(max_examples=600, deadline=None)
def test_h11_reads_our_requests_the_same_way(raw: bytes, body: bytes) -> None:
    raw += body + NEXT
    try:
        end = end_of_head(raw)
        request = read_request(raw[:end]) if end > 0 else None
    except BadHead:
        return
    if request is None:
        return
    ours = framed(request, raw[end:])
    if ours is None:
        return  # refused, or waiting for a body: nothing is served
    theirs = read_by_h11(raw, h11.SERVER)
    assert theirs is not None, "accepted here, refused by h11"
    method, target, fields, payload, rest, kept = theirs
    assert method == request.method
    assert target == request.target or target.partition(b"//")[2].partition(b"/")[2] == request.target[1:]
    told = request.length if b"content-length" in dict(fields) else None
    assert length_last(fields) == as_h11(request.fields, told)
    assert (payload, rest) == ours
    assert kept is None or kept == (request.keep_alive and request.minor == 1)  # h11 keeps none of HTTP/1.0


@given(mutated(heads(STATUS_LINES)), st.sampled_from(BODIES))
@settings(max_examples=600, deadline=None)
def test_h11_reads_our_responses_the_same_way(raw: bytes, body: bytes) -> None:
    raw += body
    try:
        end = end_of_head(raw)
        response = read_response(raw[:end]) if end > 0 else None
    except BadHead:
        return
    if response is None or response.status < 200:
        return
    ours = framed(response, raw[end:])
    if ours is None:
        return
    theirs = read_by_h11(raw, h11.CLIENT, ended=response.length is None and not response.chunked)
    assert theirs is not None, "accepted here, refused by h11"
    status, _, fields, payload, rest, kept = theirs
    assert int(status) == response.status
    assert length_last(fields) == as_h11(response.fields, response.told_length)
    assert (payload, rest) == ours
    if response.keep_alive:
        assert kept or raw[7:8] == b"0"


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    """No input makes a reader fail in a way of its own."""
    for read in (read_request, read_response):
        try:
            read(raw + b"\r\n\r\n")
        except BadHead as bad:
            assert bad.status in (400, 417, 431, 501)


@given(mutated(heads(LINES)))
@settings(max_examples=300, deadline=None)
def test_a_head_reads_the_same_the_second_time(raw: bytes) -> None:
    """Its lines are known then."""
    raw += b"\r\n\r\n"
    verdicts = []
    for _ in range(2):
        try:
            request = read_request(raw)
            verdicts.append([getattr(request, name) for name in RequestHead.__slots__])
        except BadHead as bad:
            verdicts.append([str(bad), bad.status])
    assert verdicts[0] == verdicts[1]

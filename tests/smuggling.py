"""Requests that two readers could cut differently, written out. None of them may be served.

Each has a name, its bytes, and the status it deserves. `INNER` is what a smuggler hides in them: if the door ever
answers twice, or an engine ever sees `/v1/hidden`, one of them got through.
"""

from __future__ import annotations

import attrs

INNER = b"POST /v1/hidden HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
_BODY = b'{"model":"llama"}'


@attrs.frozen
class Shape:
    name: str
    raw: bytes
    status: int = 400


def _post(*fields: bytes, body: bytes = b"", line: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    return b"\r\n".join((line, b"host: x", *fields)) + b"\r\n\r\n" + body


def _get(target: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % target


_CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_BODY), _BODY)

HEADS = (
    # two lengths, or a length and chunks
    Shape("cl-te", _post(b"content-length: 6", b"transfer-encoding: chunked", body=b"0\r\n\r\n" + INNER)),
    Shape("te-cl", _post(b"transfer-encoding: chunked", b"content-length: 4", body=_CHUNKED + INNER)),
    Shape("two-lengths", _post(b"content-length: 0", b"content-length: %d" % len(INNER), body=INNER)),
    Shape("two-equal-lengths", _post(b"content-length: 17", b"content-length: 17", body=_BODY)),
    Shape("list-of-lengths", _post(b"content-length: 17, 17", body=_BODY)),
    Shape("length-plus", _post(b"content-length: +17", body=_BODY)),
    Shape("length-minus", _post(b"content-length: -1", body=_BODY)),
    Shape("length-hex", _post(b"content-length: 0x11", body=_BODY)),
    Shape("length-blank-inside", _post(b"content-length: 1 7", body=_BODY)),
    Shape("length-underscore", _post(b"content-length: 1_7", body=_BODY)),
    Shape("length-fraction", _post(b"content-length: 17.0", body=_BODY)),
    Shape("length-empty", _post(b"content-length:", body=_BODY)),
    Shape("length-quoted", _post(b'content-length: "17"', body=_BODY)),
    Shape("length-arabic", _post(b"content-length: \xd9\xa1\xd9\xa7", body=_BODY)),
    Shape("length-huge", _post(b"content-length: 99999999999999999999", body=_BODY)),
    Shape("length-thousand-digits", _post(b"content-length: " + b"9" * 1000, body=_BODY)),
    Shape("length-wraps-64-bit", _post(b"content-length: 18446744073709551633", body=_BODY)),
    Shape("length-too-large", _post(b"content-length: 999999999999", body=_BODY), 413),
    # codings that are not, or not quite, chunked
    Shape("te-identity", _post(b"transfer-encoding: identity", body=_CHUNKED), 501),
    Shape("te-gzip-chunked", _post(b"transfer-encoding: gzip, chunked", body=_CHUNKED), 501),
    Shape("te-chunked-gzip", _post(b"transfer-encoding: chunked, gzip", body=_CHUNKED), 501),
    Shape("te-chunked-chunked", _post(b"transfer-encoding: chunked, chunked", body=_CHUNKED), 501),
    Shape("te-twice", _post(b"transfer-encoding: chunked", b"transfer-encoding: identity", body=_CHUNKED)),
    Shape("te-twice-chunked", _post(b"transfer-encoding: chunked", b"transfer-encoding: chunked", body=_CHUNKED)),
    Shape("te-xchunked", _post(b"transfer-encoding: xchunked", body=_CHUNKED), 501),
    Shape("te-quoted", _post(b'transfer-encoding: "chunked"', body=_CHUNKED), 501),
    Shape("te-parameter", _post(b"transfer-encoding: chunked;q=1", body=_CHUNKED), 501),
    Shape("te-vertical-tab", _post(b"transfer-encoding: \x0bchunked", body=_CHUNKED)),
    Shape("te-form-feed", _post(b"transfer-encoding: chunked\x0c", body=_CHUNKED)),
    Shape("te-nul", _post(b"transfer-encoding: chunked\x00", body=_CHUNKED)),
    Shape("te-no-break-space", _post(b"transfer-encoding: chunked\xa0", body=_CHUNKED), 501),
    Shape("te-trailing-comma", _post(b"transfer-encoding: chunked,", body=_CHUNKED), 501),
    Shape("te-empty", _post(b"transfer-encoding:", body=_CHUNKED), 501),
    Shape("te-empty-with-length", _post(b"transfer-encoding:", b"content-length: 17", body=_BODY)),
    Shape(
        "te-http-1.0",
        _post(b"transfer-encoding: chunked", body=_CHUNKED, line=b"POST /v1/chat/completions HTTP/1.0"),
    ),
    # fields that hide behind their own spelling
    Shape("space-before-colon", _post(b"content-length : 17", body=_BODY)),
    Shape("tab-before-colon", _post(b"transfer-encoding\t: chunked", body=_CHUNKED)),
    Shape("space-before-name", _post(b" content-length: 17", body=_BODY)),
    Shape("folded", _post(b"x: a", b" content-length: 17", body=_BODY)),
    Shape("folded-te", _post(b"transfer-encoding:", b"\tchunked", body=_CHUNKED)),
    Shape("folded-first", b"GET /v1/models HTTP/1.1\r\n host: x\r\n\r\n"),
    Shape("no-colon", _post(b"content-length 17", body=_BODY)),
    Shape("empty-name", _post(b": 17", body=_BODY)),
    Shape("nul-in-name", _post(b"content\x00-length: 17", body=_BODY)),
    Shape("nul-in-value", _post(b"x: a\x00b", body=_BODY)),
    Shape("delete-in-value", _post(b"x: a\x7fb", body=_BODY)),
    Shape("name-not-ascii", _post(b"content-l\xc3\xa9ngth: 17", body=_BODY)),
    Shape("name-with-slash", _post(b"content/length: 17", body=_BODY)),
    # line ends
    Shape("bare-lf-in-value", _post(b"x: a\ncontent-length: 17", body=_BODY)),
    Shape("bare-cr-in-value", _post(b"x: a\rcontent-length: 17", body=_BODY)),
    Shape("cr-cr-lf", _post(b"x: a\r", body=_BODY)),
    Shape("bare-lf-everywhere", b"GET /v1/models HTTP/1.1\nhost: x\n\n"),
    Shape("bare-lf-after-request-line", b"GET /v1/models HTTP/1.1\nhost: x\r\n\r\n"),
    Shape("bare-cr-everywhere", b"GET /v1/models HTTP/1.1\rhost: x\r\r\r\n\r\n"),
    Shape("lf-crlf-end", b"GET /v1/models HTTP/1.1\r\nhost: x\n\r\n"),
    # the request line
    Shape("http-0.9", b"GET /v1/models\r\n\r\n"),
    Shape("http-2.0", b"GET /v1/models HTTP/2.0\r\nhost: x\r\n\r\n"),
    Shape("http-2-preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Shape("http-1.2", b"GET /v1/models HTTP/1.2\r\nhost: x\r\n\r\n"),
    Shape("http-1.10", b"GET /v1/models HTTP/1.10\r\nhost: x\r\n\r\n"),
    Shape("http-01.1", b"GET /v1/models HTTP/01.1\r\nhost: x\r\n\r\n"),
    Shape("http-lower-case", b"GET /v1/models http/1.1\r\nhost: x\r\n\r\n"),
    Shape("rtsp", b"PLAY /v1/models RTSP/1.0\r\nhost: x\r\n\r\n"),
    Shape("two-spaces", b"GET  /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("space-in-target", b"GET /v1/models /x HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("trailing-space", b"GET /v1/models HTTP/1.1 \r\nhost: x\r\n\r\n"),
    Shape("leading-space", b" GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("tab", b"GET\t/v1/models\tHTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("lower-case-method", b"get /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("no-method", b" /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("nul-in-target", b"GET /v1/\x00models HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("target-not-ascii", b"GET /v1/mod\xc3\xa9ls HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("fragment", b"GET /v1/models#x HTTP/1.1\r\nhost: x\r\n\r\n"),
    # whose request it is
    Shape("no-host", b"GET /v1/models HTTP/1.1\r\n\r\n"),
    Shape("two-hosts", b"GET /v1/models HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n"),
    Shape("two-equal-hosts", b"GET /v1/models HTTP/1.1\r\nhost: x\r\nHost: x\r\n\r\n"),
    Shape("host-with-path", b"GET /v1/models HTTP/1.1\r\nhost: x/y\r\n\r\n"),
    Shape("host-with-user", b"GET /v1/models HTTP/1.1\r\nhost: a@b\r\n\r\n"),
    Shape("host-with-blank", b"GET /v1/models HTTP/1.1\r\nhost: a b\r\n\r\n"),
    Shape("list-of-hosts", b"GET /v1/models HTTP/1.1\r\nhost: a, b\r\n\r\n"),
    Shape("absolute-other-host", b"GET http://y/v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("absolute-with-user", b"GET http://a@x/v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("absolute-no-authority", b"GET http:///v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("absolute-other-scheme", b"GET ftp://x/v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("authority-form", b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\n\r\n"),
    Shape("asterisk-form", b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("no-slash", b"GET v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
    Shape("two-keys", _post(b"authorization: Bearer a", b"authorization: Bearer b", body=_BODY)),
    Shape("two-content-types", _post(b"content-type: a/b", b"content-type: c/d", body=_BODY)),
    Shape("two-content-encodings", _post(b"content-encoding: gzip", b"content-encoding: gzip", body=_BODY)),
    Shape("two-expectations", _post(b"expect: 100-continue", b"expect: 100-continue", body=_BODY)),
    Shape("unknown-expectation", _post(b"expect: 200-ok", body=_BODY), 417),
    # too much of it
    Shape("endless-header", b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 66000, 431),
    Shape("endless-request-line", b"GET /" + b"a" * 66000, 431),
    Shape("many-fields", _post(*(b"x-%d: 1" % number for number in range(200))), 431),
    # no HTTP at all
    Shape("tls-client-hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64),
    Shape("smtp", b"EHLO example.org\r\n\r\n"),
    Shape("nul-bytes", b"\x00" * 64),
)
"""What the head alone gives away."""

PATHS = (
    Shape("double-slash", _get(b"/v1//models")),
    Shape("leading-double-slash", _get(b"//v1/models")),
    Shape("trailing-double-slash", _get(b"/v1/models//")),
    Shape("escaped-slash", _get(b"/v1%2Fmodels")),
    Shape("escaped-slash-lower", _get(b"/v1%2fmodels")),
    Shape("dot", _get(b"/v1/./models")),
    Shape("dot-dot", _get(b"/v1/x/../models")),
    Shape("dot-dot-end", _get(b"/v1/models/..")),
    Shape("escaped-dots", _get(b"/v1/%2e%2e/models")),
    Shape("half-escaped-dots", _get(b"/v1/.%2E/models")),
    Shape("dots-in-model-id", _get(b"/v1/models/a/../../admin")),
    Shape("escaped-dots-in-model-id", _get(b"/v1/models/a%2F..%2F..")),
    Shape("bad-escape", _get(b"/v1/models/%zz")),
    Shape("cut-escape", _get(b"/v1/models/a%2")),
    Shape("post-dot-dot", _post(b"content-length: 17", body=_BODY, line=b"POST /v1/x/../sleep HTTP/1.1")),
    Shape("post-double-slash", _post(b"content-length: 17", body=_BODY, line=b"POST /v1//sleep HTTP/1.1")),
    Shape("backslash", _post(b"content-length: 17", body=_BODY, line=b"POST /v1\\..\\sleep HTTP/1.1"), 404),
    Shape("semicolon", _post(b"content-length: 17", body=_BODY, line=b"POST /v1/x;/../sleep HTTP/1.1")),
    Shape("escaped-letter", _post(b"content-length: 17", body=_BODY, line=b"POST /v1/%73leep HTTP/1.1"), 404),
    Shape("absolute-dot-dot", b"GET http://x/v1/../admin HTTP/1.1\r\nhost: x\r\n\r\n"),
)
"""Paths that an engine could read as other ones."""

_TE = b"transfer-encoding: chunked"
CHUNKS = (
    Shape("size-plus", _post(_TE, body=b"+5\r\nhello\r\n0\r\n\r\n")),
    Shape("size-minus", _post(_TE, body=b"-5\r\nhello\r\n0\r\n\r\n")),
    Shape("size-0x", _post(_TE, body=b"0x5\r\nhello\r\n0\r\n\r\n")),
    Shape("size-underscore", _post(_TE, body=b"1_1\r\n" + _BODY + b"\r\n0\r\n\r\n")),
    Shape("size-empty", _post(_TE, body=b"\r\nhello\r\n0\r\n\r\n")),
    Shape("size-blank-before", _post(_TE, body=b" 5\r\nhello\r\n0\r\n\r\n")),
    Shape("size-blank-after", _post(_TE, body=b"5 \r\nhello\r\n0\r\n\r\n")),
    Shape("size-not-hex", _post(_TE, body=b"5g\r\nhello\r\n0\r\n\r\n")),
    Shape("size-wraps-64-bit", _post(_TE, body=b"10000000000000005\r\nhello\r\n0\r\n\r\n")),
    Shape("size-without-end", _post(_TE, body=b"5" * 300)),
    Shape("size-nul", _post(_TE, body=b"5\x00\r\nhello\r\n0\r\n\r\n")),
    Shape("size-bare-lf", _post(_TE, body=b"5\nhello\n0\n\n")),
    Shape("size-bare-cr", _post(_TE, body=b"5\rhello\r0\r\r")),
    Shape("extension-bare-lf", _post(_TE, body=b"5;a\nhello\r\n0\r\n\r\n")),
    Shape("extension-bare-cr", _post(_TE, body=b"5;a\rb\r\nhello\r\n0\r\n\r\n")),
    Shape("extension-nul", _post(_TE, body=b"5;\x00\r\nhello\r\n0\r\n\r\n")),
    Shape("chunk-too-long", _post(_TE, body=b"5\r\nhellohello\r\n0\r\n\r\n")),
    Shape("chunk-ends-bare-lf", _post(_TE, body=b"5\r\nhello\n0\r\n\r\n")),
    Shape("chunk-ends-bare-cr", _post(_TE, body=b"5\r\nhello\r0\r\n\r\n")),
    Shape("chunk-too-large", _post(_TE, body=b"fffffffffffffff\r\n" + b"a" * 4096), 413),
    Shape("trailer-folded", _post(_TE, body=b"0\r\na: b\r\n c\r\n\r\n")),
    Shape("trailer-no-colon", _post(_TE, body=b"0\r\nabc\r\n\r\n")),
    Shape("trailer-bare-lf", _post(_TE, body=b"0\r\na: b\nc: d\r\n\r\n")),
    Shape("trailer-space-before-colon", _post(_TE, body=b"0\r\na : b\r\n\r\n")),
    Shape("trailer-endless", _post(_TE, body=b"0\r\na: " + b"b" * 9000)),
)
"""Chunked bodies that are none."""

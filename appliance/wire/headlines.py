"""The lines of an HTTP/1.1 head, each judged by a pattern that leaves no room for two readings: no bare CR or LF, no
folding, no control characters, no space before a colon, nothing but HTTP/1.0 and 1.1.

The lines of a client repeat from request to request, all but one or two. A line that was judged once is found again by
its bytes, so a head of eight lines costs eight dictionary look-ups.
"""

from __future__ import annotations

import re

MAX_FIELDS = 128
MAX_TARGET_BYTES = 8192
"""Targets are kept with the records of requests, so that one must not be as long as a head may be."""

MOST_KNOWN_LINES = 4096
LONGEST_KNOWN_LINE = 512
KNOWN_BYTES = 16 << 20
"""Bounds of the three memories of lines, and what they hold together when somebody fills them on purpose (a line is
kept beside its parts, and a request line has three). A full one is emptied, since what repeats is soon back."""

_REQUEST_LINE = re.compile(rb"([A-Z]{1,24}) ([!-~]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_FIELD_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")

Fields = list[tuple[bytes, bytes]]
"""Header fields in their order: lower-case name, value without surrounding blanks."""
KnownFields = tuple[tuple[bytes, bytes], ...]
"""The same of a head that was judged; others may share them."""


class BadHead(Exception):
    """A head that is refused. `status` is the answer it deserves."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


_known_fields: dict[bytes, tuple[bytes, bytes]] = {}
known_requests: dict[bytes, tuple[bytes, bytes, bytes, bytes, int]] = {}
known_statuses: dict[bytes, tuple[int, int]] = {}


def fields_of(lines: list[bytes], once: frozenset[bytes]) -> tuple[Fields, dict[bytes, bytes]]:
    """The fields below the first line, in order and by name."""
    known = _known_fields
    fields: Fields = [known.get(line) or _field(line) for line in lines[1:]]
    by_name = dict(fields)
    if len(by_name) != len(fields):
        _check_repeated(fields, by_name, once)
    if len(fields) > MAX_FIELDS:
        raise BadHead(f"more than {MAX_FIELDS} header fields", status=431)
    return fields, by_name


def _field(line: bytes) -> tuple[bytes, bytes]:
    match = _FIELD_LINE.fullmatch(line)
    if match is None:
        raise BadHead(_why_malformed(line))
    field = match[1].lower(), match[2].rstrip(b" \t")
    if len(line) <= LONGEST_KNOWN_LINE:
        if len(_known_fields) >= MOST_KNOWN_LINES:
            _known_fields.clear()
        _known_fields[line] = field
    return field


def request_line(line: bytes) -> tuple[bytes, bytes, bytes, bytes, int]:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        if re.search(rb" HTTP/[0-9.]+$", line) and not re.search(rb" HTTP/1\.[01]$", line):
            raise BadHead("only HTTP/1.0 and HTTP/1.1 are spoken here")
        raise BadHead("malformed request line")
    target = match[2]
    if len(target) > MAX_TARGET_BYTES:
        raise BadHead(f"request target larger than {MAX_TARGET_BYTES} bytes", status=431)
    if b"#" in target:
        raise BadHead("a request target has no fragment")
    path, _, query = target.partition(b"?")
    known = match[1], target, path, query, match[3][0] - 48
    if len(line) <= LONGEST_KNOWN_LINE:
        if len(known_requests) >= MOST_KNOWN_LINES:
            known_requests.clear()
        known_requests[line] = known
    return known


def status_line(line: bytes) -> tuple[int, int]:
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise BadHead("malformed status line")
    known = match[1][0] - 48, int(match[2])
    if len(line) <= LONGEST_KNOWN_LINE:
        if len(known_statuses) >= MOST_KNOWN_LINES:
            known_statuses.clear()
        known_statuses[line] = known
    return known


def _check_repeated(fields: Fields, by_name: dict[bytes, bytes], once: frozenset[bytes]) -> None:
    """Refuse what must not be repeated; a repeated Connection means all its values."""
    names = [name for name, _ in fields]
    for name in once:
        if names.count(name) > 1:
            raise BadHead(f"more than one {name.decode()} header")
    if names.count(b"connection") > 1:
        by_name[b"connection"] = b",".join(value for name, value in fields if name == b"connection")


def length_of(value: bytes) -> int:
    # isdigit on bytes is ASCII only; the bound keeps a length of a thousand digits from becoming an integer
    if not value.isdigit() or len(value) > 18:
        raise BadHead("malformed content-length")
    return int(value)


def keeps_alive(connection: bytes, minor: int) -> bool:
    if not connection:
        return minor == 1
    tokens = [token.strip(b" \t").lower() for token in connection.split(b",")]
    if b"close" in tokens:
        return False
    return minor == 1 or b"keep-alive" in tokens


def _why_malformed(line: bytes) -> str:
    if not line:
        return "an empty header line"
    if b"\r" in line or b"\n" in line:
        return "a bare CR or LF in the request header"
    if line[:1] in b" \t":
        return "a folded header line"
    return "malformed header field"

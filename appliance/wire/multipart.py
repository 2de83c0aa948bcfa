"""Forms: where the named parts of a `multipart/form-data` body lie.

Read by a grammar without second readings, since the engine reads the form again with its own parser: a part that one
of us takes for `model` and the other does not would run another model than the one that was asked for and allowed.
Browsers, curl and the SDKs write nothing of what is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_PARTS = 1000
MOST_PART_HEAD_BYTES = 8192

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_QUOTED = rb'"((?:[^"\\\r\n\x00]|\\[^\r\n\x00])*)"'
_PARAMETER = re.compile(rb'[ \t]*;[ \t]*(%b)=(?:%b|([^\s;,"\x00]+))' % (_TOKEN, _QUOTED))
_END = re.compile(rb"[ \t]*;?[ \t]*")
_LINE_END = re.compile(rb"[ \t]*\r\n")
_FIELD = re.compile(rb"(%b):[ \t]*([\t\x20-\x7e\x80-\xff]*)" % _TOKEN)
_PLAIN_CODINGS = (b"7bit", b"8bit", b"binary")


def is_form(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"multipart/form-data"


def parts(body: bytes, content_type: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The parts in order: name, and where its value begins and ends. Raises ValueError, maybe after some of them."""
    boundary = b"--" + _boundary(content_type)
    delimiter = b"\r\n" + boundary
    if body.startswith(boundary):
        at = len(boundary)
    elif body.startswith(delimiter):
        at = len(delimiter)
    else:
        raise ValueError("it does not begin with its own boundary")
    for _ in range(MOST_PARTS):
        if body.startswith(b"--", at):
            return
        line_end = _LINE_END.match(body, at)
        if line_end is None:
            raise ValueError("one of its boundaries is followed by something else")
        start = line_end.end()
        head_end = body.find(b"\r\n\r\n", start - 2, start + MOST_PART_HEAD_BYTES)
        value_at = head_end + 4
        next_at = body.find(delimiter, value_at) if head_end >= 0 else -1
        if next_at < 0:
            raise ValueError("one of its parts has no end")
        yield _name(body[start:head_end]), value_at, next_at
        at = next_at + len(delimiter)
    raise ValueError(f"it has more than {MOST_PARTS} parts")


def _boundary(content_type: bytes) -> bytes:
    boundary = _parameters(content_type).get(b"boundary", b"")
    if not 1 <= len(boundary) <= 200:
        raise ValueError("its Content-Type names no boundary")
    return boundary


def _name(head: bytes) -> bytes:
    """The name in the head of a part."""
    name: bytes | None = None
    for line in head.split(b"\r\n") if head else ():
        field = _FIELD.fullmatch(line)
        if field is None:
            raise ValueError("one of its parts has a malformed header")
        match field[1].lower():
            case b"content-disposition":
                kind, semicolon, parameters = field[2].partition(b";")
                if name is not None or kind.strip().lower() != b"form-data":
                    raise ValueError("one of its parts is not form-data")
                known = _parameters(semicolon + parameters)
                name = known.get(b"name")
                if any(key.startswith(b"name*") for key in known):
                    raise ValueError("one of its parts has a name in another form than name=")
            case b"content-transfer-encoding" if field[2].strip().lower() not in _PLAIN_CODINGS:
                raise ValueError("one of its parts has a Content-Transfer-Encoding")
    if name is None:
        raise ValueError("one of its parts has no name")
    return name


def _parameters(value: bytes) -> dict[bytes, bytes]:
    """The parameters after the first `;`, names in lower case, values without their quotes. Raises ValueError."""
    at = value.find(b";")
    found: dict[bytes, bytes] = {}
    while at >= 0 and (parameter := _PARAMETER.match(value, at)) is not None:
        key = parameter[1].lower()
        if key in found:
            raise ValueError(f"a parameter is there twice: {key.decode()}")
        quoted = parameter[2]
        found[key] = parameter[3] if quoted is None else re.sub(rb"\\(.)", rb"\1", quoted)
        at = parameter.end()
    if at >= 0 and _END.fullmatch(value, at) is None:
        raise ValueError("malformed parameters")
    return found

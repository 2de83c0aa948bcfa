"""Single fields in request bodies: found in place, so that one value can be replaced and every other byte stays."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_BOUNDARY = re.compile(rb'(?:^|;)[ \t]*boundary=(?:"([^"]{1,200})"|([^\s;,"]{1,200}))', re.IGNORECASE)
_PART_NAME = re.compile(rb'(?:^|;)[ \t]*name=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
_MAX_PART_HEAD_BYTES = 8192


def top_level(body: bytes) -> Iterator[tuple[str, int]]:
    """The keys of the outermost object of valid JSON, each with the place where its value begins."""
    depth = 0
    for match in _TOKEN.finditer(body):
        token = match[0]
        first = token[:1]
        if first == b'"':
            if depth == 1 and (colon := _COLON.match(body, match.end())) is not None:
                try:
                    yield str(msgspec.json.decode(token)), colon.end()
                except msgspec.DecodeError:
                    continue
        elif first in b"{[":
            depth += 1
        else:
            depth -= 1


def locate(body: bytes, key: str) -> tuple[int, int]:
    """Where the value of a top-level string field lies in valid JSON, its quotes included. Raises KeyError."""
    for name, start in top_level(body):
        if name == key:
            match = _TOKEN.match(body, start)
            if match is not None and match[0][:1] == b'"':
                return start, match.end()
    raise KeyError(key)


def parts(body: bytes, content_type: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The named parts of a multipart form: name, and where its value begins and ends. Raises ValueError."""
    found = _BOUNDARY.search(content_type.partition(b";")[2])
    if found is None:
        raise ValueError("its Content-Type names no boundary")
    boundary = b"--" + (found[1] or found[2])
    delimiter = b"\r\n" + boundary
    if body.startswith(boundary):
        at = len(boundary)
    elif (first := body.find(delimiter)) >= 0:
        at = first + len(delimiter)
    else:
        raise ValueError("it holds none of its own boundaries")
    while not body.startswith(b"--", at):
        head_end = body.find(b"\r\n\r\n", at, at + _MAX_PART_HEAD_BYTES)
        next_at = body.find(delimiter, head_end + 2) if head_end >= 0 else -1
        if next_at < 0:
            raise ValueError("one of its parts has no end")
        for line in body[at:head_end].split(b"\r\n"):
            field, _, value = line.partition(b":")
            if field.strip().lower() == b"content-disposition":
                name = _PART_NAME.search(value.partition(b";")[2])
                if name is not None:
                    yield (name[1] if name[1] is not None else name[2]), head_end + 4, next_at
        at = next_at + len(delimiter)


def renamed(body: bytes, content_type: bytes, name: str) -> bytes:
    """The body with another `model`: only the bytes of that value change. Raises KeyError or ValueError without one."""
    if content_type.lower().startswith(b"multipart/form-data"):
        for field, start, end in parts(body, content_type):
            if field == b"model":
                return body[:start] + name.encode() + body[end:]
        raise KeyError("model")
    start, end = locate(body, "model")
    return body[:start] + msgspec.json.encode(name) + body[end:]

"""Single fields in JSON bodies: found in place, so that one value can be replaced and every other byte stays.

A body may be a hundred megabytes, and looking at it token by token in Python would hold up every other stream for as
many seconds. So nothing here walks through the whole of it: the long values (the conversation) are first cut out at the
decoder's speed, and of what is left at most `MOST_TOKENS` are looked at. A body that needs more repeats our names in a
way that no client does, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from . import multipart

MOST_TOKENS = 100_000
"""Strings and brackets that are looked at: about 50 ms."""
LONG_BYTES = 1024
"""Values of the conversation longer than this are cut out before tokens are looked at."""

_NEXT = re.compile(rb'["{}\[\]]')
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_ESCAPED_LETTER = re.compile(rb"\\u00[67][0-9A-Fa-f]")
_QUOTE, _BACKSLASH, _OPENING = ord('"'), ord("\\"), b"{["


class Unclear(ValueError):
    """A body in which a field cannot be found with reasonable effort."""


class _Long(msgspec.Struct, gc=False):
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_long = msgspec.json.Decoder(_Long)


def may_repeat(body: bytes, *names: bytes) -> bool:
    """Whether one of `names` (lower-case letters, in their quotes) could stand twice among the keys of this JSON: a
    quick look that is never wrong when it says no. Letters written as escapes count too; no honest client does that."""
    for name in names:
        if body.count(name) > 1:
            return True
    return b"\\u00" in body and _ESCAPED_LETTER.search(body) is not None


def repeated(body: bytes, *names: str) -> str | None:
    """The first of `names` that stands twice among the outermost keys of valid JSON. Raises Unclear."""
    quoted = [f'"{name}"'.encode() for name in names]
    if not may_repeat(body, *quoted):
        return None
    body, _ = _without_long(body)
    if not may_repeat(body, *quoted):
        return None
    seen: set[str] = set()
    for name, _ in _top_level(body):
        if name in names:
            if name in seen:
                return name
            seen.add(name)
    return None


def locate(body: bytes, key: str) -> tuple[int, int]:
    """Where the value of an outermost string field lies in valid JSON, its quotes included; `key` is lower-case
    letters, and there once. Raises KeyError or Unclear."""
    name = f'"{key}"'.encode()
    if not may_repeat(body, name):
        at = body.find(name)
        if at < 0 or (colon := _COLON.match(body, at + len(name))) is None:
            raise KeyError(key)
        return _string(body, colon.end(), key)
    shorter, cuts = _without_long(body)
    for found, at in _top_level(shorter):
        if found == key:
            start, end = _string(shorter, at, key)
            for place, length in reversed(cuts):
                if start > place:
                    start, end = start + length, end + length
            return start, end
    raise KeyError(key)


def renamed(body: bytes, content_type: bytes, name: str) -> bytes:
    """The body with another `model`: only the bytes of that value change. Raises KeyError or ValueError without one."""
    if multipart.is_form(content_type):
        for field, start, end in multipart.parts(body, content_type):
            if field == b"model":
                return body[:start] + name.encode() + body[end:]
        raise KeyError("model")
    start, end = locate(body, "model")
    return body[:start] + msgspec.json.encode(name) + body[end:]


def _without_long(body: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """The body with `0` in place of its long values, and the cuts: where each was made, and how many bytes it took.

    The same bytes may stand elsewhere too, where taking them out would join what they kept apart. So a cut counts only
    if the decoder then finds the `0` where it had found the value. Raises Unclear.
    """
    cuts: list[tuple[int, int]] = []
    try:
        long = _long.decode(body)
    except RecursionError:  # whoever decoded it before stood less deep
        raise Unclear("it is nested too deeply") from None
    for name in ("messages", "prompt", "input"):
        value = bytes(getattr(long, name))
        if len(value) <= LONG_BYTES:
            continue
        for at in (body.find(value), body.rfind(value)):
            shorter = body[:at] + b"0" + body[at + len(value) :]
            try:
                if bytes(getattr(_long.decode(shorter), name)) != b"0":
                    continue
            except (msgspec.MsgspecError, RecursionError):
                continue
            cuts.append((at, len(value) - 1))
            body = shorter
            break
    return body, cuts


def _top_level(body: bytes) -> Iterator[tuple[str, int]]:
    """The keys of the outermost object, each with the place where its value begins. Raises Unclear."""
    depth = at = 0
    for _ in range(MOST_TOKENS):
        token = _NEXT.search(body, at)
        if token is None:
            return
        start, at = token.span()
        if body[start] == _QUOTE:
            at = _string_end(body, start)
            if depth == 1 and (colon := _COLON.match(body, at)) is not None:
                try:
                    yield str(msgspec.json.decode(body[start:at])), colon.end()
                except msgspec.DecodeError:
                    continue  # bytes that are no text: none of our names
        elif body[start] in _OPENING:
            depth += 1
        else:
            depth -= 1
    raise Unclear("too much in it looks like the fields that are read")


def _string(body: bytes, start: int, key: str) -> tuple[int, int]:
    if body[start : start + 1] != b'"':
        raise KeyError(key)
    return start, _string_end(body, start)


def _string_end(body: bytes, start: int) -> int:
    """The index after the string that begins at `start`."""
    at = start
    for _ in range(MOST_TOKENS):
        at = body.find(b'"', at + 1)
        if at < 0:
            break
        if body[at - 1] != _BACKSLASH or not _escapes(body, start, at) & 1:
            return at + 1
    raise Unclear("a string with too many quotes in it, or without end")


def _escapes(body: bytes, start: int, end: int) -> int:
    """How many backslashes stand right before `end`."""
    width = 64
    while True:
        piece = body[max(start + 1, end - width) : end]
        count = len(piece) - len(piece.rstrip(b"\\"))
        if count < len(piece) or len(piece) < width:
            return count
        width *= 16

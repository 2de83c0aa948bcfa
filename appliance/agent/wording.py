"""Text that engines, paths and variables give us, made fit to be written down, sent, and shown on a terminal.

What the system calls text may hold any bytes, and what an engine calls JSON may hold halves of characters. Neither can
be encoded, and one such word in a report would take the record, `/status` and the link along.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

SENTENCE_CHARS = 2_000
"""Most of a reason: what an engine says of itself may be megabytes."""

_NO_CHARACTER = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n\r]*(?:\x07|\x1b\\)?")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """The text with a mark for each byte and half that is no character; the mark is the one that such bytes get where
    they are read from a file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _NO_CHARACTER.sub("\ufffd", text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text


def visible(line: str) -> str:
    """One line without anything that moves a cursor, colours, names a window or turns the direction of reading: it is
    shown on operators' terminals."""
    return _CONTROLS.sub("", _SEQUENCES.sub("", plain(line)))


def sentence(text: str) -> str:
    """A reason as it may be told: one visible line of at most SENTENCE_CHARS."""
    shown = visible(" ".join(text.split("\n")))
    return shown if len(shown) <= SENTENCE_CHARS else f"{shown[: SENTENCE_CHARS - 1]}…"


def to_json(document: Any) -> bytes:
    """The document as JSON, whatever bytes its text holds."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_plain(msgspec.to_builtins(document)))


def _plain(value: Any) -> Any:
    match value:
        case str():
            return plain(value)
        case dict():
            return {_plain(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case _:
            return value

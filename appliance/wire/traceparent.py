"""W3C trace context: the header that says which trace a request belongs to, and below which span."""

from __future__ import annotations

import re

import attrs

_VALUE = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_SAMPLED = 1


@attrs.frozen
class TraceParent:
    """`trace_id` is 16 bytes and `span_id` 8, neither all zeros; `sampled` tells that the sender records its spans."""

    trace_id: bytes
    span_id: bytes
    sampled: bool


def read(value: bytes) -> TraceParent | None:
    """The value of a `traceparent` field; None where it is malformed, which means that there is no parent.

    A version above 00 may have more after the flags, which is left unread, as the standard asks.
    """
    found = _VALUE.fullmatch(value)
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    trace_id, span_id = bytes.fromhex(trace.decode()), bytes.fromhex(span.decode())
    if not any(trace_id) or not any(span_id):
        return None
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def write(trace_id: bytes, span_id: bytes, sampled: bool) -> bytes:
    """The value that makes `span_id` the parent of what the receiver does."""
    return f"00-{trace_id.hex()}-{span_id.hex()}-{'01' if sampled else '00'}".encode()

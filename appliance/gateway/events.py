"""What one server-sent event tells of its stream: that it ended as the route says, or that the request failed.

Only asked for events that hold a telling word, so it may decode.
"""

from __future__ import annotations

import msgspec

from ..facts.call import DONE
from ..wire import sse

_FAILED = "response.failed"


class _Top(msgspec.Struct, gc=False):
    """The part of an event's data that tells what it is."""

    error: msgspec.Raw = msgspec.Raw(b"")
    kind: object = msgspec.field(default=None, name="object")
    type: object = None


_top = msgspec.json.Decoder(_Top)


def ends_stream(event: bytes, ends: tuple[str, ...]) -> bool:
    """Whether an event is the engine's own end, for a route whose streams end so (`facts.call.Route.stream_ends`)."""
    if ends == (DONE,):
        return sse.data_of(event).strip() == b"[DONE]"
    return any(end.encode() in event for end in ends) and _type_of(event) in ends


def is_response_failed(event: bytes) -> bool:
    """The responses route's own end of a request that failed."""
    return b"response.failed" in event and _type_of(event) == _FAILED


def tells_failure(event: bytes) -> bool:
    """Whether an event says that its request failed: a top-level error, nested or flat, or a type that means one."""
    if event.startswith(b"error:") or sse.type_of(event) in (b"error", b"response.failed"):
        return True  # the first: a field of that name, by which llama.cpp told it until 2025
    try:
        top = _top.decode(sse.data_of(event))
    except (msgspec.MsgspecError, RecursionError):
        return False
    return bytes(top.error) not in (b"", b"null") or top.type in ("error", _FAILED) or top.kind == "error"


def _type_of(event: bytes) -> str:
    """The event's type: its `event:` field, else the `type` of its data."""
    named = sse.type_of(event)
    if named:
        return named.decode("latin-1")
    try:
        return str(_top.decode(sse.data_of(event)).type)
    except (msgspec.MsgspecError, RecursionError):
        return ""

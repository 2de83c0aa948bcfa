"""One request, as the door read it and the gateway serves it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import msgspec

Fields = list[tuple[bytes, bytes]]
"""Header fields in their order, names in lower case."""


DONE = "[DONE]"


@attrs.frozen
class Route:
    """What a path means to the gateway.

    `stream_ends` is how the engine's own end of an event stream shows: `DONE` for `data: [DONE]`, otherwise the event
    types that end it; empty where no end is defined and a clean end of the body is one. `anthropic` selects the error
    shape of `/v1/messages`.
    """

    name: str
    stream_ends: tuple[str, ...] = ()
    anthropic: bool = False


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Whose request it is. With auth off everybody is the same caller, told apart by session or address only.

    `tenant` is whose turn it takes within its `band`; `session` what the client calls its session, b"" without one. A
    msgspec struct, since one is made for every request.
    """

    key_id: str = ""
    tenant: str = ""
    band: str = "silver"
    session: bytes = b""


ABSENT = msgspec.Raw(b"")
"""A field of a body that is not there: always this object, so that looking for it is one comparison."""


class Ask(msgspec.Struct, gc=False):
    """The few fields of a request's body that are read. Everything else stays raw and reaches the engine byte for byte.

    A msgspec struct and not an attrs class because it is decoded straight from the body, which halves the cost of a
    request's parsing. `model` is checked by the door and is a string afterwards; the rest is raw JSON, judged
    leniently: a wrong type in a field that only the engine understands is the engine's to refuse.
    """

    model: object = None
    stream: msgspec.Raw = ABSENT
    stream_options: msgspec.Raw = ABSENT
    max_tokens: msgspec.Raw = ABSENT
    max_completion_tokens: msgspec.Raw = ABSENT
    n: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT
    user: msgspec.Raw = ABSENT
    session_id: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT


class Call(msgspec.Struct, eq=False, gc=False):
    """One request on its way through the gateway.

    Written once by the door (or the playground) and only read afterwards. A msgspec struct: a frozen attrs class of
    this width costs 3 microseconds to make, a thirtieth of what a whole request may cost.

    `method` and `target` go to the engine as they are; `headers` holds the request's fields by lower-case name. `model`
    is the name asked for. `arrived` is in seconds of `time.monotonic`. `marks` are the routers it has come through.
    """

    request_id: bytes
    method: bytes
    target: bytes
    route: Route
    headers: Mapping[bytes, bytes]
    body: bytes
    ask: Ask
    model: str
    stream: bool
    caller: Caller
    arrived: float
    marks: tuple[str, ...] = ()

"""What an exchange with an endpoint is given: the deadlines of the settings, as the road reads them."""

from __future__ import annotations

import msgspec

from ..facts.settings import Deadlines


class Promises(msgspec.Struct, frozen=True, array_like=True):
    """The deadlines of an exchange, in seconds; `stream_total_s` 0: none. `sse_ping_before_first_token` sends comments
    to a client that waits for its first event, so that its answer has a status before the engine's is known."""

    dial_s: float
    first_token_s: float
    idle_s: float
    total_s: float
    stream_total_s: float
    write_stall_s: float
    sse_ping_s: float
    sse_ping_before_first_token: bool

    @classmethod
    def of(cls, deadlines: Deadlines) -> Promises:
        return cls(
            deadlines.dial_s,
            deadlines.first_token_s,
            deadlines.idle_s,
            deadlines.total_s,
            deadlines.stream_total_s,
            deadlines.write_stall_s,
            deadlines.sse_ping_s,
            deadlines.sse_ping_before_first_token,
        )

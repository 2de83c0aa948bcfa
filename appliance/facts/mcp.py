"""What the merge of tool servers works from: where each one is, and what may be set about it."""

from __future__ import annotations

import attrs

NAMINGS = ("prefix", "flat")
"""How tools of many groups share one list: `<group>__<tool>`, or each name once with an argument `__group`."""


MAX_BODY_BYTES = 16 << 20


@attrs.frozen
class Source:
    """One group's tool server.

    `url` is an http or https address with its path, as announced. `headers` go with every request to it (a key of its
    own, for example), and are the only credentials it ever gets: what clients show at the door stays there.
    """

    group: str
    url: str
    headers: tuple[tuple[str, str], ...] = attrs.field(default=(), repr=False)


@attrs.frozen
class McpSettings:
    """Bounds and shapes of the merge; times in seconds.

    The defaults of the times are those of the routers this one takes the place of (TOOLS_TTL_S, MCP_TIMEOUT_S, and a
    fixed 10 for lists). `ping_s` is how long a stream may be silent. `max_body_bytes` bounds a client's request, and
    each answer and each event of a tool server. `origins` are web origins, besides those that name this router by its
    IP address, whose pages may ask.
    """

    naming: str = attrs.field(default="prefix", validator=attrs.validators.in_(NAMINGS))
    tools_ttl_s: float = 60.0
    call_timeout_s: float = 180.0
    list_timeout_s: float = 10.0
    ping_s: float = 15.0
    max_body_bytes: int = MAX_BODY_BYTES
    origins: tuple[str, ...] = ()

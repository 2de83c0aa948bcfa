"""Names by which routers of announced groups are set up elsewhere: each is another name for keys of ours.

A router that takes the place of such a one is started with the same environment. There an unset or blank variable means
the default, except for MENTAT_DAEMONS, where a blank one means no daemon at all. A value that cannot be read is a fault
here; the others would silently take the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import attrs

Pairs = Iterable[tuple[str, object]]
"""Dotted keys with their values."""


class Unread(ValueError):
    """A text that is no value; the message completes "expected ..."."""


@attrs.frozen
class Variable:
    """`read` gives the keys that a text stands for. Raises Unread."""

    read: Callable[[str], Pairs]
    empty_counts: bool = False


def _text(key: str) -> Variable:
    return Variable(lambda text: [(key, text)])


def _list(key: str, *, empty_counts: bool = False) -> Variable:
    return Variable(
        lambda text: [(key, [item.strip() for item in text.split(",") if item.strip()])], empty_counts=empty_counts
    )


def _seconds(key: str) -> Variable:
    return Variable(lambda text: [(key, _number(text, "a number of seconds above 0", lambda s: s > 0))])


def _number(text: str, wanted: str, fits: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        raise Unread(wanted) from None
    if not math.isfinite(number) or not fits(number):
        raise Unread(wanted)
    return number


def _port(text: str, least: int = 0) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text[:6]) <= 65535:
        raise Unread(f"a port from {least} to 65535")
    return int(text)


def _peers(text: str) -> Pairs:
    if text not in ("0", "1"):
        raise Unread("0 or 1")
    return [("groups.discover_peers", text == "1")]


def _wait(text: str) -> Pairs:
    return [("groups.model_wait_s", _number(text, "a number of seconds, 0 or more", lambda s: s >= 0))]


def _pings(text: str) -> Pairs:
    """There: comments from the first byte on that the engine does not send; 0: none."""
    seconds = _number(text, "a number of seconds, 0 or more", lambda s: s >= 0)
    yield "deadlines.sse_ping_before_first_token", seconds > 0
    if seconds:
        yield "deadlines.sse_ping_s", seconds


NAMES: Mapping[str, Variable] = {
    "SERVE_PORT": Variable(lambda text: [("server.listen", [f"0.0.0.0:{_port(text, 1)}"])]),
    "MENTAT_DAEMONS": _list("groups.daemons", empty_counts=True),
    "MENTAT_ANNOUNCE_PORT": Variable(lambda text: [("groups.announce_port", _port(text))]),
    "MENTAT_ANNOUNCE_INTERVAL_S": _seconds("groups.announce_interval_s"),
    "MENTAT_ANNOUNCE_ADDR": _list("groups.announce_addrs"),
    "MENTAT_SECRET": _text("groups.secret"),
    "MENTAT_SECRET_FILE": _text("groups.secret_file"),
    "MENTAT_UNIVERSE": _text("groups.universe"),
    "ALLOWED_SOURCES": _list("groups.allowed_sources"),
    "DISCOVER_PEERS": Variable(_peers),
    "POLL_INTERVAL_S": _seconds("groups.poll_interval_s"),
    "PROBE_INTERVAL_S": _seconds("groups.probe_interval_s"),
    "PROBE_TIMEOUT_S": _seconds("groups.probe_timeout_s"),
    "PROBE_FRESH_S": _seconds("groups.probe_fresh_s"),
    "PROBE_PROMOTE_S": _seconds("groups.probe_promote_s"),
    "SERVING_TIMEOUT_S": _seconds("groups.serving_timeout_s"),
    "MODEL_WAIT_S": Variable(_wait),
    "SSE_KEEPALIVE_S": Variable(_pings),
    "MODEL_TTL_S": _seconds("groups.model_ttl_s"),
    "MCP_TIMEOUT_S": _seconds("groups.mcp_timeout_s"),
    "TOOLS_TTL_S": _seconds("groups.tools_ttl_s"),
}
"""By the name of the variable. `ALLOWED_SOURCES` and the like are common words: they count because the routers whose
place this one takes read them under exactly these names."""

"""Which routers of this kind a request has come through: their marks in its `Via` header (RFC 9110, 7.6.3).

    via: 1.1 appliance-0f1e2d3c4b5a6978, 1.1 proxy.example

A router may be announced as a group of another one, and that one of the first. What it sends to groups therefore says
where it has been; a router answers such a request without asking further routers, so that none goes round in a circle
and nothing is offered by one that has it from the other. Marks of others (proxies) are not read, and not passed on.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

FIELD = b"via"
OWN = f"appliance-{secrets.token_hex(8)}"
"""This process."""
MOST = 8
"""Routers that a request may have come through. It takes two that ask each other as endpoints of their files."""
_MARK = re.compile(r"(?:^|,)[ \t]*(?:HTTP/)?[0-9](?:\.[0-9])?[ \t]+(appliance-[0-9a-f]{16})(?![^ \t,])")


def marks(values: Iterable[str]) -> tuple[str, ...]:
    """The routers in the values of all `Via` fields, the first one first."""
    return tuple(mark for value in values for mark in _MARK.findall(value))


def marks_in(fields: Iterable[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """The same, out of header fields with names in lower case."""
    return marks(value.decode("latin-1") for name, value in fields if name == FIELD)


def value(before: Iterable[str] = ()) -> str:
    """What is sent on: those that were there before, and this one."""
    return ", ".join(f"1.1 {mark}" for mark in (*before, OWN))


def goes_round(before: tuple[str, ...]) -> bool:
    """Whether a request that came through these has been here already, or will never arrive anywhere."""
    return OWN in before or len(before) > MOST

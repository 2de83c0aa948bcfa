"""Arguments that a modern tool server wants repeated in headers (`x-mcp-header` in its schema).

Clients of the modern era send these headers themselves. For one of the handshake era, which has never heard of them, we
do it, or a modern server would refuse its calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .protocol import header_value

ANNOTATION = "x-mcp-header"
DEPTH = 32
"""Objects inside objects that are looked into; deeper there are no arguments that anybody writes."""

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def param_headers(schema: object, arguments: object) -> dict[str, str]:
    """The headers that go with `arguments`, by lower-case name. Arguments that are absent or null have none."""
    return {
        f"mcp-param-{token.lower()}": header_value(text)
        for token, text in _annotated(schema, arguments, DEPTH)
        if _TOKEN.fullmatch(token)
    }


def _annotated(schema: object, arguments: object, depth: int) -> Iterator[tuple[str, str]]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or not isinstance(arguments, dict) or not depth:
        return
    for name, inner in properties.items():
        given = arguments.get(name)
        if given is None or not isinstance(inner, dict):
            continue
        token = inner.get(ANNOTATION)
        text = _shown(given)
        if isinstance(token, str) and text is not None:
            yield token, text
        yield from _annotated(inner, given, depth - 1)


def _shown(given: Any) -> str | None:
    if isinstance(given, bool):
        return "true" if given else "false"
    return str(given) if isinstance(given, str | int | float) else None

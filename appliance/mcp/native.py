"""Tools of the router itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

SERVE_STATUS = "serve_status"

TOOLS: tuple[Mapping[str, object], ...] = (
    {
        "name": SERVE_STATUS,
        "description": "What this router serves and watches: groups with their health and why they are not healthy, "
        "models, endpoints and daemons. The same document as /status.json.",
        "inputSchema": {"type": "object", "properties": {}},
    },
)
"""One row per tool; `answer` runs each of them."""


def answer(name: str, status: Callable[[], Mapping[str, Any]]) -> Mapping[str, object]:
    """The result of one of `TOOLS`."""
    assert name == SERVE_STATUS
    text = msgspec.json.format(msgspec.json.encode(status()), indent=2).decode()
    return {"content": [{"type": "text", "text": text}], "isError": False}

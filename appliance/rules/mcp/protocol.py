"""The words of the Model Context Protocol: versions, codes, headers.

Two eras are in the field. In the *handshake* era a client says `initialize` first, may be given a session id, and names
the agreed version in a header from then on. In the *modern* era (2026-07-28) every request stands alone: version and
capabilities travel in `params._meta`, method and name are repeated in headers, and there is no session.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
NEWEST_HANDSHAKE = HANDSHAKE_VERSIONS[-1]
MODERN = "2026-07-28"

VERSION_FIELD = "mcp-protocol-version"
SESSION_FIELD = "mcp-session-id"
METHOD_FIELD = "mcp-method"
NAME_FIELD = "mcp-name"
PARAM_FIELDS = "mcp-param-"

META_VERSION = "io.modelcontextprotocol/protocolVersion"
META_CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
META_CLIENT = "io.modelcontextprotocol/clientInfo"
META_SERVER = "io.modelcontextprotocol/serverInfo"
META_LOG_LEVEL = "io.modelcontextprotocol/logLevel"
META_PREFIX = "io.modelcontextprotocol/"
"""What belongs to one hop and means nothing in the other era."""

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
HEADER_MISMATCH = -32020
MISSING_CAPABILITY = -32021
UNSUPPORTED_VERSION = -32022

_STATUS: Mapping[int, int] = {
    PARSE_ERROR: 400,
    INVALID_REQUEST: 400,
    INVALID_PARAMS: 400,
    HEADER_MISMATCH: 400,
    MISSING_CAPABILITY: 400,
    UNSUPPORTED_VERSION: 400,
    METHOD_NOT_FOUND: 404,
}

NAMED_BY: Mapping[str, str] = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
"""Which parameter of a method the header `mcp-name` repeats."""


def http_status(code: int, *, modern: bool) -> int:
    """The HTTP status of an answer that is a JSON-RPC error. In the handshake era an error is an ordinary answer."""
    return _STATUS.get(code, 200) if modern else 200


def negotiated(asked: object) -> str:
    """The version an `initialize` is answered with: the one asked for where it is one, else our newest of that era."""
    return asked if isinstance(asked, str) and asked in HANDSHAKE_VERSIONS else NEWEST_HANDSHAKE


def header_value(text: str) -> str:
    """`text` as the value of a header field: as it is where it survives, else in base64 with a mark round it."""
    plain = all(" " <= char <= "~" for char in text) and text == text.strip() and not _marked(text)
    return text if plain else f"=?base64?{base64.b64encode(text.encode('utf-8', 'replace')).decode()}?="


def header_text(value: str) -> str | None:
    """What `header_value` made of a text, back again; None where the mark holds no proper base64 of UTF-8."""
    if not _marked(value):
        return value
    payload = value[9:-2]
    try:
        decoded = base64.b64decode(payload, validate=True)
        return decoded.decode() if base64.b64encode(decoded).decode() == payload else None
    except (binascii.Error, ValueError):
        return None


def _marked(value: str) -> bool:
    return len(value) >= 11 and value.startswith("=?base64?") and value.endswith("?=")

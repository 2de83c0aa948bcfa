"""What a client's request is, judged before anything is done for it.

As strict as the official servers where a mistake would be carried on (versions, ids, headers against body, foreign
origins), and more tolerant where nothing is lost by it: a missing Accept or Content-Type is fine, for the routers this
one takes the place of ignored both.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

import attrs

from appliance.facts.errors import Refusal

from . import protocol
from .messages import Message, NotMessage, error, read, taken_apart, value

_JSON = "application/json"
_EVENTS = "text/event-stream"
_ROUTING = (protocol.VERSION_FIELD, protocol.METHOD_FIELD, protocol.NAME_FIELD)
VERSIONS = (*protocol.HANDSHAKE_VERSIONS, protocol.MODERN)


@attrs.frozen
class Ask:
    """A message of a client that may be answered.

    `session` is what the client calls its session, "" without one. `plain` and `streams` tell whether it takes JSON
    and events; one of them holds. `fields` are all header fields by lower-case name.
    """

    message: Message
    modern: bool
    session: str
    plain: bool
    streams: bool
    fields: dict[str, str]


@attrs.frozen
class Rejected:
    """A message that is wrong in itself: the status, and a JSON-RPC error as the body."""

    status: int
    body: bytes


def judge(
    method: str, fields: Sequence[tuple[str, str]], body: bytes, *, origins: Collection[str], most_bytes: int
) -> Ask | Rejected:
    """A request to the endpoint; `fields` in any case and order. Raises Refusal for what is wrong about its HTTP."""
    by_name = {name.lower(): text for name, text in fields}
    origin = by_name.get("origin")
    if origin is not None and not own_origin(origin, by_name.get("host", ""), origins):
        raise Refusal(403, "origin_not_permitted", "web pages of other sites may not use the tools here")
    if method != "POST":
        raise Refusal(405, "method_not_allowed", "/mcp takes POST", headers=(("Allow", "POST, DELETE"),))
    if len(body) > most_bytes:
        raise Refusal(413, "body_too_large", f"request body over {most_bytes} bytes", should_retry=False)
    plain, streams = accepted(by_name.get("accept", ""))
    if not (plain or streams):
        raise Refusal(406, "not_acceptable", f"the answer is {_JSON} or {_EVENTS}: accept both")
    content = by_name.get("content-type", _JSON).partition(";")[0].strip().lower()
    if content != _JSON and not content.endswith("+json"):
        raise Refusal(415, "unsupported_media_type", f"the body is {_JSON}")
    version = by_name.get(protocol.VERSION_FIELD, "")
    modern = version == protocol.MODERN
    try:
        message = read(body)
    except NotMessage as wrong:
        return Rejected(400, error(None, wrong.code, str(wrong)))
    if version and version not in VERSIONS and message.method != "initialize":
        return _rejected(
            message,
            protocol.UNSUPPORTED_VERSION,
            f"version {version[:40]} is not spoken here",
            {"supported": list(VERSIONS), "requested": version[:200]},
        )
    if modern:
        wrong_part = _wrong_in_modern(message, by_name, fields)
        if wrong_part is not None:
            return wrong_part
    session = "" if modern else by_name.get(protocol.SESSION_FIELD, "")[:200]
    return Ask(message, modern, session, plain, streams, by_name)


def own_origin(origin: str, host: str, origins: Collection[str]) -> bool:
    """Whether a page of `origin` may ask: one that is named in `origins`, or one of this router's own under its IP
    address or localhost. Its own under a name is not enough, since any site can give its name our address."""
    if origin in origins:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or not host or parts.netloc.lower() != host.lower():
        return False
    name = parts.hostname or ""
    return name == "localhost" or _is_address(name)


def accepted(accept: str) -> tuple[bool, bool]:
    """Whether JSON and whether events are accepted; both where nothing is said."""
    kinds = {part.partition(";")[0].strip().lower() for part in accept.split(",") if not _refused(part)} - {""}
    if not kinds and not accept.strip():
        return True, True
    return bool(kinds & {"*/*", "application/*", _JSON}), bool(kinds & {"*/*", "text/*", _EVENTS})


def _wrong_in_modern(message: Message, by_name: dict[str, str], fields: Sequence[tuple[str, str]]) -> Rejected | None:
    if message.is_answer:
        return Rejected(400, error(None, protocol.INVALID_REQUEST, "answers are not posted in this version"))
    if not message.is_request:
        return None
    names = [name.lower() for name, _ in fields]
    for name in _ROUTING:
        if names.count(name) > 1:
            return _rejected(message, protocol.HEADER_MISMATCH, f"{name} is given twice")
    params = message.params or {}
    meta = taken_apart(params.get("_meta"))
    missing = [key for key in (protocol.META_VERSION, protocol.META_CAPABILITIES) if meta is None or key not in meta]
    if meta is None or missing:
        return _rejected(message, protocol.INVALID_PARAMS, f"params._meta lacks {' and '.join(missing)}")
    if value(meta[protocol.META_VERSION]) != protocol.MODERN:
        return _rejected(message, protocol.HEADER_MISMATCH, f"{protocol.VERSION_FIELD} and params._meta disagree")
    if by_name.get(protocol.METHOD_FIELD) != message.method:
        return _rejected(message, protocol.HEADER_MISMATCH, f"{protocol.METHOD_FIELD} and the body's method disagree")
    key = protocol.NAMED_BY.get(message.method)
    named = value(params.get(key)) if key is not None else None
    if isinstance(named, str) and protocol.header_text(by_name.get(protocol.NAME_FIELD, "")) != named:
        return _rejected(message, protocol.HEADER_MISMATCH, f"{protocol.NAME_FIELD} and params.{key} disagree")
    return None


def _rejected(message: Message, code: int, text: str, data: object = None) -> Rejected:
    return Rejected(400, error(message.id, code, text, data))


def _refused(part: str) -> bool:
    """`;q=0`: named to say no."""
    quality = part.partition(";q=")[2].partition(";")[0].strip()
    try:
        return bool(quality) and float(quality) == 0
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

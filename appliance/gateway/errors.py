"""Errors as clients get them: an engine's own, untouched where clients understand its shape, and ours."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from ..facts.call import Fields
from ..facts.errors import Refusal

_JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")


@attrs.define(eq=False)
class ErrorAnswer(Exception):
    """An engine's answer with an error status (400 and up), whole, before anything was passed on; `fields` are those
    that may go on."""

    status: int
    fields: Fields
    body: bytes


def shaped_error(answer: ErrorAnswer, *, anthropic: bool) -> tuple[int, Fields, bytes]:
    """An engine's error as the client gets it: untouched where it has the route's shape, made so otherwise.

    A 401 or 403 speaks of our key for the engine, which the caller can do nothing about: it becomes a 502.
    """
    if answer.status in (401, 403):
        refused = "the engine refused this router's key: set api_key_file of the endpoint"
        return 502, [_JSON], error_body(502, "upstream_failed", refused, anthropic=anthropic)
    encoded = any(name == b"content-encoding" and value != b"identity" for name, value in answer.fields)
    value = {} if encoded else _object(answer.body)
    error = value.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        if value.get("type") == "error" if anthropic else error.keys() >= _KEYS:
            return answer.status, answer.fields, answer.body
        said = error
    else:
        said = {**value, "message": _message(answer, value, encoded)}
    kept = [field for field in answer.fields if field[0] not in (b"content-type", b"content-encoding", b"etag")]
    kind = _type_of(answer.status, anthropic=anthropic)
    if anthropic:
        body = msgspec.json.encode({"type": "error", "error": {"type": kind, "message": said["message"]}})
    else:
        # what the engine says beyond the four keys (how long a prompt may be) is of use, if it was said in the error
        names = said.keys() if said is error else said.keys() & _KEYS
        more = {name: said[name] for name in names if said[name] is not None}
        told = {"message": "", "type": kind, "param": None, "code": "engine_error"} | more
        body = msgspec.json.encode({"error": told})
    return answer.status, [_JSON, *kept], body


_KEYS = frozenset(("message", "type", "param", "code"))


def _message(answer: ErrorAnswer, value: dict[str, Any], encoded: bool) -> str:
    """What an error in some other shape says, in a sentence."""
    error = value.get("error")
    if not isinstance(error, str) or not error:
        error = None
    inner = value["error"] if isinstance(value.get("error"), dict) else value
    message: object = inner.get("message") or error or inner.get("detail")
    if not message and not encoded and answer.body.lstrip()[:1] != b"<":  # a page tells nobody anything
        message = answer.body.decode("utf-8", "replace")[:500].strip()
    if not message:
        return f"the engine answered {answer.status} without saying why"
    return message if isinstance(message, str) else msgspec.json.encode(message).decode()


_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def _type_of(status: int, *, anthropic: bool) -> str:
    if anthropic:
        return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(status: int, code: str, message: str, *, param: str | None = None, anthropic: bool = False) -> bytes:
    """The body of a refusal; on `/v1/messages` Anthropic's."""
    kind = _type_of(status, anthropic=anthropic)
    if anthropic:
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_event(what: Refusal | ErrorAnswer, *, anthropic: bool = False) -> bytes:
    """The same as a server-sent event, for a stream whose head has left: a refusal of ours, or an engine's error."""
    if isinstance(what, ErrorAnswer):
        # one line of data: JSON has line ends only between its tokens
        body = shaped_error(what, anthropic=anthropic)[2].replace(b"\r", b" ").replace(b"\n", b" ")
    else:
        body = error_body(what.status, what.code, what.message, anthropic=anthropic)
    return b"event: error\ndata: %b\n\n" % body if anthropic else b"data: %b\n\n" % body


_STATUS_OF_TYPE = {
    "invalid_request_error": 400, "authentication_error": 401, "permission_error": 403, "not_found_error": 404,
    "request_too_large": 413, "rate_limit_error": 429, "overloaded_error": 529, "api_error": 500,
}  # fmt: skip


def error_of_event(data: bytes) -> ErrorAnswer:
    """An event's error as the answer it should have been: by the status in it, else by its type, else a 502."""
    value = _object(data)
    error = value.get("error", value)
    status = 0
    if isinstance(error, dict):
        for said in (error.get("status"), error.get("code")):
            if isinstance(said, int) and 400 <= said <= 599:
                status = said
        kind = error.get("type")
        status = status or (_STATUS_OF_TYPE.get(kind, 0) if isinstance(kind, str) else 0)
    return ErrorAnswer(status or 502, [_JSON], data)


def _object(data: bytes) -> dict[str, Any]:
    """What the bytes say if they are a JSON object, else an empty one."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

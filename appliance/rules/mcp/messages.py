"""JSON-RPC messages: cut open no further than needed, and put together again.

Arguments and results stay the bytes they were (`msgspec.Raw`), so that what passes through here is not rounded,
re-ordered or escaped differently on its way.

To skip 16 MiB of JSON takes 20 ms. To make a dictionary of a million fields takes seconds, in which the router serves
nobody, so no more than `MOST_FIELDS` are ever taken out of one object, and no large value is made of what should be a
word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from . import protocol

Fields = dict[str, msgspec.Raw]
Id = int | str

MOST_FIELDS = 10_000
"""Of one object that is taken apart; the largest that anybody means have some dozens."""
MOST_VALUE_BYTES = 64 << 10
"""Of a list or an object that is read as a value. A text may be longer: it costs what its bytes do."""

MOST_TOKENS = 100_000
"""Of an object whose fields are counted one by one, which takes 30 ms at most."""

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}:]', re.DOTALL)
_ABSENT = msgspec.Raw(b"")
_KNOWN = (
    *("jsonrpc", "id", "method", "params", "result", "error"),
    *("name", "arguments", "_meta", "inputResponses", "requestState"),
    *("content", "structuredContent", "isError", "resultType", "inputRequests", "tools", "nextCursor"),
    *("title", "description", "inputSchema", "outputSchema", "properties", "code", "message", "data"),
)
"""Fields that may be large by themselves."""
_known = msgspec.json.Decoder(msgspec.defstruct("_Known", [(name, msgspec.Raw, _ABSENT) for name in _KNOWN]))
_fields = msgspec.json.Decoder(Fields)
_list = msgspec.json.Decoder(list[msgspec.Raw])
_MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class NotMessage(Exception):
    """No JSON (`code` PARSE_ERROR), or JSON that is no single message (INVALID_REQUEST)."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Message(msgspec.Struct, frozen=True):
    """One message. With `method` and `id` a request, with `method` alone a notification, else an answer.

    `id` None in an answer: the other side could not read ours.
    """

    method: str = ""
    id: Id | None = None
    has_id: bool = False
    params: Fields | None = None
    result: msgspec.Raw | None = None
    error: msgspec.Raw | None = None

    @property
    def is_request(self) -> bool:
        return bool(self.method) and self.has_id

    @property
    def is_answer(self) -> bool:
        return not self.method


def read(data: bytes | msgspec.Raw) -> Message:
    """One message. Raises NotMessage."""
    try:
        fields = _envelope(data)
    except msgspec.ValidationError:
        raise NotMessage(
            protocol.INVALID_REQUEST, "the body is one JSON-RPC request or notification, not a batch"
        ) from None
    except _MALFORMED:
        raise NotMessage(protocol.PARSE_ERROR, "the body is not JSON") from None
    if value(fields.get("jsonrpc")) != "2.0":
        raise NotMessage(protocol.INVALID_REQUEST, '"jsonrpc" is "2.0"')
    identity = value(fields.get("id"))
    unread = identity is None and not is_null(fields.get("id"))
    if unread or isinstance(identity, bool) or not isinstance(identity, int | str | None):
        raise NotMessage(protocol.INVALID_REQUEST, "an id is a string or a whole number")
    if "method" not in fields:
        return _answer(fields, identity)
    method = value(fields["method"])
    if not isinstance(method, str) or not method:
        raise NotMessage(protocol.INVALID_REQUEST, '"method" is a string')
    if "id" in fields and identity is None:
        raise NotMessage(protocol.INVALID_REQUEST, "an id is not null")
    params = fields.get("params")
    taken = taken_apart(params)
    if taken is None and not is_null(params):
        few = "of few fields" if is_object(params) else ""
        raise NotMessage(protocol.INVALID_REQUEST, f'"params" is an object {few}'.rstrip())
    return Message(method, identity, "id" in fields, taken)


def read_all(data: bytes) -> list[Message]:
    """The messages of an answer's body: one, or a list of them as old servers may send. Raises NotMessage."""
    if data.lstrip()[:1] != b"[":
        return [read(data)]
    try:
        return [read(raw) for raw in _list.decode(data)]
    except _MALFORMED:
        raise NotMessage(protocol.PARSE_ERROR, "the answer is not JSON") from None


def taken_apart(raw: msgspec.Raw | None) -> Fields | None:
    """The fields of an object; None where it is none, and where it has too many."""
    if raw is None or not is_object(raw):
        return None
    data = bytes(raw)
    try:
        if data.count(b":") > MOST_FIELDS:
            # What is in its known fields is not taken apart; what is beside them is fields, six bytes each at least.
            known = _known.decode(data)
            beside = len(data) - sum(len(memoryview(getattr(known, name))) for name in _KNOWN)
            if beside > 6 * MOST_FIELDS and not _has_few_fields(data):
                return None
        return _fields.decode(data)
    except _MALFORMED:
        return None


def is_object(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(memoryview(raw)[:1]) == b"{"


def is_null(raw: msgspec.Raw | None) -> bool:
    """Whether there is nothing, or as good as nothing."""
    return raw is None or bytes(memoryview(raw)[:5]).strip() == b"null"


def value(raw: msgspec.Raw | None) -> Any:
    """What the bytes say; None where they say nothing, and where they are a large list or object."""
    if raw is None:
        return None
    view = memoryview(raw)
    if len(view) > MOST_VALUE_BYTES and bytes(view[:1]) != b'"':
        return None
    try:
        return msgspec.json.decode(raw)
    except _MALFORMED:
        return None


def raw(thing: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(thing))


def request(identity: Id, method: str, params: Mapping[str, object] | None) -> bytes:
    return _encoded({"jsonrpc": "2.0", "id": identity, "method": method}, params)


def notification(method: str, params: Mapping[str, object] | None = None) -> bytes:
    return _encoded({"jsonrpc": "2.0", "method": method}, params)


def result(identity: Id | None, thing: object) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", "id": identity, "result": thing})


def error(identity: Id | None, code: int, text: str, data: object = None) -> bytes:
    body: dict[str, object] = {"code": code, "message": text}
    if data is not None:
        body["data"] = data
    return passed_error(identity, body)


def passed_error(identity: Id | None, body: object) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", "id": identity, "error": body})


def event(message: bytes) -> bytes:
    """A message as one server-sent event. What a server indented has line ends between its tokens, never within one;
    left alone, they would end the event's line."""
    return b"event: message\ndata: " + message.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n\n"


def failure(text: str) -> dict[str, object]:
    """A tool's result that says why there is none: models read it, and can correct themselves."""
    return {"content": [{"type": "text", "text": text}], "isError": True}


def _encoded(message: dict[str, object], params: Mapping[str, object] | None) -> bytes:
    if params is not None:
        message["params"] = params
    return msgspec.json.encode(message)


def _has_few_fields(data: bytes) -> bool:
    """Whether an object has no more than `MOST_FIELDS`, as far as `MOST_TOKENS` tell: a long text is one."""
    depth = fields = 0
    for count, token in enumerate(_TOKEN.finditer(data)):
        match token[0]:
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
            case b":":
                fields += depth == 1
        if fields > MOST_FIELDS or count > MOST_TOKENS:
            return False
    return True


def _envelope(data: bytes | msgspec.Raw) -> Fields:
    """The fields that a message may have. Raises what the decoder does."""
    known = _known.decode(data)
    found = {name: getattr(known, name) for name in _KNOWN[:6]}
    return {name: raw for name, raw in found.items() if len(memoryview(raw))}


def _answer(fields: Fields, identity: Id | None) -> Message:
    error = fields.get("error")
    if "result" in fields:
        return Message(id=identity, has_id=True, result=fields["result"])
    if error is None or taken_apart(error) is None:
        raise NotMessage(protocol.INVALID_REQUEST, "neither a method, a result nor an error")
    return Message(id=identity, has_id=True, error=error)

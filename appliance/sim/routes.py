"""The routes of the engine: what each path answers, as vLLM's server would."""

from __future__ import annotations

import base64
import hmac
import struct
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import msgspec

from .. import __version__
from .answer import JSON, Answer, Outlet, error_body
from .asks import Rejected, decode
from .engine import Engine
from .metrics import CONTENT_TYPE, write_metrics
from .words import count_tokens, embed, token_bytes, token_ids

EMBEDDING_DIMENSIONS = 32
MAX_DIMENSIONS = 4096
TEXT = "text/plain; charset=utf-8"
_to_json = msgspec.json.encode


@attrs.frozen
class Request:
    """One HTTP request, whole. `headers` by lower-case name."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    body: bytes


@attrs.frozen
class Plain:
    """An answer that is known at once."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: bytes = b""


Handler = Callable[[Engine, Request, Outlet, float], Answer | Plain]


def respond(engine: Engine, request: Request, outlet: Outlet, now: float) -> Answer | None:
    """Answer a request through `outlet`; the Answer where it is still under way and somebody must watch the client."""
    try:
        outcome = _respond(engine, request, outlet, now)
    except Rejected as no:
        outcome = _rejection(no, request.path)
    if isinstance(outcome, Answer):
        return None if outcome.over else outcome
    outlet.head(outcome.status, outcome.content_type, len(outcome.body), outcome.headers)
    outlet.raw(outcome.body)
    outlet.end()
    return None


def _respond(engine: Engine, request: Request, outlet: Outlet, now: float) -> Answer | Plain:
    if engine.loading:
        return Plain(503, error_body(503, "unavailable_error", "Loading model"))
    path = request.path
    if path.startswith("/v1/") and engine.settings.api_key and not _knows_key(engine, request):
        return Plain(401, b'{"error":"Unauthorized"}')
    methods = ROUTES.get(path)
    if methods is None and path.startswith("/v1/responses/"):
        _, _, rest = path.removeprefix("/v1/responses/").partition("/")
        methods = {"": _STORED, "cancel": _CANCEL}.get(rest)
    if methods is None and path.startswith("/v1/models/"):
        methods = {"GET": _model}
    if methods is None:
        return Plain(404, b'{"detail":"Not Found"}')
    handler = methods.get(request.method)
    if handler is None:
        return Plain(
            405, b'{"detail":"Method Not Allowed"}', headers=b"allow: " + ", ".join(methods).encode() + b"\r\n"
        )
    return handler(engine, request, outlet, now)


def _knows_key(engine: Engine, request: Request) -> bool:
    given = request.headers.get(b"authorization", b"")
    return hmac.compare_digest(given, b"Bearer " + engine.settings.api_key.encode())


def _rejection(no: Rejected, path: str) -> Plain:
    retry = b"" if no.retry_after_s is None else b"retry-after: %d\r\n" % no.retry_after_s
    if path.startswith("/v1/messages"):
        kind = "invalid_request_error" if no.status < 500 else "api_error"
        kind = {404: "not_found_error", 429: "rate_limit_error"}.get(no.status, kind)
        return Plain(no.status, _to_json({"type": "error", "error": {"type": kind, "message": str(no)}}), headers=retry)
    return Plain(no.status, error_body(no.status, no.kind, str(no), no.param), headers=retry)


# -- text -------------------------------------------------------------------------------------------------------------


def _generating(route: str) -> Handler:
    def generate(engine: Engine, request: Request, outlet: Outlet, now: float) -> Answer:
        return engine.answer(route, request.body, request.headers.get(b"x-sim"), outlet, now)

    return generate


def _stored_response(engine: Engine, request: Request, outlet: Outlet, now: float) -> Plain:
    return Plain(200, _look_up(engine, request.path.split("/")[3]))


def _delete_response(engine: Engine, request: Request, outlet: Outlet, now: float) -> Plain:
    name = request.path.split("/")[3]
    _look_up(engine, name)
    del engine.responses[name]
    return Plain(200, _to_json({"id": name, "object": "response", "deleted": True}))


def _cancel_response(engine: Engine, request: Request, outlet: Outlet, now: float) -> Plain:
    _look_up(engine, request.path.split("/")[3])
    raise Rejected(400, "BadRequestError", "only a response made in the background can be cancelled", "response_id")


def _look_up(engine: Engine, response_id: str) -> bytes:
    body = engine.responses.get(response_id)
    if body is None:
        raise Rejected(404, "NotFoundError", f"Response with id '{response_id}' not found.", "response_id")
    return body


# -- vectors and tokens -----------------------------------------------------------------------------------------------


class _Embedding(msgspec.Struct):
    input: str | list[Any]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None


class _Tokenize(msgspec.Struct):
    model: str | None = None
    prompt: str = ""
    messages: list[dict[str, Any]] | None = None


class _Detokenize(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


_EMBEDDING = msgspec.json.Decoder(_Embedding)
_TOKENIZE = msgspec.json.Decoder(_Tokenize)
_DETOKENIZE = msgspec.json.Decoder(_Detokenize)


def _embeddings(engine: Engine, request: Request, outlet: Outlet, now: float) -> Plain:
    asked = decode(_EMBEDDING, request.body)
    model = engine.check_model(asked.model)
    dimensions = EMBEDDING_DIMENSIONS if asked.dimensions is None else asked.dimensions
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise Rejected(400, "BadRequestError", f"dimensions must be between 1 and {MAX_DIMENSIONS}", "dimensions")
    if asked.encoding_format not in (None, "float", "base64"):
        raise Rejected(400, "BadRequestError", "encoding_format is float or base64", "encoding_format")
    one = isinstance(asked.input, str) or all(isinstance(part, int) for part in asked.input)
    items = [asked.input] if one else asked.input
    texts = [item.encode() if isinstance(item, str) else _to_json(item) for item in items]
    vectors: list[Any] = [embed(text, dimensions) for text in texts]
    if asked.encoding_format == "base64":
        vectors = [base64.b64encode(struct.pack(f"<{dimensions}f", *vector)).decode() for vector in vectors]
    tokens = sum(count_tokens(text) for text in texts)
    body = {
        "id": "embd-sim",
        "object": "list",
        "created": int(engine.epoch_now()),
        "model": model,
        "data": [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)],
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }
    return Plain(200, _to_json(body))


def _tokenize(engine: Engine, request: Request, outlet: Outlet, now: float) -> Plain:
    asked = decode(_TOKENIZE, request.body)
    engine.check_model(asked.model)
    text = asked.prompt.encode() if asked.messages is None else _to_json(asked.messages)
    ids = token_ids(text)
    body = {"count": len(ids), "max_model_len": engine.settings.sizes.context_tokens, "tokens": ids, "token_strs": None}
    return Plain(200, _to_json(body))


def _detokenize(engine: Engine, request: Request, outlet: Outlet, now: float) -> Plain:
    asked = decode(_DETOKENIZE, request.body)
    engine.check_model(asked.model)
    try:
        text = token_bytes(asked.tokens).decode("utf-8", "replace")
    except (OverflowError, ValueError) as error:
        raise Rejected(400, "BadRequestError", str(error), "tokens") from None
    return Plain(200, _to_json({"prompt": text}))


# -- about the engine -------------------------------------------------------------------------------------------------


def _models(engine: Engine, request: Request, outlet: Outlet, now: float) -> Plain:
    return Plain(200, _to_json({"object": "list", "data": [_card(engine, name) for name in engine.settings.models]}))


def _model(engine: Engine, request: Request, outlet: Outlet, now: float) -> Plain:
    return Plain(200, _to_json(_card(engine, engine.check_model(request.path.removeprefix("/v1/models/")))))


def _card(engine: Engine, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(engine.started_at),
        "owned_by": "sim",
        "root": name,
        "parent": None,
        "max_model_len": engine.settings.sizes.context_tokens,
        "permission": [],
    }


def _health(engine: Engine, request: Request, outlet: Outlet, now: float) -> Plain:
    return Plain(200, b"", TEXT)


def _version(engine: Engine, request: Request, outlet: Outlet, now: float) -> Plain:
    return Plain(200, _to_json({"version": __version__, "engine": "sim", "name": engine.name}))


def _metrics(engine: Engine, request: Request, outlet: Outlet, now: float) -> Plain:
    engine.turn(now)
    return Plain(200, write_metrics(engine.batch, engine.settings.models[0], engine.started_at), CONTENT_TYPE)


ROUTES: dict[str, dict[str, Handler]] = {
    "/health": {"GET": _health},
    "/version": {"GET": _version},
    "/metrics": {"GET": _metrics},
    "/v1/models": {"GET": _models},
    "/v1/chat/completions": {"POST": _generating("chat")},
    "/v1/completions": {"POST": _generating("completions")},
    "/v1/responses": {"POST": _generating("responses")},
    "/v1/messages": {"POST": _generating("messages")},
    "/v1/embeddings": {"POST": _embeddings},
    "/tokenize": {"POST": _tokenize},
    "/detokenize": {"POST": _detokenize},
}
_STORED: dict[str, Handler] = {"GET": _stored_response, "DELETE": _delete_response}
_CANCEL: dict[str, Handler] = {"POST": _cancel_response}

"""Paths of the door, and what each one is.

The tables below are the list of what is served; everything else is refused with a JSON body. `find` is called for every
request before its body is read.
"""

from __future__ import annotations

import enum
import re

import attrs

from ..facts.call import DONE, Route
from ..facts.errors import Refusal
from ..wire.head import RequestHead


class Kind(enum.Enum):
    FORWARD = "forward"  # to an endpoint of the model that the body names
    STORED = "stored"  # to the endpoint that made the response id in the path
    MODELS = "models"
    MODEL = "model"
    HEALTH = "health"
    READY = "ready"
    STATUS = "status"
    OPTIONS = "options"
    MCP = "mcp"  # tools of all groups; which methods it takes is its own to say


@attrs.frozen
class Found:
    """A path that is served: how, under which route, and the id in it if it holds one (of OPTIONS: what it takes)."""

    kind: Kind
    route: Route
    id: str = ""


OTHER = Route("other")
CHAT = Route("chat", (DONE,))
COMPLETIONS = Route("completions", (DONE,))
RESPONSES = Route("responses", ("response.completed", "response.incomplete"))
MESSAGES = Route("messages", ("message_stop",), anthropic=True)

_POSTS: dict[bytes, Found] = {
    path: Found(Kind.FORWARD, route)
    for path, route in (
        (b"/v1/chat/completions", CHAT),
        (b"/v1/completions", COMPLETIONS),
        (b"/v1/responses", RESPONSES),
        (b"/v1/messages", MESSAGES),
        (b"/v1/messages/count_tokens", Route("count_tokens", anthropic=True)),
        (b"/v1/embeddings", Route("embeddings")),
        (b"/v1/rerank", Route("rerank")),
        (b"/v1/score", Route("score")),
        (b"/v1/audio/transcriptions", Route("audio")),
        (b"/v1/audio/translations", Route("audio")),
        (b"/v1/audio/speech", Route("audio")),
        (b"/tokenize", Route("tokenize")),
        (b"/detokenize", Route("detokenize")),
        (b"/rerank", Route("rerank")),
        (b"/score", Route("score")),
        (b"/generate", Route("generate")),
        (b"/invocations", Route("invocations")),
    )
}
_GETS: dict[bytes, Found] = {
    b"/v1/models": Found(Kind.MODELS, OTHER),
    b"/healthz": Found(Kind.HEALTH, OTHER),
    b"/readyz": Found(Kind.READY, OTHER),
    b"/status.json": Found(Kind.STATUS, OTHER),
    b"/": Found(Kind.STATUS, OTHER),
}
_FORWARD_OTHER = Found(Kind.FORWARD, OTHER)
_MCP = Found(Kind.MCP, OTHER)

ENGINE_MANAGEMENT: dict[str, frozenset[bytes]] = {
    "vllm": frozenset(
        (
            b"/v1/load_lora_adapter",
            b"/v1/unload_lora_adapter",
            b"/sleep",
            b"/wake_up",
            b"/is_sleeping",
            b"/reset_prefix_cache",
            b"/reset_mm_cache",
            b"/server_info",
            b"/collective_rpc",
            b"/scale_elastic_ep",
            b"/is_scaling_elastic_ep",
            b"/start_profile",
            b"/stop_profile",
            b"/load",
            b"/pause",
            b"/resume",
        )
    ),
    "sglang": frozenset(
        (
            b"/load_lora_adapter",
            b"/unload_lora_adapter",
            b"/flush_cache",
            b"/update_weights_from_disk",
            b"/update_weights_from_tensor",
            b"/update_weights_from_distributed",
            b"/init_weights_update_group",
            b"/get_weights_by_name",
            b"/release_memory_occupation",
            b"/resume_memory_occupation",
            b"/open_session",
            b"/close_session",
            b"/abort_request",
            b"/pause_generation",
            b"/continue_generation",
            b"/configure_logging",
            b"/set_internal_state",
            b"/slow_down",
            b"/freeze_gc",
            b"/v1/loads",
            b"/start_expert_distribution_record",
            b"/stop_expert_distribution_record",
            b"/dump_expert_distribution_record",
        )
    ),
    "llamacpp": frozenset(
        (b"/lora-adapters", b"/slots", b"/props", b"/models/load", b"/models/unload", b"/apply-template")
    ),
}
"""Paths by which an engine is managed, written out per engine. None of them is ever passed on."""
_MANAGEMENT = frozenset().union(*ENGINE_MANAGEMENT.values())

OF_GROUPS = Route("group path")
"""Any other root path, which only an announced group is asked for: their engines are not ours to know."""
_OURS = frozenset(
    (b"mcp", b"me", b"login", b"signup", b"profile", b"playground", b"admin", b"claim", b"static", b"metrics", b"v1")
)
"""First parts of paths that are this router's own, or will be."""

_RESPONSE = re.compile(rb"/v1/responses/([A-Za-z0-9_\-]{1,200})(/cancel)?")
_FORWARDABLE = re.compile(rb"(?:/[A-Za-z0-9_\-.:]+)+")
_PERCENT = re.compile(rb"%([0-9A-Fa-f]{2})")
_MODEL_PREFIX = b"/v1/models/"


def find(head: RequestHead) -> Found:
    """What a request is for. Raises Refusal (400, 404, 405, 501)."""
    method, path = head.method, head.path
    if method == b"POST" and b"upgrade" not in head.by_name:
        found = _POSTS.get(path)
        if found is not None:
            return found
    path = _checked(path)
    if b"websocket" in head.by_name.get(b"upgrade", b"").lower() or path == b"/v1/realtime":
        raise Refusal(
            501,
            "upgrade_not_supported",
            "WebSockets are not served here; use the HTTP routes under /v1",
            should_retry=False,
        )
    if path in _MANAGEMENT:
        raise _not_found(path, "engine management is not reachable through the router")
    options = method == b"OPTIONS"
    # a preflight asks whether a POST may come, also to a path that only an engine knows
    found, allowed = _on_path(path, b"POST" if options else method)
    if not allowed:
        raise _not_found(path, "there is no such path")
    if options:
        return Found(Kind.OPTIONS, OTHER, ", ".join((*allowed, "OPTIONS")))
    if found is None:
        raise Refusal(
            405,
            "method_not_allowed",
            f"{_shown(path)} takes {', '.join(allowed)}",
            headers=(("Allow", ", ".join((*allowed, "OPTIONS"))),),
        )
    return found


def find_of_groups(head: RequestHead) -> Found | None:
    """What a request that `find` knows nothing of is for where there are announced groups; None: nothing."""
    path = head.path.rstrip(b"/")
    if head.method != b"POST" or b"upgrade" in head.by_name or path in _MANAGEMENT:
        return None
    if path.split(b"/")[1:2] == [] or path.split(b"/")[1] in _OURS or _FORWARDABLE.fullmatch(path) is None:
        return None
    if {b".", b".."} & set(path.split(b"/")):
        return None
    return Found(Kind.FORWARD, OF_GROUPS)


def is_anthropic(path: bytes) -> bool:
    """Whether those who call this path expect Anthropic's shape of errors, whatever is wrong with the call."""
    return path.startswith(b"/v1/messages")


def forwarded_target(head: RequestHead) -> bytes:
    """The target as an engine gets it: without a trailing slash, with the query."""
    path = head.path.rstrip(b"/")
    return path + b"?" + head.query if head.query else path


def _on_path(path: bytes, method: bytes) -> tuple[Found | None, tuple[str, ...]]:
    """What `method` means on `path`, and which methods the path takes at all."""
    if path == b"/mcp":
        return _MCP, ("POST", "DELETE")
    if path in _GETS:
        return (_GETS[path] if method in (b"GET", b"HEAD") else None), ("GET", "HEAD")
    if path.startswith(_MODEL_PREFIX) and len(path) > len(_MODEL_PREFIX):
        model = _PERCENT.sub(lambda match: bytes((int(match[1], 16),)), path[len(_MODEL_PREFIX) :]).decode(
            "utf-8", "replace"
        )
        return (Found(Kind.MODEL, OTHER, model) if method in (b"GET", b"HEAD") else None), ("GET", "HEAD")
    stored = _RESPONSE.fullmatch(path)
    if stored is not None:
        allowed = ("POST",) if stored[2] else ("GET", "HEAD", "DELETE")
        return (Found(Kind.STORED, RESPONSES, stored[1].decode()) if method.decode() in allowed else None), allowed
    if path in _POSTS:
        return (_POSTS[path] if method == b"POST" else None), ("POST",)
    if path.startswith(b"/v1/") and method == b"POST" and _FORWARDABLE.fullmatch(path) is not None:
        return _FORWARD_OTHER, ("POST",)
    return None, ()


def _checked(path: bytes) -> bytes:
    """The path to look up: no trailing slash. What an engine could read as another path is refused."""
    in_model = path.startswith(_MODEL_PREFIX)
    if b"//" in path:
        raise Refusal(400, "bad_request", "a path has no double slashes")
    if b"%" in path:
        if len(_PERCENT.findall(path)) != path.count(b"%"):
            raise Refusal(400, "bad_request", "malformed percent-escape in the path")
        if not in_model and b"%2f" in path.lower():
            raise Refusal(400, "bad_request", "a path has no escaped slashes")
    segments = _PERCENT.sub(lambda match: bytes((int(match[1], 16),)), path).split(b"/")
    if b"." in segments or b".." in segments:
        raise Refusal(400, "bad_request", "a path has no dot segments")
    return path.rstrip(b"/") or b"/"


def _not_found(path: bytes, why: str) -> Refusal:
    return Refusal(404, "not_found", f"{_shown(path)}: {why}", should_retry=False)


def _shown(path: bytes) -> str:
    return path[:200].decode("latin-1")

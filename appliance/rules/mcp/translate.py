"""A call and its result on their way between a client and a tool server that may be of different eras."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import msgspec

from . import protocol
from .messages import Fields, failure, taken_apart, value
from .naming import Route

_PROGRESS = "progressToken"


@attrs.frozen
class Asked:
    """A client's call as it came: its parameters, the headers that repeat arguments (lower-case names), and the routers
    it has come through."""

    modern: bool
    params: Fields
    param_fields: Mapping[str, str] = attrs.field(factory=dict)
    marks: tuple[str, ...] = ()

    @property
    def meta(self) -> Fields:
        return taken_apart(self.params.get("_meta")) or {}

    @property
    def progress_token(self) -> msgspec.Raw | None:
        """The client's own name for the progress of this call, None where it does not want to hear of it."""
        token = self.meta.get(_PROGRESS)
        return token if isinstance(value(token), int | str) else None

    @property
    def wants_log(self) -> bool:
        return self.modern and protocol.META_LOG_LEVEL in self.meta


def envelope(asked: Asked | None, client: Mapping[str, str]) -> dict[str, object]:
    """What every modern request carries. `asked` None: a request of our own. A client of the handshake era is not
    there to be asked anything back, so it has no capabilities here; `client` is our own name."""
    meta = asked.meta if asked is not None and asked.modern else {}
    carried: dict[str, object] = {
        protocol.META_VERSION: protocol.MODERN,
        protocol.META_CAPABILITIES: meta.get(protocol.META_CAPABILITIES, {}),
        protocol.META_CLIENT: meta.get(protocol.META_CLIENT, client),
    }
    if protocol.META_LOG_LEVEL in meta:
        carried[protocol.META_LOG_LEVEL] = meta[protocol.META_LOG_LEVEL]
    return carried


def call_params(
    asked: Asked, route: Route, *, modern: bool, token: int, client: Mapping[str, str]
) -> dict[str, object]:
    """The parameters of a call for a tool server of the era `modern`. `token` names its progress between us and the
    server, whose other clients number theirs too."""
    meta: dict[str, object] = {
        key: item for key, item in asked.meta.items() if key != _PROGRESS and not key.startswith(protocol.META_PREFIX)
    }
    if modern:
        meta |= envelope(asked, client)
    if asked.progress_token is not None:
        meta[_PROGRESS] = token
    # Answers to what a tool asked back travel beside name and arguments, and only within the modern era.
    params: dict[str, object] = dict(asked.params) if modern and asked.modern else {}
    params.pop("_meta", None)
    params.pop("arguments", None)
    params["name"] = route.tool
    if route.arguments is not None:
        params["arguments"] = route.arguments
    if meta:
        params["_meta"] = meta
    return params


def progress(params: Fields | None, ours: int, theirs: msgspec.Raw | None) -> Fields | None:
    """A progress notice with the client's own token in it; None where it is of another call, or not wanted."""
    if params is None or theirs is None or value(params.get(_PROGRESS)) != ours:
        return None
    return {**params, _PROGRESS: theirs}


def result_for(fields: Fields, *, modern: bool, server: Mapping[str, str]) -> Mapping[str, object]:
    """A tool's result for a client of the era `modern`; `server` is our own name and version."""
    kind = value(fields.get("resultType"))
    meta: dict[str, object] = {
        key: item
        for key, item in (taken_apart(fields.get("_meta")) or {}).items()
        if key != protocol.META_SERVER and (modern or not key.startswith(protocol.META_PREFIX))
    }
    if not modern and isinstance(kind, str) and kind != "complete":
        return failure(f"The tool gave a result of the kind {kind}, which this version of the protocol does not know.")
    shown: dict[str, object] = {key: item for key, item in fields.items() if key not in ("resultType", "_meta")}
    if modern:
        return finished(shown, meta, kind if isinstance(kind, str) else "complete", server)
    return {**shown, "_meta": meta} if meta else shown


def finished(
    shown: Mapping[str, object], meta: Mapping[str, object], kind: str, server: Mapping[str, str]
) -> Mapping[str, object]:
    """A result as the modern era wants it."""
    return {**shown, "resultType": kind, "_meta": {**meta, protocol.META_SERVER: server}}

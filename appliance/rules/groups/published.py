"""What the groups of a moment mean to the request road: endpoints, and names that are claimed and not served now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import attrs

from ...facts.endpoint import ENGINES, Endpoint
from ...facts.groups import Announced
from .gate import Standing

PREFIX = "group:"
"""In front of a group's name, its endpoint's id: the file may have an endpoint of the same name."""

_ENGINES = {"llama.cpp": "llamacpp", "llama-cpp": "llamacpp", "llama_cpp": "llamacpp"}


@attrs.frozen
class Published:
    """`listed` are the engines' own entries by endpoint id and name; `gated` says of each name that a group claims and
    nobody serves why."""

    endpoints: tuple[Endpoint, ...] = ()
    listed: Mapping[str, Mapping[str, Mapping[str, Any]]] = attrs.field(factory=dict)
    gated: Mapping[str, str] = attrs.field(factory=dict)


def endpoint(group: Announced, standing: Standing, total_s: float) -> Endpoint:
    """The endpoint of a group that passed its gates. Requests are sent to it once."""
    url = urlsplit(standing.url)
    tls = url.scheme == "https"
    engine = _ENGINES.get(group.provider, group.provider)
    return Endpoint(
        PREFIX + group.name,
        url.hostname or "",
        url.port or (443 if tls else 80),
        tls,
        url.path.removesuffix("/v1").rstrip("/"),
        standing.names,
        engine if engine in ENGINES else "openai",
        announced=True,
        retries=False,
        total_s=total_s,
        router=standing.router,
    )


def publish(
    groups: Mapping[str, Announced],
    standings: Mapping[str, Standing],
    why: Mapping[str, str],
    total_s: float,
) -> Published:
    """`why` holds, for every group that counts, why it gets nothing, "" where it does."""
    endpoints = []
    listed = {}
    gated: dict[str, str] = {}
    for name in sorted(why):
        group, standing = groups[name], standings[name]
        if not why[name]:
            made = endpoint(group, standing, total_s)
            endpoints.append(made)
            listed[made.id] = {model: {**standing.entries.get(model, {}), "owned_by": name} for model in standing.names}
        elif group.announces:
            for model in standing.names or (name,):
                gated.setdefault(model, why[name])
    served = {model for made in endpoints for model in made.models or ()}
    return Published(
        tuple(endpoints), listed, {model: reason for model, reason in gated.items() if model not in served}
    )

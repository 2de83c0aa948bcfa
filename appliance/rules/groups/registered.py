"""What the environment of an agent says of an engine beside it that somebody else started.

    MENTAT_GROUP            the group's name
    MENTAT_OPENAI_API       where its API is: only on the rank that serves
    MENTAT_MCP_API          where its tools are: on any rank
    MENTAT_MODEL_PROVIDER   what runs there, in one word

An address that names a host is published as it is. `8000/v1` and `http://0.0.0.0:8000/v1` leave the host open: routers
then try every address of the node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from ...facts.groups import Registered
from .views import OPEN_HOSTS

GROUP, OPENAI, MCP, PROVIDER = "MENTAT_GROUP", "MENTAT_OPENAI_API", "MENTAT_MCP_API", "MENTAT_MODEL_PROVIDER"


class Unregistered(ValueError):
    """The variables make no sense. The message names the one, and what it should be."""


def registered(environ: Mapping[str, str]) -> Registered | None:
    """None where no group is named. Raises Unregistered."""
    said = {name: environ.get(name, "").strip() for name in (GROUP, OPENAI, MCP, PROVIDER)}
    if not said[GROUP]:
        alone = next((name for name in (OPENAI, MCP) if said[name]), None)
        if alone:
            raise Unregistered(f"{alone} is set without {GROUP}, which names the group it belongs to")
        return None
    if "__" in said[GROUP] or not said[GROUP].isprintable():
        raise Unregistered(f"{GROUP}: expected a name without __ in it, which stands between a group and its tools")
    provider = said[PROVIDER].lower()
    return Registered(
        said[GROUP],
        _service(OPENAI, said[OPENAI], provider) if said[OPENAI] else None,
        _service(MCP, said[MCP], "") if said[MCP] else None,
    )


def _service(name: str, text: str, provider: str) -> Mapping[str, object]:
    wanted = Unregistered(
        f"{name}: expected a port and a path (8000/v1), or http:// with a host and a port, got {text[:80]!r}"
    )
    if re.fullmatch(r"[0-9]{1,5}(/.*)?", text):
        text = f"http://0.0.0.0:{text}"
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        raise wanted from None
    if url.scheme != "http" or not host or not port or url.username is not None or url.query or url.fragment:
        raise wanted
    shown = f"[{host}]" if ":" in host else host
    return {
        "host": "" if host in OPEN_HOSTS else shown,
        "port": port,
        "path": url.path.rstrip("/"),
        "provider": provider,
        "note": "",
    }

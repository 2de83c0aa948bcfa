"""A daemon's `/status` as a value, whichever version wrote it.

Older documents hold lists of agents and actors, newer ones maps by id; services are a URL, or a port with a path in a
table beside them, or an object with all of it. What does not fit is left out, never an error: one odd row must not hide
a machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from ...facts.groups import AgentRow, GroupRow, PeerRow, Service, View
from .sources import ip_of

MOST_NAME = 200
"""Characters in a group's name, and in whatever else is shown of a document."""
MOST_ADDRESSES = 64
"""Of one node."""
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")
_NUMBER = re.compile(r"([0-9]+|0[xX][0-9a-fA-F]*)\.?")
_VISIBLE = re.compile(r"[!-~]{1,2000}")
"""An address goes into requests as it is, so nothing that could end a line of one may be in it."""

OPEN_HOSTS = ("", "0.0.0.0", "::", "[::]")
"""Hosts that leave open which address of the node it is."""

Document = Mapping[str, object]


class NotAView(ValueError):
    """The answer is no daemon's document."""


def read_view(document: object) -> View:
    """Raises NotAView."""
    if not isinstance(document, dict) or not isinstance(document.get("groups"), dict):
        raise NotAView("no object with groups")
    keyed = _keyed(document)
    return View(
        _shown(document.get("node_id")),
        _shown(document.get("node_ip")),
        _texts(document.get("addrs")),
        tuple(_peers(document.get("peers"))),
        {
            name: _group(name, row)
            for name, row in document["groups"].items()
            if _is_name(name) and isinstance(row, dict) and name not in keyed
        },
        isinstance(document.get("appliance"), dict),
    )


def _is_name(text: str) -> bool:
    """Whether a text can stand in logs, labels and tables as the name of something."""
    return 0 < len(text) <= MOST_NAME and text.isprintable() and text == text.strip()


def _keyed(document: Document) -> frozenset[str]:
    """Replicas of an agent of ours that follows a control plane. Their engines want a key that only that one has, and
    it is its router that they serve."""
    own = document.get("appliance")
    if not isinstance(own, dict) or not isinstance(own.get("control"), dict):
        return frozenset()
    return frozenset(_text(row.get("replica")) for _, row in _rows(own.get("shards")))


def _peers(peers: object) -> Iterator[PeerRow]:
    if not isinstance(peers, dict):
        return
    for node_id, row in peers.items():
        if isinstance(row, dict) and _is_name(node_id):
            yield PeerRow(
                node_id,
                _shown(row.get("node_ip")),
                _shown(row.get("link_ip")),
                _texts(row.get("addrs")),
                _port(row.get("http_port")),
                row.get("alive") is not False,
            )


def _group(name: str, row: Document) -> GroupRow:
    agents, actors, gpus = row.get("agents"), row.get("actors"), row.get("gpus_total")
    return GroupRow(
        name,
        tuple(_agent(key, agent) for key, agent in _rows(agents)),
        tuple(_text(actor.get("state")) for _, actor in _rows(actors)),
        gpus if isinstance(gpus, int) and not isinstance(gpus, bool) else 0,
        isinstance(agents, list) or isinstance(actors, list),
    )


def _rows(rows: object) -> Iterator[tuple[str, Document]]:
    """Rows with their ids, of a list or of a map."""
    if isinstance(rows, dict):
        yield from ((key, row) for key, row in rows.items() if isinstance(row, dict))
    elif isinstance(rows, list):
        yield from ((_text(row.get("id")), row) for row in rows if isinstance(row, dict))


def _agent(key: str, row: Document) -> AgentRow:
    openai = _service("openai", row)
    if openai is not None and set(openai.url + openai.path) & set("?#"):
        openai = None  # paths are joined to it
    return AgentRow(key, row.get("alive") is True, _shown(row.get("node_ip")), openai, _service("mcp", row))


def _service(name: str, row: Document) -> Service | None:
    provider = _shown(row.get("provider")).lower()
    note = _shown(_get(row.get("service_notes"), name))
    said = _get(row.get("services"), name)
    if isinstance(said, str) and said:
        return _from_url(said, provider, note)
    if isinstance(said, dict):
        return _from_object(said, _shown(said.get("provider")).lower() or provider, _shown(said.get("note")) or note)
    ports = _get(row.get("services_ports"), name)
    return _from_object(ports, provider, note) if isinstance(ports, dict) else None


def _from_url(text: str, provider: str, note: str) -> Service | None:
    """A URL that names a host is taken as it is; one that leaves it open is a port and a path."""
    text = text.strip()
    if "://" not in text:
        text = f"http://{text}" if not text[:1].isdigit() or "." in text.partition("/")[0] else f"http://:{text}"
    try:
        url = urlsplit(text)
        host, port = url.hostname or "", url.port
    except ValueError:
        return None
    if url.scheme not in ("http", "https") or url.username is not None or not _VISIBLE.fullmatch(text):
        return None
    if host in OPEN_HOSTS:
        return Service("", port, url.path, provider, note) if port else None
    return Service(text, 0, "", provider, note) if _is_host(host) else None


def _from_object(said: Document, provider: str, note: str) -> Service | None:
    host, port, path = _text(said.get("host")), _port(said.get("port")), _text(said.get("path"))
    if not port:
        return None
    if path and not path.startswith("/"):
        path = f"/{path}"
    if path and not _VISIBLE.fullmatch(path):
        return None
    if host in OPEN_HOSTS:
        return Service("", port, path, provider, note)
    if not _is_host(host.strip("[]")):
        return None
    return _from_url(f"http://{_bracketed(host)}:{port}{path}", provider, note)


def _is_host(host: str) -> bool:
    """Whether it is a name or an address. Of numbers there is one way to write an address: resolvers know others
    (`127.1`, `2130706433`), which no check of addresses would see through."""
    if not _HOST.fullmatch(host):
        return False
    return ip_of(host) is not None or not _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _get(table: object, name: str) -> object:
    return table.get(name) if isinstance(table, dict) else None


def _port(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535 else 0


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _shown(value: object) -> str:
    """A text that people get to see: what would move a cursor or fill a page is not in it."""
    return "".join(letter if letter.isprintable() else "?" for letter in _text(value)[:MOST_NAME])


def _texts(value: object) -> tuple[str, ...]:
    return tuple(_shown(item) for item in value[:MOST_ADDRESSES]) if isinstance(value, list) else ()

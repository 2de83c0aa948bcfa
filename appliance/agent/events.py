"""The document as it changes: a number for each change, and a stream of patches for whoever holds `/events` open.

A change is found by comparing documents, so nothing has to remember to announce itself. A subscriber that does not keep
up is cut off instead of being waited for: it comes back, and gets a whole document first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

from appliance.agent.status import Look, document

BEHIND = 256
"""Events a subscriber may be behind."""

_QUIET = ("used_bytes", "utilization", "holders", "available_bytes", "free_bytes")
"""Figures of the inventory that change all the time. They are in every document, and make no event."""

Event = dict[str, Any]


class Board:
    """The document and its events. `look` sees everything as it is now, `now` is in seconds since 1970."""

    def __init__(self, look: Look, now: Callable[[], float]) -> None:
        self._look = look
        self._now = now
        self._seq = 0
        self._subscribers: set[trio.MemorySendChannel[Event]] = set()
        self._document = document(look())

    def read(self) -> dict[str, Any]:
        """The document now. What changed since the last call becomes an event first."""
        before, self._document = self._document, document(self._look())
        for kind, patch in changes(before, self._document):
            self._seq += 1
            self._send(
                {
                    "type": kind,
                    "seq": self._seq,
                    "ts_ms": int(self._now() * 1000),
                    "node": self._document["node_id"],
                    "patch": patch,
                }
            )
        return {**self._document, "seq": self._seq}

    @contextmanager
    def subscribed(self) -> Iterator[tuple[dict[str, Any], trio.MemoryReceiveChannel[Event]]]:
        """The document, and every event after it. The channel ends when its reader falls too far behind."""
        send, receive = trio.open_memory_channel[Event](BEHIND)
        snapshot = self.read()
        self._subscribers.add(send)
        try:
            yield snapshot, receive
        finally:
            self._subscribers.discard(send)
            send.close()
            receive.close()

    @property
    def subscribers(self) -> int:
        return len(self._subscribers)

    def _send(self, event: Event) -> None:
        for channel in tuple(self._subscribers):
            try:
                channel.send_nowait(event)
            except (trio.WouldBlock, trio.BrokenResourceError):
                self._subscribers.discard(channel)
                channel.close()


def changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Kind and patch of each event that leads from one document to the next."""
    old, new = before["groups"], now["groups"]
    for name in sorted({*old, *new}):
        if old.get(name) == new.get(name):
            continue
        at = ["groups", name]
        yield _kind(old.get(name), new.get(name)), [{"at": at, "value": new[name]} if name in new else {"at": at}]
    own_old, own_new = before["appliance"], now["appliance"]
    for part in ("shards", "waiting", "control", "inventory"):
        if _lasting(own_old[part]) != _lasting(own_new[part]):
            yield f"appliance_{part}", [{"at": ["appliance", part], "value": own_new[part]}]
    if before["addrs"] != now["addrs"]:
        yield "addrs_changed", [{"at": ["addrs"], "value": now["addrs"]}]


def _kind(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    """The word for what became of a group, after the actor that changed."""
    if new is None:
        return "agent_lost"
    before = old["actors"] if old is not None else {}
    changed = [actor["state"] for name, actor in new["actors"].items() if before.get(name) != actor]
    words = {"running": "actor_running", "spawning": "actor_spawning", "dead": "actor_dead"}
    return next((words[state] for state in changed if state in words), "agent_register")


def _lasting(value: Any) -> Any:
    match value:
        case dict():
            return {key: _lasting(item) for key, item in value.items() if key not in _QUIET}
        case list() | tuple():
            return [_lasting(item) for item in value]
        case _:
            return value

"""What is to be said to one node on one connection.

Putting is a plain call, so that a decision and its being said are one step. Nothing here outlives the connection: what
was not sent is decided again from what the node reports when it comes back. So there is no point in a long queue; a
node that lets it fill up is cut off.
"""

from __future__ import annotations

from collections import deque

import trio

from appliance.facts.link import Down
from appliance.nursery.news import News

MOST_MESSAGES = 2048
"""A node with 200 shards is told at most a start or stop, a forget and a log for each."""


class Outbox:
    """Filled by anybody, emptied by the one task that writes."""

    def __init__(self, most: int = MOST_MESSAGES) -> None:
        self._messages: deque[Down] = deque()
        self._most = most
        self._news = News()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Down) -> bool:
        """Have it sent after those before it. False: there is no room, and it was not taken."""
        if len(self._messages) >= self._most:
            return False
        self._messages.append(message)
        self._news.tell()
        return True

    async def take(self, wait_s: float) -> Down | None:
        """The next message, None where there is none for `wait_s` seconds."""
        if not self._messages:
            with trio.move_on_after(wait_s):
                await self._news.wait()
        return self._messages.popleft() if self._messages else None

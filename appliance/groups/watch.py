"""One daemon: its document is read at once when it says that something happened, and every few seconds anyway.

Events are not looked into. Any of them means "read again", since reading is always right, whatever version wrote the
event. They are gathered for `GATHER_S`, counted from the reading before: a daemon that never stops talking is read five
times a second, and not never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import trio

from ..facts.groups import View
from ..rules.groups.daemons import Daemon
from ..rules.groups.skim import NotJson, document
from ..rules.groups.sources import host_of
from ..rules.groups.views import NotAView, read_view
from .ask import MOST_BYTES, AskFailed, ask
from .pace import Pace

STATUS_S = 5.0
CONNECT_S = 5.0
PAUSE_S = 2.0
"""After any failure."""
GATHER_S = 0.2


class Watch:
    """The task of one daemon, which is read every `poll_s` seconds at least. `took` gets each document and answers
    whether the daemon is what it was taken for; `lost` gets what went wrong."""

    def __init__(
        self,
        daemon: Daemon,
        poll_s: Callable[[], float],
        pace: Pace,
        took: Callable[[Daemon, View], bool],
        lost: Callable[[Daemon, str], None],
    ) -> None:
        self.daemon = daemon
        self._poll_s = poll_s
        self._pace = pace
        self._took = took
        self._lost = lost
        self._news = trio.Event()
        self.reads = 0

    def look(self) -> None:
        """Read again now."""
        self._news.set()

    async def run(self) -> NoReturn:
        """Watch for ever. The owner cancels it."""
        while True:
            if await self._read():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._listen, self.daemon.address, name=f"events of {self.daemon.address}")
                    await self._read_on_news()
                    nursery.cancel_scope.cancel()
            await trio.sleep(PAUSE_S)

    async def _read_on_news(self) -> None:
        """Read again and again, until that fails."""
        while True:
            read_at = trio.current_time()
            with trio.move_on_after(self._poll_s()):
                await self._news.wait()
            await trio.sleep_until(read_at + GATHER_S)
            self._news = trio.Event()  # what comes from now on is about something that this reading may miss
            if not await self._read():
                return

    async def _read(self) -> bool:
        daemon = self.daemon
        self.reads += 1
        try:
            answer = await ask(f"http://{daemon.address}/status", STATUS_S)
            await self._pace.turn()
            with self._pace.work():
                view = read_view(document(answer.body))
        except (AskFailed, NotJson) as failed:
            self._lost(daemon, str(failed))
            return False
        except NotAView as wrong:
            self._lost(daemon, f"/status is no daemon's document: {wrong}")
            return False
        return self._took(daemon, view)

    async def _listen(self, address: str) -> NoReturn:
        """Hold the events open. When they end the daemon may have too, so that is news as well."""
        # Here and not above: it brings h11 and wsproto along, for which a router without daemons has no use.
        from trio_websocket import ConnectionClosed, ConnectionTimeout, HandshakeError, open_websocket

        host, port = host_of(address), int(address.rpartition(":")[2])
        while True:
            try:
                with trio.fail_after(2 * CONNECT_S) as connecting:
                    async with open_websocket(
                        host,
                        port,
                        "/events",
                        use_ssl=False,
                        connect_timeout=CONNECT_S,
                        disconnect_timeout=0.1,
                        max_message_size=MOST_BYTES,
                    ) as events:
                        connecting.deadline = float("inf")
                        while True:
                            await events.get_message()
                            self._news.set()
            except (OSError, ConnectionClosed, ConnectionTimeout, HandshakeError, trio.TooSlowError):
                self._news.set()
            except BaseExceptionGroup as group:
                _, rest = group.split((OSError, ConnectionClosed, ConnectionTimeout, HandshakeError, trio.TooSlowError))
                if rest is not None:
                    raise
                self._news.set()
            await trio.sleep(PAUSE_S)

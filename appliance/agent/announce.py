"""Telling routers that this agent is here: one datagram every few seconds, to the neighbours on every interface.

It says where the agent's document is, and nothing of what is in it: routers read that themselves. Interfaces are looked
at anew for each round, so that an address which changed is told with the next one.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

import structlog
import trio

from appliance.agent.status import Identity
from appliance.facts.address import Address
from appliance.facts.groups import OWN_UNIVERSE, GroupsSettings
from appliance.wire import datagram
from appliance.wire.interfaces import UNSPOKEN, Link, links

log = structlog.get_logger("announce")


class Announcer:
    """The task of one agent. `listen` is where its document is read, as it came out; `changed` is called when the
    addresses of the machine did. `key` signs, b"" for none."""

    def __init__(
        self,
        settings: GroupsSettings,
        key: bytes,
        identity: Identity,
        listen: Sequence[Address],
        *,
        changed: Callable[[], Awaitable[object]] | None = None,
        look: Callable[[], tuple[Link, ...]] = links,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._key = datagram.secret(key)
        self._identity = identity
        self._listen = listen
        self._changed = changed
        self._look = look
        self._wall = wall
        self._seq = 0
        self._told: set[str] = set()

    @property
    def useful(self) -> bool:
        """Whether anybody else could read the document."""
        return bool(self._settings.announce_port) and any(not _is_loopback(each.host) for each in self._listen)

    async def run(self) -> NoReturn:
        """Announce for ever."""
        addrs: tuple[str, ...] | None = None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            while True:
                found = self._look()
                now = self.addrs(found)
                if addrs is not None and now != addrs and self._changed is not None:
                    log.info("addresses changed", addresses=",".join(now))
                    await self._changed()
                addrs = now
                await self._round(sock, found)
                await trio.sleep(self._settings.announce_interval_s)

    def addrs(self, found: Sequence[Link]) -> tuple[str, ...]:
        """The addresses at which the document is read: the agent's own first, where it still has it."""
        hosts = [each.host for each in self._listen]
        if not any(_is_any(host) for host in hosts):
            return tuple(hosts)
        usable = [link.address for link in found if link.up and not link.loopback]
        usable.sort(key=lambda address: address != self._identity.address)
        return tuple(dict.fromkeys(usable))

    def payload(self, found: Sequence[Link]) -> dict[str, object]:
        addrs = self.addrs(found)
        host = addrs[0] if addrs else self._identity.address
        port = next((each.port for each in self._listen if not _is_loopback(each.host)), self._listen[0].port)
        return {
            "node_id": self._identity.node_id,
            "boot_id": self._identity.boot_id,
            "control": f"{host}:0",  # nobody is answered there; the form wants an address
            "http": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            "universe": self._settings.universe or OWN_UNIVERSE,
            "addrs": list(addrs),
            "addr_tags": {},
            "seq": self._seq,
            "t": int(self._wall()),
        }

    def build(self, found: Sequence[Link]) -> bytes | None:
        """The datagram of this round, None where it cannot be made small enough."""
        payload = self.payload(found)
        addrs = self.addrs(found)
        for count in range(len(addrs), -1, -1):
            data = datagram.build({**payload, "addrs": list(addrs[:count])}, self._key)
            if len(data) <= datagram.MOST_BYTES:
                return data
        return None

    async def _round(self, sock: socket.socket, found: Sequence[Link]) -> None:
        data = self.build(found)
        self._seq += 1
        if data is None:
            self._tell("announce_too_large", "")
            return
        port = self._settings.announce_port
        targets = [(link.broadcast, port) for link in found if _spoken(link)]
        targets += [pair for text in self._settings.announce_addrs if (pair := await self._address(text, port))]
        for target in dict.fromkeys(targets):
            try:
                sock.sendto(data, target)
                self._told.discard(f"{target}")
            except OSError as error:  # its cable is out, or nobody routes it: the next round may fare better
                self._tell("announcement not sent", f"{target}", to=f"{target[0]}:{target[1]}", reason=error.strerror)

    async def _address(self, text: str, port: int) -> tuple[str, int] | None:
        host, colon, number = text.rpartition(":")
        if not colon:
            host, number = text, str(port)
        try:
            found = await trio.socket.getaddrinfo(host.strip("[]"), int(number), socket.AF_INET, socket.SOCK_DGRAM)
        except OSError as error:
            self._tell("announcement not sent", text, to=text, reason=str(error))
            return None
        self._told.discard(text)
        address = found[0][4]
        return str(address[0]), int(address[1])

    def _tell(self, event: str, what: str, **fields: object) -> None:
        """Once until it clears."""
        if what not in self._told:
            self._told.add(what)
            log.warning(event, **fields)


def _spoken(link: Link) -> bool:
    return link.up and not link.loopback and bool(link.broadcast) and not link.name.startswith(UNSPOKEN)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _is_any(host: str) -> bool:
    return ipaddress.ip_address(host).is_unspecified

"""Which daemons are watched: seeds, those that announce themselves, and the peers of both.

One per node, however many addresses it has: the others are alternates, tried in turn when one falls silent. A node that
answers under another's address is not taken for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...facts.groups import PeerRow, Told, View
from .reception import Heard
from .sources import Network, Sources, host_of, host_port, ranked

MOST_WATCHED = 256
"""Daemons besides the seeds. Without a key anybody on an allowed network can announce as many as he likes."""
MOST_ADDRESSES = 8
MAKE_ROOM_S = 10.0
"""How long a daemon that never answered keeps its place where others want it. One more or less a second is little work,
and whoever does answer stays."""
STALE_POLLS = 3
"""A document is believed for so many poll intervals."""


class Daemon:
    """One daemon. `address` is where it is asked now; `view` what it said last, at `read_at`; `error` what is wrong,
    "" for nothing. `told` is what was last logged of it: "", "lost" or "found"."""

    __slots__ = ("addresses", "error", "heard_at", "known_at", "node_id", "read_at", "seed", "told", "view")

    def __init__(self, node_id: str, addresses: Iterable[str], now: float, *, seed: bool = False) -> None:
        self.node_id = node_id
        self.addresses = list(addresses)
        self.seed = seed
        self.known_at = self.heard_at = now
        self.view: View | None = None
        self.read_at: float | None = None
        self.error = ""
        self.told = ""

    @property
    def address(self) -> str:
        return self.addresses[0]

    def turn(self) -> None:
        """Ask at the next address from now on."""
        self.addresses.append(self.addresses.pop(0))


class Daemons:
    """All of them. Plain methods; whoever owns it starts a task for each that is `all` and new."""

    def __init__(self, seeds: Iterable[str], sources: Sources, now: float, *, peers: bool = True) -> None:
        self.all: list[Daemon] = [Daemon("", [seed], now, seed=True) for seed in dict.fromkeys(seeds)]
        self._sources = sources
        self._peers = peers
        self._full = False

    def __iter__(self) -> Iterator[Daemon]:
        return iter(tuple(self.all))

    # -- who there is ------------------------------------------------------------------------------------------------

    def addresses(self) -> tuple[str, ...]:
        """Where each that answers is asked."""
        return tuple(each.address for each in self if each.view is not None and not each.error)

    def announced(self, heard: Heard, now: float) -> Told | None:
        return self._know(heard.node_id, heard.addresses, now)

    def follow_peers(self, now: float, stale_s: float, own: Sequence[Network]) -> Told | None:
        """Take in what fresh documents say of other daemons."""
        told = None
        if self._peers:
            for daemon in self:
                if daemon.view is not None and _fresh(daemon, now, stale_s):
                    for peer in daemon.view.peers:
                        addresses = self._addresses_of(peer, own)
                        if peer.alive and peer.node_id and addresses:
                            told = self._know(peer.node_id, addresses, now) or told
        return told

    def allow(self, sources: Sources, own: Sequence[Network]) -> None:
        """Whose addresses count from now on. Of daemons that announced themselves, or were named by others, only those
        addresses stay; seeds are the operator's."""
        self._sources = sources
        for daemon in self:
            if not daemon.seed:
                passed = [address for address in daemon.addresses if sources.allow(host_of(address), own)]
                if daemon.address not in passed:
                    self.all.remove(daemon)
                else:
                    daemon.addresses = passed

    def forget(self, now: float, ttl_s: float) -> None:
        """Let go of those that nobody has heard of for `ttl_s`; seeds stay."""
        self.all = [each for each in self.all if each.seed or now - max(each.heard_at, each.read_at or 0.0) <= ttl_s]
        self._full = self._full and len(self.all) >= MOST_WATCHED

    # -- what they say -----------------------------------------------------------------------------------------------

    def read(self, daemon: Daemon, view: View, now: float) -> bool:
        """Its document came. False where somebody else answered, or another daemon turned out to be the same node and
        goes on instead."""
        if view.node_id and daemon.node_id and view.node_id != daemon.node_id and not daemon.seed:
            self.failed(daemon, f"{daemon.address} answers as another node")
            return False
        if view.node_id:
            for other in self:
                if other is not daemon and other.node_id == view.node_id:
                    if other.seed or (other.view is not None and not other.error and not daemon.seed):
                        self._join(other, daemon.addresses)
                        self.all.remove(daemon)
                        return False
                    self._join(daemon, other.addresses)
                    self.all.remove(other)
            daemon.node_id = view.node_id
        daemon.view, daemon.read_at, daemon.error = view, now, ""
        return True

    def failed(self, daemon: Daemon, error: str) -> None:
        """It did not answer. Its last document counts on until it is stale; its next address is asked next."""
        daemon.error = error
        daemon.turn()

    def views(self, now: float, stale_s: float) -> dict[str, View]:
        """The documents that are believed now, by address."""
        return {each.address: each.view for each in self if each.view is not None and _fresh(each, now, stale_s)}

    def rows(self, now: float) -> dict[str, dict[str, object]]:
        """One row each, for status pages."""
        return {
            each.address: {
                "connected": each.view is not None,
                "age_s": None if each.read_at is None else int(now - each.read_at),
                "error": each.error or None,
                "node_id": each.node_id,
                "seed": each.seed,
                "alternates": each.addresses[1:] or None,
            }
            for each in self
        }

    # -- steps -------------------------------------------------------------------------------------------------------

    def _know(self, node_id: str, addresses: Sequence[str], now: float) -> Told | None:
        for daemon in self.all:
            same_place = not daemon.node_id or not node_id
            if (node_id and daemon.node_id == node_id) or (
                same_place and not set(addresses).isdisjoint(daemon.addresses)
            ):
                daemon.heard_at = now
                self._join(daemon, addresses)
                return None
        if sum(not daemon.seed for daemon in self.all) >= MOST_WATCHED and not self._made_room(now):
            told = None if self._full else Told("daemons_full", fields={"most": MOST_WATCHED, "address": addresses[0]})
            self._full = True
            return told
        self.all.append(Daemon(node_id, addresses[:MOST_ADDRESSES], now))
        return None

    def _made_room(self, now: float) -> bool:
        """Whether one that never answered could be let go of. Whoever invents daemons must not keep out real ones."""
        silent = [
            each
            for each in self.all
            if not each.seed and each.read_at is None and each.error and now - each.known_at >= MAKE_ROOM_S
        ]
        if silent:
            self.all.remove(min(silent, key=lambda each: each.known_at))
        return bool(silent)

    def _join(self, daemon: Daemon, addresses: Iterable[str]) -> None:
        """Further addresses of the same node: the newest right behind the one that is asked, so that one which moved is
        found at the next try."""
        current = daemon.address
        new = [address for address in addresses if address not in daemon.addresses]
        if new:
            daemon.addresses = [current, *new, *daemon.addresses[1:]][:MOST_ADDRESSES]

    def _addresses_of(self, peer: PeerRow, own: Sequence[Network]) -> tuple[str, ...]:
        if not peer.http_port:
            return ()
        hosts = ranked((peer.link_ip, *peer.addrs, peer.node_ip), self._sources, own, loopback_last=True)
        return tuple(host_port(host, peer.http_port) for host in hosts)


def _fresh(daemon: Daemon, now: float, stale_s: float) -> bool:
    return daemon.read_at is not None and now - daemon.read_at <= stale_s

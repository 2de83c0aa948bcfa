"""Whether a datagram is believed: one step after the other, and most of them in silence.

A datagram never changes where requests go. All that can come of one is the address of a daemon to ask.

    too large -> foreign universe (before the key is used, and before any line is logged) -> signature -> version ->
    clock -> identity -> replay -> address -> source

With a key, only what it signed counts, in the newer form or the older. Without one, only what is unsigned and of the
older form: then clock, identity and replay mean nothing, since anybody could have written it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import attrs

from ...facts.groups import DEFAULT_UNIVERSE, Claim, Told
from .once import Once
from .sources import Network, Sources, host_port, ip_of, is_loopback, is_own

STALE_S = 30.0
"""How far the clock of a sender may be off."""
MAJORS = ("0", "1")
"""The version before the first whole one, and that one."""
MOST_NODES = 4096
"""Senders whose last number is kept. Only whoever has the key can make more."""
MOST_BOOTS = 4
"""Starts of one sender whose last number is kept, so that a datagram of an earlier start is known again."""

_PROTO = re.compile(r"([0-9]{1,9})\.[0-9]{1,9}")


@attrs.frozen
class Heard:
    """A daemon to ask: `addresses` as host:port, the best first. `node_id` is "" where an unsigned one names none."""

    node_id: str
    addresses: tuple[str, ...]


class Reception:
    """What has been heard so far. `verified` tells whether a claim was signed with our key; `key` whether there is
    one."""

    def __init__(
        self, universes: Sequence[str], sources: Sources, *, key: bool, verified: Callable[[Claim], bool]
    ) -> None:
        self._universes = frozenset(universes)
        self._sources = sources
        self._key = key
        self._verified = verified
        self._once = Once()
        self._boots: dict[str, dict[str, int]] = {}

    def allow(self, sources: Sources) -> None:
        """Who may announce from now on."""
        self._sources = sources

    def too_large(self, source: str) -> Told | None:
        return self._tell("announce_oversize", source)

    def judge(self, claim: Claim, source: str, own: Sequence[Network], now: float) -> Heard | Told | None:
        """`source` is the address it came from, `own` this machine's networks, `now` seconds since 1970. A daemon; or
        a line to log; or nothing."""
        if (claim.universe if claim.universe is not None else DEFAULT_UNIVERSE) not in self._universes:
            return None
        payload = claim.payload
        if self._key:
            if payload is None or not self._verified(claim):
                return self._tell("announce_rejected", source, reason="it is not signed with our secret")
            if payload.get("mentat_announce") != 2 and not _acceptable(payload.get("proto")):
                if "proto" not in payload:
                    return None
                return self._tell("announce_proto_mismatch", source, proto=_short(payload["proto"]))
            t, node_id, boot_id = _whole(payload.get("t")), payload.get("node_id"), payload.get("boot_id")
            if t < 0:
                return None
            if abs(now - t) > STALE_S:
                why = "its clock or ours is wrong"
                return self._tell("announce_stale", source, off_s=round(t - now), reason=why)
            if not (isinstance(node_id, str) and node_id and isinstance(boot_id, str) and boot_id):
                return None
            if self._replayed(node_id, boot_id, _whole(payload.get("seq"))):
                return None
        else:
            if payload is None:
                return None
            if claim.signature is not None:
                return self._tell("announce_unverifiable", source, reason="it is signed, and no secret is set here")
            if payload.get("mentat_announce") != 1 or payload.get("mentat_announce") is True:
                return None
        port = _port(payload.get("http"))
        if not port:
            return None
        if not self._sources.allow(source, own):
            return self._tell("announce_source_not_allowed", source, reason="it is not in groups.allowed_sources")
        named = payload.get("node_id")
        return Heard(
            named if isinstance(named, str) else "",
            tuple(host_port(host, port) for host in self._hosts(payload.get("addrs"), source, own)),
        )

    @property
    def remembered(self) -> int:
        """How much is kept, for tests of its bound."""
        return len(self._boots) + len(self._once)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _replayed(self, node_id: str, boot_id: str, seq: int) -> bool:
        """Whether this number of this start was heard already. It is used up by being heard, whatever comes after."""
        boots = self._boots.pop(node_id, {})
        self._boots[node_id] = boots  # the one heard last is forgotten last
        if len(self._boots) > MOST_NODES:
            del self._boots[next(iter(self._boots))]
        if seq <= boots.get(boot_id, -1):  # also where it is no number
            return True
        boots[boot_id] = seq
        if len(boots) > MOST_BOOTS:
            del boots[next(iter(boots))]
        return False

    def _hosts(self, addrs: object, source: str, own: Sequence[Network]) -> list[str]:
        """Where to ask: what it names in our own networks, then where it came from. Its loopback is not ours."""
        named = [text for text in addrs if isinstance(text, str)] if isinstance(addrs, list) else []
        found = [
            str(ip)
            for text in named[:64]
            if (ip := ip_of(text)) is not None
            and not ip.is_link_local
            and (not ip.is_loopback or is_loopback(source))
            and self._sources.allow(text, own)
            and is_own(text, own)
        ]
        return list(dict.fromkeys([*found, source]))

    def _tell(self, event: str, source: str, **fields: object) -> Told | None:
        if not self._once.first(event, source):
            return None
        if self._once.last_one(event):
            fields["more"] = "further sources of this fault are not told"
        return Told(event, fields={"source": source, **fields})


def _acceptable(proto: object) -> bool:
    found = _PROTO.fullmatch(proto) if isinstance(proto, str) else None
    return found is not None and found[1] in MAJORS


def _port(http: object) -> int:
    """The port of `host:port`, 0 where there is none."""
    if not isinstance(http, str):
        return 0
    host, colon, port = http.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and len(port) <= 5):
        return 0
    return int(port) if 1 <= int(port) <= 65535 else 0


def _whole(value: object) -> int:
    """A whole number from 0 on, -1 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else -1


def _short(value: object) -> str:
    return repr(value)[:40]

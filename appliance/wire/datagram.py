"""Announcements as bytes: one JSON object in a UDP datagram, signed or not.

Two forms exist. The older one carries `mentat_announce` (1 unsigned, 2 signed), the newer one `proto`. What we send
holds both, so that either kind of router reads it. A signed datagram is `{"p": payload, "sig": hex}`; the signature
covers the payload written out again in one certain way (`canonical`), not the bytes that came. So whatever Python would
write otherwise than another parser (a float, a lone surrogate, a number beyond 64 bits) cannot be signed at all.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping

import msgspec

from ..facts.groups import Claim

MOST_BYTES = 1400
"""The largest datagram that is sent or taken: with its headers it fits into one Ethernet frame."""
READ_BYTES = MOST_BYTES + 1
"""A read that comes out full is a datagram that was longer; one of exactly `MOST_BYTES` is not."""

PROTO = "0.99"
_KEY_EDGES = b" \t\n\f\r"
_LEAST_INT, _MOST_INT = -(2**63), 2**64 - 1


class NotCanonical(ValueError):
    """A payload that has no one way to be written."""


def secret(raw: bytes) -> bytes:
    """The key in the bytes of a file or a variable: blanks at its ends are not part of it."""
    return raw.strip(_KEY_EDGES)


def read(data: bytes) -> Claim:
    """What a datagram claims. Never raises: bytes that are no announcement give a claim without a payload."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return Claim(None)
    if not isinstance(value, dict):
        return Claim(None)
    if "p" not in value:
        return Claim(value, None, _universe(value))
    payload, signature = value["p"], value.get("sig")
    if not isinstance(payload, dict):
        return Claim(None)
    return Claim(payload, signature if isinstance(signature, str) else "", _universe(payload))


def verified(claim: Claim, key: bytes) -> bool:
    """Whether the claim was signed with `key`. In constant time once there is something to compare."""
    if claim.payload is None or not claim.signature or not claim.signature.isascii():
        return False
    try:
        wanted = sign(claim.payload, key)
    except NotCanonical:
        return False
    return hmac.compare_digest(wanted, claim.signature.lower())


def sign(payload: Mapping[str, object], key: bytes) -> str:
    """The signature in lower-case hex. Raises NotCanonical."""
    return hmac.new(key, canonical(payload), hashlib.sha256).hexdigest()


def canonical(payload: Mapping[str, object]) -> bytes:
    """The bytes that are signed: keys sorted at every depth, no blanks, no escapes but those that must be. Raises
    NotCanonical."""
    try:
        _check(payload)
        text = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except (ValueError, TypeError, RecursionError) as error:
        raise NotCanonical(str(error)) from None


def build(payload: Mapping[str, object], key: bytes = b"") -> bytes:
    """The datagram of an announcement, signed where there is a key; both forms at once.

    `payload` is without `proto` and `mentat_announce`. Raises NotCanonical.
    """
    whole = {**payload, "proto": PROTO, "mentat_announce": 2 if key else 1}
    if not key:
        return canonical(whole)
    return b'{"p":%b,"sig":"%b"}' % (canonical(whole), sign(whole, key).encode())


def _universe(payload: Mapping[str, object]) -> str | None:
    universe = payload.get("universe")
    return universe if isinstance(universe, str) else None


def _check(value: object) -> None:
    """Raises ValueError for what parsers write differently."""
    match value:
        case None | bool() | str():
            pass
        case int():
            if not _LEAST_INT <= value <= _MOST_INT:
                raise ValueError("a number beyond 64 bits")
        case list() | tuple():
            for item in value:
                _check(item)
        case Mapping():
            for name, item in value.items():
                if not isinstance(name, str):
                    raise ValueError("a key that is no string")
                _check(item)
        case _:
            raise ValueError(f"a {type(value).__name__}")

"""Whose request it is, and what is known of it before it runs.

With auth off the caller's band is what `x-appliance-band` says, and whose turn it is is told by its session, or by its
address where it names none.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..facts.bands import AdmissionSettings
from ..facts.call import ABSENT, Ask, Caller
from ..facts.errors import Refusal

BAND_FIELD = b"x-appliance-band"
MOST_PROMPT_BYTES = 16384
"""How much of a prompt's head the prefix index looks at."""
_MOST_TENANT_BYTES = 200


def caller_of(headers: Mapping[bytes, bytes], ask: Ask, peer: str, admission: AdmissionSettings) -> Caller:
    """The caller of a request. `peer` is the client's address with its port. Raises Refusal for an unknown band."""
    session = session_of(headers, ask)
    tenant = session.strip(b'"')[:_MOST_TENANT_BYTES].decode("utf-8", "replace") if session else ""
    if not tenant:
        tenant = peer.rpartition(":")[0]
    return Caller("", tenant, band_of(headers, admission), session)


def band_of(headers: Mapping[bytes, bytes], admission: AdmissionSettings) -> str:
    """The band that the caller names, or the default. Raises Refusal for an unknown one; it needs no body, so the door
    asks before it reads any."""
    named = headers.get(BAND_FIELD)
    if named is None:
        return admission.default_band
    band = named.decode("latin-1")
    if any(band == known.name for known in admission.bands):
        return band
    names = ", ".join(known.name for known in admission.bands)
    raise Refusal(
        400, "unknown_band", f"x-appliance-band: {band[:50]!r} is none of {names}", BAND_FIELD.decode(),
        should_retry=False,
    )  # fmt: skip


def session_of(headers: Mapping[bytes, bytes], ask: Ask) -> bytes:
    """What the client calls its session: a header, or `session_id` or `user` of the body; b"" without one."""
    named = headers.get(b"x-session-id", b"")
    if named:
        return named
    if ask.session_id is ABSENT and ask.user is ABSENT:
        return b""
    for raw in (ask.session_id, ask.user):
        value = bytes(raw)
        if len(value) > 2 and value[:1] == b'"':
            return value
    return b""


def prompt_head(ask: Ask, least_bytes: int) -> bytes:
    """The raw JSON of the prompt's head, b"" where it is too short to be worth a look."""
    for raw in (ask.messages, ask.prompt, ask.input):
        view = memoryview(raw)
        if len(view):
            return bytes(view[:MOST_PROMPT_BYTES]) if len(view) >= least_bytes else b""
    return b""


def prompt_bytes(ask: Ask) -> int:
    """The length of the prompt's JSON."""
    return len(memoryview(ask.messages)) or len(memoryview(ask.prompt)) or len(memoryview(ask.input))


def answer_bound(ask: Ask) -> int | None:
    """The caller's own bound on the answer, in tokens; None without one that makes sense."""
    raw = bytes(ask.max_completion_tokens) or bytes(ask.max_tokens)
    return int(raw) if raw.isdigit() and len(raw) < 10 else None


def answer_count(ask: Ask) -> int:
    """How many answers are asked for (`n`), at least 1."""
    if ask.n is ABSENT:
        return 1
    raw = bytes(ask.n)
    return max(1, int(raw)) if raw.isdigit() and len(raw) < 6 else 1

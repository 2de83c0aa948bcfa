"""What the tables hold, as values. All times are seconds since 1970, by the clock of the machine that wrote them."""

from __future__ import annotations

from attrs import frozen


@frozen
class Cordon:
    """Nothing new may go to this node. `by` is who said so. `drained_at`: since then what runs there is to go elsewhere
    (None: it may stay)."""

    node: str
    at: float
    by: str
    drained_at: float | None = None


@frozen
class Certificate:
    """A certificate that was given to a node. `serial` is in lower case hex without leading zeros."""

    node: str
    serial: str
    not_after: float
    issued_at: float
    revoked_at: float | None = None

    def good(self, now: float) -> bool:
        """Neither revoked nor past its end."""
        return self.revoked_at is None and now < self.not_after


@frozen
class JoinToken:
    """Lets one machine join as `node`, once. Only the digest of the token is kept."""

    sha256: str
    node: str
    expires_at: float
    used_at: float | None = None


@frozen
class Entry:
    """One line of the audit: who did what to what. `id` counts upwards."""

    id: int
    at: float
    by: str
    action: str
    target: str
    detail: str

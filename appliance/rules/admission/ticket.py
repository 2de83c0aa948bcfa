"""A ticket: one request's place in line, from its question to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs
import msgspec

from appliance.facts.errors import Refusal

if TYPE_CHECKING:
    from appliance.rules.admission.capacity import Load
    from appliance.rules.admission.fairness import Rotation

State = Literal["new", "waiting", "granted", "running", "ended", "refused"]
"""new: not asked yet. waiting: queued. granted: holds a lease, visible nowhere else. running: counted in flight at an
endpoint. ended: has given back all it held. refused: was never let in, and `refusal` says why."""

Blocker = Literal["", "saturation", "unproven", "loading"]
"""What a ticket waited for: the pool's saturation above its band's ceiling; every endpoint of unknown capacity holding
as many unproven requests as it may; a model scaled to zero. "" for one that did not wait."""


@attrs.frozen
class Explanation:
    """The admission part of a request's decision record. `ahead` and the three last fields are as they were when it
    asked; `wait_s` is the time in the queue, up to now for one that is still there."""

    model: str
    band: str
    tenant: str
    state: State
    work: int
    ahead: int
    wait_s: float
    pool: str
    blocker: Blocker
    saturation: float
    ceiling: float


class Ticket(msgspec.Struct, array_like=True, eq=False):
    """One request in admission. Made by the caller, and after `Admission.ask` changed by `Admission` alone.

    `tenant` is whose turn it takes, `work` its estimated tokens (see `estimates`; at least 1 is charged), which is read
    when a ticket that waited gets its place, so that the caller may fill it in once the ticket does wait. `waiter` is
    the caller's own: whatever it needs to wake the task that waits, never touched here.

    A msgspec struct, since one is made for every request. Each is like no other but itself.
    """

    model: str
    band: str
    tenant: str = ""
    work: int = 1
    waiter: object = None
    ahead: int = 0
    """Waiters of its model in its own and higher bands when it came."""
    asked_at: float = 0.0
    blocker: Blocker = ""
    ceiling: float = 0.0
    expires_at: float = 0.0
    left_queue_at: float = 0.0
    load: Load | None = None
    """Where its lease is booked, later where it runs."""
    number: int = 0
    """Order of arrival among those that waited."""
    pool: str = ""
    """The pool it was let in for; the choice of an endpoint begins there."""
    proven_at: float = 0.0
    """When it was known to run, not just to have been sent."""
    rank: int = 0
    """Of its band: 0 is the highest."""
    refusal: Refusal | None = None
    rotation: Rotation | None = None
    """Where its turn was charged; None for one that did not wait."""
    saturation: float = 0.0
    sent_at: float = 0.0
    """When it went to its present endpoint."""
    share: float = 0.0
    """Its tenant's account after that charge."""
    state: State = "new"

    def wait_s(self, now: float) -> float:
        """Seconds in the queue, up to `now` while it is still there."""
        return (now if self.state == "waiting" else self.left_queue_at) - self.asked_at

    def explain(self, now: float) -> Explanation:
        return Explanation(
            self.model,
            self.band,
            self.tenant,
            self.state,
            self.work,
            self.ahead,
            self.wait_s(now),
            self.pool,
            self.blocker,
            self.saturation,
            self.ceiling,
        )

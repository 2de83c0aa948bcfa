"""One request while it is served: what came in, where its answer goes, and what it holds meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..facts.call import Call
from ..rules.admission.ticket import Ticket
from ..rules.scheduling.member import Lease
from ..rules.scheduling.table import Entry
from .reply import Reply

if TYPE_CHECKING:
    from .admission import Gate
    from .record import Record


class Errand:
    """Made by the service, one for each call, and gone with it; what is to be remembered stands in `record`.

    `only` names the endpoint that must serve it, "" for any; `barred` are those that must not. The rest changes on the
    way: `entry` is the model that is being asked, `ticket` its place there (None where it needs none), `lease` what it
    holds at the endpoint it was sent to last. It must not hold an exchange, which holds it: the cycle would keep every
    request's body until the collector runs, and made the collector run for a tenth of the road's time.
    """

    __slots__ = ("barred", "call", "entry", "gate", "lease", "only", "record", "reply", "ticket")

    def __init__(self, gate: Gate, call: Call, reply: Reply, record: Record, entry: Entry, only: str) -> None:
        self.gate = gate
        self.call = call
        self.reply = reply
        self.record = record
        self.entry = entry
        self.only = only
        self.barred: tuple[str, ...] = ()
        self.ticket: Ticket | None = None
        self.lease: Lease | None = None

    def began(self, at: float, *, streamed: bool) -> None:
        """The first of the answer is passed on."""
        self.record.first_byte_at = at
        lease, ticket = self.lease, self.ticket
        assert lease is not None, "dispatched"
        if lease.probe:
            lease.answered(at)
            self.gate.health_changed(at)  # it is back
        # An answer that comes in one piece proves nothing by its beginning; its end does (`rules/admission/capacity`).
        if streamed and ticket is not None:
            self.gate.began(ticket, at)

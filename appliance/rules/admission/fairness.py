"""Whose turn it is within a band: a rotation over tenants that charges each turn.

Each tenant with waiters has an account: the work it was charged for. The turn goes to the lowest account, ties to
whoever has waited longest for a turn, and the account grows by the cost of what was let in. This is deficit round
robin with the quantum made as small as possible: with equal costs it is plain round robin, one request each; with
unequal costs a tenant whose request was twenty times as long sits out until the others have had as much. It pays
afterwards, so a long request is not held back until its tenant has saved up for it.

A tenant that comes (back) starts at the account of the last turn, or at its own if that is higher: being away earns
nothing, and does not pay debts either. Debts of absent tenants are kept within bounds (`REMEMBERED`, oldest forgotten
first; all after `FORGET_S` without anybody waiting), everything else about a tenant goes with its last waiter.

Costs are estimates first. `settle` puts the real figure in their place once it is known. What is charged is only what
had to wait: while there is room for everybody there is nothing to share out.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from appliance.rules.admission.ticket import Ticket

REMEMBERED = 512
"""Absent tenants whose debts are kept, per model and band."""
FORGET_S = 60.0
"""Seconds without a waiter after which all debts are forgiven."""


class _Turn:
    """A tenant in the rotation. `order` is that of its one valid entry in the heap."""

    __slots__ = ("account", "order", "tenant", "tickets")

    def __init__(self, tenant: str, account: float) -> None:
        self.tenant = tenant
        self.account = account
        self.order = 0
        # Ordered by links, not by position: taking from the front of a plain dict costs more the more has been taken.
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()


class Rotation:
    """The waiters of one model in one band. `by_work` False charges every request the same."""

    def __init__(self, by_work: bool) -> None:
        self._by_work = by_work
        self._turns: dict[str, _Turn] = {}
        self._heap: list[tuple[float, int, _Turn]] = []
        self._orders = 0
        self._served = 0.0  # the account that had the last turn
        self._debts: OrderedDict[str, float] = OrderedDict()
        self._empty_since = 0.0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def tenants(self) -> int:
        """Tenants that have waiters."""
        return len(self._turns)

    @property
    def remembered(self) -> int:
        """Absent tenants whose debts are kept."""
        return len(self._debts)

    def add(self, ticket: Ticket, now: float) -> None:
        """Put a ticket behind those of its tenant."""
        turn = self._turns.get(ticket.tenant)
        if turn is None:
            if not self._turns and now - self._empty_since > FORGET_S:
                self._debts.clear()
            turn = _Turn(ticket.tenant, max(self._served, self._debts.pop(ticket.tenant, 0.0)))
            self._turns[ticket.tenant] = turn
            self._enter(turn)
        turn.tickets[ticket] = None
        self._count += 1

    def take(self, now: float) -> Ticket:
        """The next ticket, charged. Raises IndexError when nobody waits."""
        while True:
            account, order, turn = heapq.heappop(self._heap)
            if turn.order == order:
                break
        self._served = account
        ticket, _ = turn.tickets.popitem(last=False)
        self._count -= 1
        turn.account += self._cost(ticket.work)
        ticket.rotation = self
        ticket.share = turn.account
        if turn.tickets:
            self._enter(turn)
        else:
            self._leave(turn, now)
        return ticket

    def drop(self, ticket: Ticket, now: float) -> None:
        """Take out a ticket that waits here, wherever it stands; nothing is charged."""
        turn = self._turns[ticket.tenant]
        del turn.tickets[ticket]
        self._count -= 1
        if not turn.tickets:
            self._leave(turn, now)

    def settle(self, ticket: Ticket, work: int) -> None:
        """Charge what a ticket that was taken here really cost (0: it did not come to run) in place of the estimate."""
        difference = self._cost(work) - self._cost(ticket.work) if work else -self._cost(ticket.work)
        if not difference:
            return
        turn = self._turns.get(ticket.tenant)
        if turn is not None:
            turn.account = max(self._served, turn.account + difference)
            self._enter(turn)
        else:
            self._owe(ticket.tenant, self._debts.pop(ticket.tenant, ticket.share) + difference)

    def _cost(self, work: int) -> int:
        return max(1, work) if self._by_work else 1

    def _enter(self, turn: _Turn) -> None:
        """Give a tenant its entry in the heap; an earlier one is void from now on."""
        self._orders += 1
        turn.order = self._orders
        heapq.heappush(self._heap, (turn.account, turn.order, turn))
        if len(self._heap) > 2 * len(self._turns) + 16:
            self._heap = [entry for entry in self._heap if entry[2].order == entry[1]]
            heapq.heapify(self._heap)

    def _leave(self, turn: _Turn, now: float) -> None:
        turn.order = 0
        del self._turns[turn.tenant]
        self._owe(turn.tenant, turn.account)
        if not self._turns:
            self._empty_since = now
            self._heap.clear()

    def _owe(self, tenant: str, account: float) -> None:
        if account <= self._served:
            return
        self._debts[tenant] = account
        if len(self._debts) > REMEMBERED:
            self._debts.popitem(last=False)

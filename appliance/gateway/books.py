"""The books: one record per request, whatever became of it.

Settling is synchronous, so neither a deadline nor a cancellation can lose it. The last few thousand records stay in
memory for `ctl requests` and `ctl explain request`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, islice

from .archive import Archive
from .meters import Meters, ModelMeters
from .record import Record
from .usage import Tally


class Books:
    """Live and past requests, and what is counted of them."""

    def __init__(self, meters: Meters) -> None:
        self.meters = meters
        self.live: dict[str, Record] = {}
        self._archive = Archive()

    def open(self, record: Record) -> None:
        # a client may use an id twice at a time; the later one is found under it, both are counted
        self.live[record.request_id] = record

    def settle(self, record: Record, body_bytes: int) -> None:
        """The request is over. Exactly once per record."""
        now = time.monotonic()
        record.ended_at = now
        record.sleeper = None
        if self.live.get(record.request_id) is record:
            del self.live[record.request_id]
        meters = self.meters.model(record.model or Meters.UNKNOWN)
        key = (record.band, record.code)
        meters.requests[key] = meters.requests.get(key, 0) + 1
        meters.duration.observe(now - record.arrived)
        for ticket in record.tickets:
            if ticket.number:  # it waited, or was displaced while it did
                self.meters.waited(record.band, ticket.wait_s(now))
        if record.outcome == "refused":
            rejection = (record.band, record.reason)
            self.meters.rejections[rejection] = self.meters.rejections.get(rejection, 0) + 1
        tally = record.tally
        if tally is not None and record.first_byte_at:
            record.estimated = tally.estimate(body_bytes)
            _count_answer(meters, record, tally)
        self._archive.keep(record)

    def find(self, request_id: str) -> Record | None:
        return self.live.get(request_id) or self._archive.find(request_id)

    def recent(self, count: int) -> Iterator[Record]:
        """Live requests, then past ones, newest first, as they are now: what happens while they are read changes
        nothing in the row."""
        live = sorted(self.live.values(), key=lambda record: -record.arrived)
        return islice(chain(live, self._archive.recent(count)), count)


def _count_answer(meters: ModelMeters, record: Record, tally: Tally) -> None:
    meters.prompt_tokens += tally.prompt_tokens
    meters.completion_tokens += tally.completion_tokens
    meters.cached_tokens += tally.cached_tokens
    if record.stream and tally.first_content_at:
        meters.first_token.observe(tally.first_content_at - record.dispatched_at)
        gaps = tally.content_events - 1
        if gaps > 0:
            # the mean gap, counted as often as there were gaps: the clock is read per event anyway, a histogram's
            # bisection per event would be a tenth of what an event costs
            meters.inter_token.observe((tally.last_content_at - tally.first_content_at) / gaps, gaps)

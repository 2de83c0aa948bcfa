"""Records of requests that are over: what is packed comes out as it went in, and what cannot be is kept as it is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from appliance.facts.bands import AdmissionSettings
from appliance.facts.call import Ask, Call, Caller, Route
from appliance.facts.choice import ANSWER, Attempt, Choice
from appliance.facts.endpoint import Endpoint
from appliance.facts.errors import Refusal
from appliance.facts.settings import Deadlines
from appliance.gateway import archive
from appliance.gateway.archive import Archive
from appliance.gateway.promises import Promises
from appliance.gateway.record import Record
from appliance.gateway.trace import Trace
from appliance.gateway.usage import Tally
from appliance.nursery.sleeper import Sleeper
from appliance.rules.admission.queue import Admission
from appliance.rules.admission.ticket import Ticket

CHOICE = Choice(
    "llama", "spot", "the only pool", ("a", "b"), (("c", "ready"),),
    ([1.0, 0.25], [0.5, 0.5], [1.0, 0.75], [0.0, 0.5], [0.0, 0.0]), [2.5, 2.0], 0, (0.0, 0.125), "moved", 300, 200,
    ("b",),
)  # fmt: skip


def record_of(number: int = 1) -> Record:
    """A request that was answered by the first endpoint it was sent to."""
    caller = Caller("", "tenänt", "gold", b"s")
    call = Call(b"req-%d" % number, b"POST", b"/v1/x", Route("chat"), {}, b"{}", Ask(), "alias", True, caller, 4.25)
    record = Record.of(call, Sleeper())
    record.sleeper = None
    record.outcome, record.code, record.endpoint, record.model = "ok", 200, "a", "llama"
    record.dispatched_at, record.first_byte_at, record.ended_at = 4.5, 5.5, 7.0
    record.estimated = True
    record.choices = (CHOICE,)
    record.promises = Promises.of(Deadlines())
    record.tally = tally = Tally()
    tally.prompt_tokens, tally.completion_tokens, tally.reported = 12, 1 << 40, True
    tally.first_content_at, tally.last_content_at, tally.content_events = 5.5, 6.75, 9
    tally.answer_id = "resp_1"
    admission = Admission(AdmissionSettings())
    admission.table({"llama": [Endpoint("a", "127.0.0.1", 1, capacity=4)]}, 0.0)
    ticket = Ticket("llama", "gold", "tenänt", 3)
    admission.ask(ticket, 4.5)
    admission.dispatched(ticket, "a", 4.5)
    admission.began(ticket, 5.5)
    admission.finished(ticket, 7.0)
    record.tickets = (ticket,)
    return record


def told(record: Record) -> dict[str, Any]:
    """All that a record says, by name, down to the parts of its parts."""

    def parts(value: object) -> object:
        if isinstance(value, msgspec.Struct):
            return type(value), {name: parts(getattr(value, name)) for name in value.__struct_fields__}
        return type(value), [parts(each) for each in value] if isinstance(value, tuple | list) else value

    return {name: parts(getattr(record, name)) for name in record.__struct_fields__}


def test_what_is_usual_comes_out_as_it_went_in() -> None:
    record = record_of()
    kept = Archive()
    kept.keep(record)
    found = kept.find("req-1")
    assert found is not None and found is not record, "packed"
    assert told(found) == told(record)
    assert [told(each) for each in kept.recent(5)] == [told(record)]


def test_what_was_not_asked_for_or_counted_stays_so() -> None:
    record = record_of()
    record.tickets, record.choices = (), ()
    record.tally = record.promises = None
    kept = Archive()
    kept.keep(record)
    found = kept.find("req-1")
    assert found is not None and found is not record
    assert told(found) == told(record)


def attempted(record: Record) -> None:
    record.attempts = (Attempt("b", ANSWER, 503),)


def traced(record: Record) -> None:
    record.trace = Trace(b"t" * 16, b"", b"s" * 8, True, b"", b"POST", b"/v1/x")


def refused(record: Record) -> None:
    record.refused(Refusal(503, "queue_full", "later"))


def second_model(record: Record) -> None:
    ticket = Ticket("other", "gold")
    ticket.refusal = Refusal(503, "queue_full", "later")
    record.tickets = (ticket, *record.tickets)


def waited(record: Record) -> None:
    admission = Admission(AdmissionSettings())
    admission.table({"m": [Endpoint("a", "127.0.0.1", 1, capacity=1)]}, 0.0)
    first, second = Ticket("m", "bronze"), Ticket("m", "bronze")
    admission.ask(first, 0.0)
    admission.ask(second, 0.0)
    assert admission.leave(first, 1.0) == [second]
    admission.leave(second, 2.0)
    record.tickets = (second,)


@pytest.mark.parametrize("unusual", [attempted, traced, refused, second_model, waited])
def test_what_is_unusual_is_kept_as_it_is(unusual: Any) -> None:
    record = record_of()
    unusual(record)
    kept = Archive()
    kept.keep(record)
    assert kept.find("req-1") is record
    assert list(kept.recent(1)) == [record]


def test_the_oldest_is_forgotten_and_the_newest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "KEPT_RECORDS", 3)
    kept = Archive()
    for number in range(5):
        kept.keep(record_of(number))
    assert [record.request_id for record in kept.recent(9)] == ["req-4", "req-3", "req-2"]
    assert [record.request_id for record in kept.recent(2)] == ["req-4", "req-3"]
    assert kept.find("req-1") is None


@pytest.mark.parametrize("unusual", [False, True])
def test_a_request_is_found_by_its_whole_name_and_the_latest_of_several(unusual: bool) -> None:
    kept = Archive()
    for number, code in ((1, 200), (1, 201), (11, 202), (12, 203)):
        record = record_of(number)
        record.code = code
        if unusual:
            attempted(record)
        kept.keep(record)
    found = kept.find("req-1")
    assert found is not None and found.code == 201
    assert kept.find("req-") is kept.find("llama") is None
    assert len(list(kept.recent(9))) == 4


def test_each_is_unpacked_in_its_turn_and_what_comes_meanwhile_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "KEPT_RECORDS", 3)
    kept = Archive()
    for number in range(3):
        kept.keep(record_of(number))
    unpacked: list[object] = []
    unpack = archive._unpack
    monkeypatch.setattr(archive, "_unpack", lambda packed: (unpacked.append(packed), unpack(packed))[1])
    row = kept.recent(3)
    assert unpacked == []
    assert next(row).request_id == "req-2"
    assert len(unpacked) == 1
    kept.keep(record_of(3))
    assert [record.request_id for record in row] == ["req-1", "req-0"]

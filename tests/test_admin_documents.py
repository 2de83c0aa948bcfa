"""The documents of the management API, from objects as the road leaves them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import trio

from appliance.admin import documents
from appliance.admin.answers import gathered
from appliance.admin.running import Running
from appliance.facts.call import Ask, Call, Caller, Route
from appliance.facts.choice import ANSWER, CLIENT_LEFT, DEADLINE, REFUSED, RESET, Attempt, Outcome
from appliance.facts.endpoint import Endpoint, Sample
from appliance.facts.errors import Refusal
from appliance.facts.settings import Model, Settings
from appliance.gateway.record import Record
from appliance.gateway.service import Gateway
from appliance.gateway.usage import Tally
from appliance.nursery.sleeper import Sleeper
from appliance.rules.admission.ticket import Ticket
from appliance.rules.engines.metrics import Contract
from appliance.rules.scheduling.pipeline import choose, not_ready
from appliance.rules.scheduling.retry import next_step
from appliance.wire.line import Poller

SETTINGS = Settings(
    endpoints=(
        Endpoint("a", "127.0.0.1", 1, models=("llama",)),
        Endpoint("b", "127.0.0.1", 2, models=("llama",)),
        Endpoint("c", "127.0.0.1", 3, models=("small",), engine="vllm", capacity=8, pool="other", pool_priority=3),
        Endpoint("d", "127.0.0.1", 4),
    ),
    models=(Model("llama", aliases=("chat",), fallbacks=("small",), context_tokens=4096),),
)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    poller = Poller()
    made = Gateway(SETTINGS, poller, random.Random(1))
    yield made
    made.close()
    poller.close()


def opened(gateway: Gateway, model: str = "llama", *, stream: bool = False) -> Record:
    """A request that has just arrived."""
    route, now = Route("chat"), time.monotonic()
    call = Call(b"req-1", b"POST", b"/v1/x", route, {}, b"{}" * 50, Ask(), model, stream, Caller(), now)
    record = Record.of(call, Sleeper())
    gateway.books.open(record)
    return record


def dispatched(gateway: Gateway, record: Record, tried: tuple[str, ...] = (), model: str = "") -> str:
    """Choose and send, as the service does; the endpoint's id, "" when there was none."""
    entry = gateway.table.resolve(model or record.wanted)
    record.model = record.model or entry.name
    member, choice = choose(entry, gateway.policy, time.monotonic(), gateway.rng, tried=tried)
    record.choices += (choice,)
    if member is None:
        return ""
    record.dispatched_at = record.dispatched_at or time.monotonic()
    record.endpoint = member.id
    record.promises = gateway.promises
    record.tally = Tally()
    return member.id


def failed(record: Record, attempt: Attempt, *, another: bool = False, passed_on: bool = False) -> None:
    record.attempts += (attempt,)
    record.steps += ((time.monotonic(), next_step([attempt], passed_on=passed_on, another=another)),)


def settled(gateway: Gateway, record: Record, outcome: str = "ok", code: int = 200) -> dict[str, Any]:
    """End it; its document."""
    if record.outcome == "running":
        record.outcome, record.code = outcome, code
    gateway.books.settle(record, 100)
    return shown(gateway, record)


def shown(gateway: Gateway, record: Record) -> dict[str, Any]:
    document = documents.request(gateway, record.request_id, time.monotonic())
    assert document is not None
    return dict(json.loads(json.dumps(document, allow_nan=False)))


def test_a_request_answered_at_once(gateway: Gateway) -> None:
    record = opened(gateway, "chat")
    endpoint = dispatched(gateway, record)
    assert record.tally is not None
    record.tally.body(b'{"usage":{"prompt_tokens":7,"completion_tokens":3}}', time.monotonic())
    record.first_byte_at = time.monotonic()
    document = settled(gateway, record)
    assert (document["asked_for"], document["model"], document["code"]) == ("chat", "llama", 200)
    assert document["tokens"] == {"prompt": 7, "cached": 0, "completion": 3, "reasoning": 0, "estimated": False}
    (only,) = document["rounds"]
    assert only["picked"] == endpoint and {each["endpoint"] for each in only["candidates"]} == {"a", "b"}
    assert set(only["candidates"][0]["scores"]) == {"queue", "kv", "inflight", "prefix", "session"}
    assert [attempt["told"] for attempt in only["attempts"]] == ["it answered with 200"]
    assert document["attempts"] == 1 and document["deadline_next"] is None
    assert set(document["deadlines"]) == {"dial_s", "total_s", "write_stall_s"}


def test_a_second_endpoint_after_a_refused_connection(gateway: Gateway) -> None:
    record = opened(gateway)
    first = dispatched(gateway, record)
    failed(record, Attempt(first, REFUSED, detail="cannot connect to 127.0.0.1"), another=True)
    second = dispatched(gateway, record, tried=(first,))
    document = settled(gateway, record)
    one, two = document["rounds"]
    assert (one["picked"], two["picked"]) == (first, second) and first != second
    assert one["attempts"][0]["told"] == "no connection (cannot connect to 127.0.0.1)"
    assert one["attempts"][0]["next_told"] == "it had not been sent, so another endpoint was tried"
    assert two["drops"] == [{"endpoint": first, "filter": "tried"}]
    assert two["attempts"][0]["told"] == "it answered with 200"
    assert document["attempts"] == 2


def test_a_second_sending_to_the_same_endpoint_is_no_second_choice(gateway: Gateway) -> None:
    record = opened(gateway)
    endpoint = dispatched(gateway, record)
    failed(record, Attempt(endpoint, RESET, sent=True, reused=True))
    document = settled(gateway, record)
    (only,) = document["rounds"]
    assert [attempt["endpoint"] for attempt in only["attempts"]] == [endpoint, endpoint]
    assert "again on a fresh one" in only["attempts"][0]["next_told"]
    assert only["attempts"][1]["told"] == "it answered with 200"
    assert document["attempts"] == 2


def test_the_fallback_is_a_round_of_its_own(gateway: Gateway) -> None:
    record = opened(gateway)
    first = dispatched(gateway, record)
    failed(record, Attempt(first, ANSWER, 503, sent=True, answered=True))
    dispatched(gateway, record, model="small")
    document = settled(gateway, record)
    assert [each["model"] for each in document["rounds"]] == ["llama", "small"]
    assert document["served_as"] == "small" and document["model"] == "llama"
    assert document["rounds"][0]["attempts"][0]["next_told"] == "no other endpoint of the model could take it"


@pytest.mark.parametrize(
    ("attempt", "passed_on", "told", "then"),
    [
        (
            Attempt("a", DEADLINE, sent=True, deadline="first_token_s"),
            False,
            "the first token took longer than first_token_s",
            "after a deadline nothing else is tried",
        ),
        (
            Attempt("a", RESET, sent=True, answered=True, detail="gone"),
            True,
            "it broke off in the middle of its answer (gone)",
            "a part of the answer was there already, so nothing else was tried",
        ),
        (
            Attempt("a", ANSWER, 400, sent=True, answered=True),
            False,
            "it answered with an error, HTTP 400",
            "no other endpoint would say anything else, so this is the answer",
        ),
    ],
)
def test_what_ended_an_attempt_and_why_it_was_the_last(
    gateway: Gateway, attempt: Attempt, passed_on: bool, told: str, then: str
) -> None:
    record = opened(gateway)
    dispatched(gateway, record)
    failed(record, attempt, passed_on=passed_on)
    last = settled(gateway, record, "failed", 502)["rounds"][0]["attempts"][0]
    assert (last["told"], last["next_told"]) == (told, then)


def test_a_client_that_left_has_no_next_step(gateway: Gateway) -> None:
    record = opened(gateway, stream=True)
    dispatched(gateway, record)
    record.attempts += (Attempt("a", CLIENT_LEFT, sent=True),)
    (only,) = settled(gateway, record, "client left", 499)["rounds"]
    (attempt,) = only["attempts"]
    assert attempt["told"] == "the client closed its connection before anything came back"
    assert attempt["next_told"] == ""


def test_a_refusal_tells_its_sentence_and_who_was_left_out(gateway: Gateway) -> None:
    for name in "ab":
        gateway.table.members[name].set_failing("loading")
    record = opened(gateway)
    assert dispatched(gateway, record) == ""
    record.refused(not_ready(gateway.table.entries["llama"], time.monotonic()))
    document = settled(gateway, record)
    assert document["message"] == "the model 'llama' has no ready endpoint: of 2, 2 loading"
    (only,) = document["rounds"]
    assert only["picked"] is None and only["attempts"] == []
    assert {drop["filter"] for drop in only["drops"]} == {"ready"}
    assert document["attempts"] == 0 and document["deadlines"] is None


def test_a_running_request_says_what_strikes_next(gateway: Gateway) -> None:
    record = opened(gateway, stream=True)
    dispatched(gateway, record)
    assert record.sleeper is not None
    record.sleeper.arm(time.monotonic() + 50, "first_token_s")
    document = shown(gateway, record)
    assert document["outcome"] == "running" and document["code"] is None
    assert document["deadline_next"]["name"] == "first_token_s" and 49 < document["deadline_next"]["in_s"] <= 50
    assert document["rounds"][0]["attempts"][0]["told"] == "nothing has come back yet"
    assert [one["id"] for one in documents.requests(gateway, 5, time.monotonic())] == ["req-1"]


def test_an_operators_cancellation_is_told(gateway: Gateway) -> None:
    record = opened(gateway)
    dispatched(gateway, record)
    record.refused(Refusal(503, "cancelled", "cancelled by the operator"), "cancelled")
    document = settled(gateway, record)
    assert document["rounds"][0]["attempts"][0]["told"] == "cancelled by the operator"


def test_a_made_up_model_is_shown_shortened(gateway: Gateway) -> None:
    record = opened(gateway, "x" * 5000)
    record.refused(Refusal(404, "model_not_found", "no such model"))
    document = settled(gateway, record)
    assert document["model"] is None and len(document["asked_for"]) == 200


def test_an_unknown_request_is_none(gateway: Gateway) -> None:
    assert documents.request(gateway, "nobody", 0.0) is None


def test_endpoints_say_how_they_are_and_why(gateway: Gateway) -> None:
    now = time.monotonic()
    members = gateway.table.members
    members["a"].set_draining(True)
    for _ in range(5):
        members["b"].begin(now).finish(Outcome.FAILURE, now, random.Random(1))
    members["c"].begin(now)
    members["c"].hear(Sample(at=now - 1, running=3, waiting=2, kv=0.5), 1.0)
    members["d"].set_failing("unreachable")
    found = {each["id"]: each for each in json.loads(json.dumps(documents.endpoints(gateway, now), allow_nan=False))}
    assert {name: each["state"] for name, each in found.items()} == {
        "a": "draining",
        "b": "stopped",
        "c": "ready",
        "d": "unreachable",
    }
    assert found["b"]["breaker"]["state"] == "open" and "5 failures in its last 5 requests" in found["b"]["why"]
    assert found["c"]["in_flight"] == 1 and found["c"]["waiting"] == 2 and found["c"]["kv"] == 0.5
    assert found["c"]["models"] == ["small"] and found["c"]["why"] == "" and found["c"]["metrics_age_s"] == 1.0
    assert found["a"]["waiting"] is None and found["a"]["capacity"] is None and found["a"]["metrics_age_s"] is None
    later = {each["id"]: each for each in documents.endpoints(gateway, now + 60)}
    assert later["b"]["state"] == "probing"


def test_models_say_who_serves_them(gateway: Gateway) -> None:
    now = time.monotonic()
    llama, small = json.loads(json.dumps(documents.models(gateway, now), allow_nan=False))
    assert (llama["name"], llama["aliases"], llama["fallbacks"]) == ("llama", ["chat"], ["small"])
    assert llama["ready"] and llama["endpoints_up"] == 2 and llama["why"] == ""
    assert small["pools"] == [{"name": "other", "priority": 3, "saturation": 0.0, "endpoints": ["c"]}]
    for name in "ab":
        gateway.table.members[name].set_draining(True)
    one = documents.model(gateway, "chat", now)
    assert one is not None and one["name"] == "llama" and one["asked_for"] == "chat"
    assert not one["ready"] and one["why"] == "the model 'llama' has no ready endpoint: of 2, 2 draining"
    assert [(other["name"], other["ready"]) for other in one["chain"]] == [("small", True)]
    assert [member["known_as"] for member in one["members"]] == ["llama", "llama"]
    assert documents.model(gateway, "nobody", now) is None


def test_the_status_counts_and_names_troubles(gateway: Gateway) -> None:
    settled(gateway, opened(gateway))
    opened(gateway)
    gateway.table.members["d"].set_failing("loading")
    running = Running(
        gateway=gateway,
        started_at=time.time() - 60,
        listen=("http://127.0.0.1:1",),
        metrics=(),
        admin_socket="/run/x.sock",
        keys=False,
        loopback=True,
        connections=lambda: 3,
        draining=lambda: True,
        configuration=lambda: {"file": None, "values": [], "needs_restart": ["server.listen"]},
        reload=lambda: "",
        groups=lambda: {"glm": "", "qwen": "no running actors"},
    )
    document = json.loads(json.dumps(documents.status(running, time.monotonic()), allow_nan=False))
    assert document["state"] == "draining" and 59 < document["uptime_s"] < 70
    assert document["requests"] == {"running": 1, "ended": 1, "by_code": {"200": 1}}
    assert document["endpoints"] == {"known": 4, "up": 3} and document["models"] == {"known": 2, "ready": 2}
    assert document["troubles"] == [
        "d: loading: it says that it is not ready yet; asked again every second",
        "group qwen: no running actors",
    ]
    assert document["groups"] == {"known": 2, "healthy": 1, "why_not": {"qwen": "no running actors"}}
    assert document["needs_restart"] == ["server.listen"] and document["rss_bytes"] > 1 << 20


def test_a_request_that_waits_says_why_and_behind_whom(gateway: Gateway) -> None:
    gateway.configure(attrs.evolve(SETTINGS, endpoints=(Endpoint("a", "127.0.0.1", 1, models=("llama",), capacity=1),)))
    now = time.monotonic()
    entry = gateway.table.entries["llama"]

    def asked(name: bytes) -> Ticket:
        call = Call(name, b"POST", b"/v1/x", Route("chat"), {}, b"", Ask(), "llama", False, Caller(), now)
        return gateway.gate.ask(entry, call, Sleeper(), now)

    gateway.gate.dispatched(asked(b"one"), gateway.table.members["a"], now)
    asked(b"two")
    record = opened(gateway)
    record.model = "llama"
    record.tickets += (asked(b"three"),)
    (place,) = shown(gateway, record)["places"]
    assert place["state"] == "waiting" and place["blocker"] == "saturation"
    assert place["told"] == "its pool was 100% full, and silver is let in up to 90%, itself counted; 1 ahead of it"
    (only,) = documents.models(gateway, now)
    assert only["waiting"] == 2 and only["pools"][0]["saturation"] == 1.0
    waiting = {band["name"]: band["waiting"] for band in documents.bands(gateway, now)}
    assert waiting == {"platinum": 0, "gold": 0, "silver": 2, "bronze": 0}


def test_a_broken_metric_contract_is_told(gateway: Gateway) -> None:
    contract = gateway.contracts["c"] = Contract("vllm", "c")
    contract.take("", time.monotonic())
    found = {each["id"]: each for each in documents.endpoints(gateway, time.monotonic())}
    assert found["c"]["violations"] == list(contract.violations) != []
    assert found["a"]["violations"] == []


async def test_thousands_of_documents_leave_others_their_turns(nursery: trio.Nursery) -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    nursery.start_soon(other)
    made = await gathered({"after": turns} for _ in range(176))
    nursery.cancel_scope.cancel()
    assert len(made) == 176 and len({one["after"] for one in made}) >= 4

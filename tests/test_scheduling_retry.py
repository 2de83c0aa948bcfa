"""What an attempt's end means and what follows: the retry matrix as a table, and its bounds by generated stories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts.choice import KINDS, Attempt, Outcome
from appliance.rules.scheduling.outcomes import classify, of_status
from appliance.rules.scheduling.retry import GiveUp, PassOn, Retry, Step, next_step

REFUSED = Attempt("a", "refused")
RESET_BEFORE = Attempt("a", "reset")
RESET_AFTER = Attempt("a", "reset", sent=True)
STALE = Attempt("a", "closed", sent=True, reused=True)
BROKEN_HEAD = Attempt("a", "reset", sent=True, answered=True)
ERROR_EVENT = Attempt("a", "error_event", sent=True, answered=True)
DEADLINES = [
    Attempt("a", "deadline", sent=name != "dial_s", deadline=name)
    for name in ("dial_s", "first_token_s", "idle_s", "total_s", "stream_total_s")
]


def answered(status: int) -> Attempt:
    return Attempt("a", "answer", status=status, sent=True, answered=True)


@pytest.mark.parametrize(
    ("attempt", "outcome"),
    [
        (answered(200), Outcome.SUCCESS),
        (answered(400), Outcome.NEUTRAL),
        (answered(404), Outcome.NEUTRAL),
        (answered(422), Outcome.NEUTRAL),
        (answered(401), Outcome.FAILURE),
        (answered(403), Outcome.FAILURE),
        (answered(429), Outcome.BACKPRESSURE),
        (answered(503), Outcome.BACKPRESSURE),
        (answered(529), Outcome.BACKPRESSURE),
        (answered(500), Outcome.FAILURE),
        (answered(501), Outcome.NEUTRAL),
        (answered(502), Outcome.FAILURE),
        (REFUSED, Outcome.FAILURE),
        (RESET_BEFORE, Outcome.FAILURE),
        (RESET_AFTER, Outcome.FAILURE),
        (STALE, Outcome.NEUTRAL),
        (BROKEN_HEAD, Outcome.FAILURE),
        (Attempt("a", "reset", sent=True, answered=True, reused=True), Outcome.FAILURE),
        (Attempt("a", "garbage", sent=True, answered=True), Outcome.FAILURE),
        (ERROR_EVENT, Outcome.FAILURE),
        (Attempt("a", "error_event", status=400, sent=True, answered=True), Outcome.NEUTRAL),
        (Attempt("a", "error_event", status=503, sent=True, answered=True), Outcome.BACKPRESSURE),
        (Attempt("a", "error_event", status=200, sent=True, answered=True), Outcome.FAILURE),
        (Attempt("a", "client_left", sent=True), Outcome.NEUTRAL),
        *[(deadline, Outcome.FAILURE) for deadline in DEADLINES],
    ],
)
def test_outcomes(attempt: Attempt, outcome: Outcome) -> None:
    assert classify(attempt) is outcome


def short(step: Step) -> str:
    match step:
        case Retry(same=True):
            return "same"
        case Retry():
            return "another"
        case PassOn(fallback=fallback):
            return "pass" + ("+fallback" if fallback else "")
        case GiveUp(refusal, fallback):
            return str(refusal.status) + ("+fallback" if fallback else "")


MATRIX = [
    # (attempts so far, with another endpoint to go to, with none)
    ([REFUSED], "another", "502+fallback"),
    ([RESET_BEFORE], "another", "502+fallback"),
    ([RESET_AFTER], "another", "same"),
    ([RESET_AFTER, RESET_AFTER], "502", "502"),
    ([RESET_AFTER, REFUSED], "another", "502+fallback"),
    ([RESET_AFTER, answered(500)], "pass", "pass"),
    ([RESET_AFTER, answered(503)], "pass", "pass"),
    ([answered(503), RESET_AFTER], "another", "same"),
    ([answered(503), STALE], "same", "same"),
    ([answered(500), answered(500), RESET_AFTER], "502+fallback", "502+fallback"),
    ([STALE], "same", "same"),
    ([STALE, RESET_AFTER], "502", "502"),
    ([STALE, REFUSED], "another", "502+fallback"),
    ([STALE, RESET_BEFORE], "another", "502+fallback"),
    ([BROKEN_HEAD], "502", "502"),
    ([Attempt("a", "garbage", sent=True, answered=True)], "502", "502"),
    ([answered(500)], "another", "pass+fallback"),
    ([answered(500), answered(500)], "another", "pass+fallback"),
    ([answered(500), answered(500), answered(500)], "pass+fallback", "pass+fallback"),
    ([answered(429)], "another", "pass+fallback"),
    ([answered(503)], "another", "pass+fallback"),
    ([answered(503), answered(503), answered(429)], "pass+fallback", "pass+fallback"),
    ([REFUSED, REFUSED, REFUSED], "502+fallback", "502+fallback"),
    ([answered(401)], "another", "502+fallback"),
    ([answered(400)], "pass", "pass"),
    ([answered(404)], "pass", "pass"),
    ([ERROR_EVENT], "another", "502+fallback"),
    ([Attempt("a", "error_event", status=400, sent=True, answered=True)], "pass", "pass"),
    ([Attempt("a", "client_left", sent=True)], "499", "499"),
    *[([deadline], "504", "504") for deadline in DEADLINES],
]


@pytest.mark.parametrize(("attempts", "with_another", "alone"), MATRIX)
def test_the_matrix(attempts: list[Attempt], with_another: str, alone: str) -> None:
    assert short(next_step(attempts, passed_on=False, another=True)) == with_another
    assert short(next_step(attempts, passed_on=False, another=False)) == alone


@pytest.mark.parametrize("deadline", DEADLINES, ids=lambda attempt: attempt.deadline)
def test_a_refusal_names_the_deadline_that_struck(deadline: Attempt) -> None:
    step = next_step([deadline], passed_on=False, another=True)
    assert isinstance(step, GiveUp)
    assert step.refusal.code == "upstream_timeout" and deadline.deadline in step.refusal.message


def test_refusals_do_not_tell_clients_where_engines_live() -> None:
    attempt = Attempt("engine-7", "refused", detail="connect to 10.0.0.5:8000: refused")
    step = next_step([attempt], passed_on=False, another=False)
    assert isinstance(step, GiveUp)
    assert "10.0.0.5" not in step.refusal.message and "engine-7" not in step.refusal.message


def test_a_fallback_has_its_own_three_attempts_but_no_more_sendings() -> None:
    spent = [answered(500)] * 3
    assert short(next_step([answered(500)], passed_on=False, another=True, before=spent)) == "another"
    assert short(next_step([RESET_AFTER], passed_on=False, another=True, before=[RESET_AFTER])) == "502"


def attempts() -> st.SearchStrategy[Attempt]:
    return st.builds(
        Attempt,
        endpoint=st.sampled_from(["a", "b", "c"]),
        kind=st.sampled_from(KINDS),
        status=st.sampled_from([0, 200, 400, 401, 404, 429, 500, 502, 503]),
        sent=st.booleans(),
        answered=st.booleans(),
        reused=st.booleans(),
        deadline=st.just("total_s"),
    )


@given(st.lists(attempts(), min_size=1, max_size=12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_no_story_breaks_the_bounds(story: list[Attempt], others: list[bool]) -> None:
    """Play attempts for as long as the rule asks for more."""
    made: list[Attempt] = []
    for attempt, another in zip(story, others, strict=False):
        made.append(attempt)
        step = next_step(made, passed_on=False, another=another)
        if not isinstance(step, Retry):
            break
        assert another or step.same, "sent to another endpoint that does not exist"
        assert len(made) < 3
        last = made[-1]
        assert last.kind not in ("deadline", "client_left")
        assert not (last.lost and last.answered), "sent again although a byte had come back"
        assert not (last.kind == "answer" and of_status(last.status) in (Outcome.SUCCESS, Outcome.NEUTRAL))
    assert len(made) <= 3
    losses = [index for index, one in enumerate(made) if one.lost]
    if losses:
        assert sum(one.sent for one in made[losses[0] + 1 :]) <= 1, "sent a third time"


@given(attempts(), st.booleans())
def test_nothing_is_tried_again_once_something_was_passed_on(attempt: Attempt, another: bool) -> None:
    step = next_step([attempt], passed_on=True, another=another)
    assert isinstance(step, GiveUp) and not step.fallback


ONCE = [
    # (the attempt, what comes after it where each request is wanted once)
    (REFUSED, "another"),  # nothing was sent
    (RESET_BEFORE, "502"),  # who knows how much was
    (RESET_AFTER, "502"),
    (STALE, "502"),
    (BROKEN_HEAD, "502"),
    (ERROR_EVENT, "502"),
    (answered(401), "502"),
    *[(answered(status), "pass") for status in (400, 404, 429, 500, 503)],
    *[(deadline, "504") for deadline in DEADLINES],
]


@pytest.mark.parametrize(("attempt", "wanted"), ONCE)
def test_who_wants_each_request_once_gets_it_once(attempt: Attempt, wanted: str) -> None:
    assert short(next_step([attempt], passed_on=False, another=True, once=True)) == wanted
    alone = short(next_step([attempt], passed_on=False, another=False, once=True))
    assert alone == ("502+fallback" if attempt is REFUSED else wanted)

"""What was decided for a request: where it should go, what each attempt came to, and what happens next."""

from __future__ import annotations

import enum

import attrs
import msgspec

SCORERS = ("queue", "kv", "inflight", "prefix", "session")
"""Names of the scorers in the order of `Choice.scores` and of the weights."""

FILTERS = ("ready", "draining", "breaker", "fresh", "tried", "pinned", "pool", "full")
"""Names of the filters as `Choice.drops` spells them."""


class Choice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One pass of the pipeline, kept as it was computed and put into words only when somebody asks (`tell`).

    A msgspec struct and not an attrs class: one is made for every request, and a frozen attrs class of this width costs
    more than the decision itself.

    `model` is the canonical name, `pool` the pool that was taken and `why` the reason for it. `candidates` are endpoint
    ids in the order of every list in `scores` (one list per name in `SCORERS`) and of `totals`, the weighted sums after
    `penalties` were taken off (empty when nobody had one). `picked` is an index into `candidates`, -1 when there was
    none. `drops` are pairs of endpoint id and filter name. `prefix` is a key of `PREFIX`; `text_bytes` of the prompt
    were looked up and `matched_bytes` of them had been seen before (by any endpoint); `guarded` are the candidates that
    were too loaded, or too lately at fault, for affinity.
    """

    model: str
    pool: str
    why: str
    candidates: tuple[str, ...]
    drops: tuple[tuple[str, str], ...]
    scores: tuple[list[float], ...]
    totals: list[float]
    picked: int
    penalties: tuple[float, ...]
    prefix: str
    text_bytes: int
    matched_bytes: int
    guarded: tuple[str, ...]

    @property
    def endpoint(self) -> str:
        """The id of the picked endpoint, "" when there was none."""
        return self.candidates[self.picked] if self.picked >= 0 else ""

    def tell(self) -> list[str]:
        """The decision in lines of plain text, for `ctl explain`."""
        lines = []
        if self.candidates:
            width = max(8, *(len(name) for name in self.candidates))
            lines.append(f"{'endpoint':<{width}} " + " ".join(f"{name:>8}" for name in (*SCORERS, "penalty", "total")))
            for index, name in enumerate(self.candidates):
                penalty = self.penalties[index] if self.penalties else 0.0
                figures = [*(column[index] for column in self.scores), penalty, self.totals[index]]
                mark = "  <- picked" if index == self.picked else ""
                lines.append(f"{name:<{width}} " + " ".join(f"{figure:8.2f}" for figure in figures) + mark)
        lines.extend(f"{name} was left out: {DROPPED[why]}" for name, why in self.drops)
        if self.pool:
            lines.append(f"pool {self.pool}: {self.why}")
        if self.text_bytes:
            seen = f"{self.matched_bytes} of the first {self.text_bytes} bytes of the prompt were seen before"
            lines.append(f"{seen}: {PREFIX[self.prefix]}")
        lines.extend(f"{name} attracts no prompts it knows: it is loaded, or failed lately" for name in self.guarded)
        if self.picked < 0:
            lines.append("no endpoint could take it")
        return lines


PREFIX = {
    "off": "not looked up",
    "cold": "a new head, or too short a one",
    "hit": "it went where most of it is known",
    "moved": "load spoke louder than what is known elsewhere",
    "spread": "so many prompts begin with it, or so busy are those who know it, that load decided",
}
"""What the prefix index came to, in words; the keys are the `result` of `appliance_prefix_hits_total`."""

DROPPED = {
    "ready": "it does not answer its probes",
    "draining": "it is draining",
    "breaker": "its breaker is open after failures",
    "fresh": "its metrics went silent while others report",
    "tried": "this request was tried there already, or a router sent it, and it is another",
    "pinned": "the request belongs to another endpoint",
    "pool": "it is in another pool",
    "full": "it holds as many requests as it may for now, and the place was given at another",
}
"""What each filter says of an endpoint it drops."""


class Outcome(enum.Enum):
    """What an attempt says about the endpoint."""

    SUCCESS = "success"
    NEUTRAL = "neutral"
    """The client's fault, or nobody's: breaker, weight and retries stay out of it."""
    BACKPRESSURE = "backpressure"
    """It lives and has no room: less weight for a while, breaker untouched."""
    FAILURE = "failure"


REFUSED, RESET, CLOSED, GARBAGE = "refused", "reset", "closed", "garbage"
ANSWER, ERROR_EVENT, DEADLINE, CLIENT_LEFT = "answer", "error_event", "deadline", "client_left"
KINDS = (REFUSED, RESET, CLOSED, GARBAGE, ANSWER, ERROR_EVENT, DEADLINE, CLIENT_LEFT)
"""How an attempt can end; the first four are `UpstreamFailed.kind` as `gateway/upstream.py` raises it."""


@attrs.frozen
class Attempt:
    """How one attempt at one endpoint ended.

    `kind` is one of `KINDS`: no connection; broken off; ended before its end; not HTTP; an answer with `status`; an
    event stream that carried an error (`status` is the code inside it, 0 if it had none); a deadline, named by its
    setting in `deadline` ("dial_s", "first_token_s", "idle_s", "total_s", "stream_total_s"); the client gave up.
    `sent` tells whether the whole request had been handed over, `answered` whether any byte had come back, `reused`
    whether the connection had served before. `detail` is for operators only: it may hold addresses.
    """

    endpoint: str
    kind: str
    status: int = 0
    sent: bool = False
    answered: bool = False
    reused: bool = False
    deadline: str = ""
    detail: str = ""

    @property
    def lost(self) -> bool:
        """The request was handed over and nobody knows what became of it."""
        return self.sent and self.kind in (RESET, CLOSED, GARBAGE)

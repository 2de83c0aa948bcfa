"""What a caller is told when the answer is no."""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class Refusal(Exception):
    """A request that will not be served, made where the rule is and turned into HTTP in one place (`door/reply.py`).

    `code` is the stable word of `docs/interface.md` ("model_not_found"); `reason` is what `x-appliance-reason` carries
    and equals `code` unless a rule says more. `retry_after_s` is set on everything that passes with time; it reaches
    the client in whole seconds, at least 1. `should_retry` False adds `x-should-retry: false`, because the OpenAI SDKs
    retry any 429 otherwise. `headers` are further answer headers (name, value), for example `Allow` of a 405. `detail`
    is the message for operators where theirs says more, for example addresses; no client gets it.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    should_retry: bool = True
    reason: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"


@attrs.frozen
class Fault:
    """One thing wrong in a configuration: where, and what was expected there."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"

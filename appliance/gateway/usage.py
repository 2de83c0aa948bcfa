"""What an answer used: tokens, as the engine counted them, and the times of its first and last content.

The engine's own figures count, the last value wins. An answer that was cut, or whose engine publishes no usage, is
charged for what can be seen: the prompt as the engine counted it or about four bytes of it a token, and a token per
delivered event; it is marked `estimated`. Figures are read leniently: an engine that says `null` for one of them, or
something that is no count, is not heard on that one only.
"""

from __future__ import annotations

import json
import re

import msgspec

PROMPT_BYTES_PER_TOKEN = 4
"""A guess for English text in the tokenizers of the last years; only used where the engine gave no figure."""

_TAIL_BYTES = 8192
_SMALL_BYTES = 16384
_MOST_TRIES = 8
_MOST_TOKENS = 1 << 40
"""Far above any context: a figure beyond it is a lie, and would spoil every sum it enters."""
_CONTENT = re.compile(rb'"(?:content|text|delta|reasoning|reasoning_content|thinking|arguments|partial_json)": ?"(?!")')


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: object = None
    completion_tokens: object = None
    input_tokens: object = None
    output_tokens: object = None
    cache_read_input_tokens: object = None
    prompt_tokens_details: object = None
    completion_tokens_details: object = None
    input_tokens_details: object = None
    output_tokens_details: object = None


class _Answer(msgspec.Struct, gc=False):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer)
_RESPONSE_ID = re.compile(rb'"id": ?"(resp[A-Za-z0-9_\-]{1,200})"')
_raw = json.JSONDecoder()


class Tally(msgspec.Struct, array_like=True, eq=False, gc=False):
    """Counts one answer. Times are in seconds of `time.monotonic`, 0.0 while nothing has come.

    `wants_id` asks for the id of a stored response, which `answer_id` then holds: later requests name it.
    `whole` tells that the answer came to its end, so that what was reported last is what it used.
    """

    answer_id: str = ""
    cached_tokens: int = 0
    completion_tokens: int = 0
    content_events: int = 0
    events: int = 0
    first_content_at: float = 0.0
    last_content_at: float = 0.0
    prompt_tokens: int = 0
    reasoning_tokens: int = 0
    reported: bool = False
    wants_id: bool = False
    whole: bool = False

    def event(self, event: bytes, now: float) -> None:
        """Count one event of a stream."""
        self.events += 1
        if self.content_events:
            self.content_events += 1
            self.last_content_at = now
        elif _CONTENT.search(event) is not None:
            self.content_events = 1
            self.first_content_at = self.last_content_at = now
        if b'"usage"' in event:
            self._tail(event)
        if self.wants_id:
            self._find_id(event)

    def body(self, body: bytes, now: float) -> None:
        """Count a whole answer, or the last part of one that was too large to keep."""
        self.first_content_at = self.last_content_at = now
        self.whole = True
        if self.wants_id:
            self._find_id(body)
        if b'"usage"' not in body:
            return
        if len(body) <= _SMALL_BYTES:
            try:
                usage = _answer.decode(body).usage
            except (msgspec.MsgspecError, RecursionError):
                usage = None
            if usage is not None:
                self._add(usage)
                return
        self._tail(body)

    def estimate(self, request_bytes: int) -> bool:
        """Fill in what the engine did not report; True when there was something to fill in."""
        if self.reported and self.whole:
            return False
        if not self.prompt_tokens:
            self.prompt_tokens = request_bytes // PROMPT_BYTES_PER_TOKEN
        # some routes report a first figure at the beginning, which a cut stream would be left with
        self.completion_tokens = max(self.completion_tokens, self.content_events)
        return True

    def _find_id(self, data: bytes) -> None:
        found = _RESPONSE_ID.search(data)
        if found is not None:
            self.answer_id = found[1].decode("latin-1")
            self.wants_id = False

    def _tail(self, data: bytes) -> None:
        """Usage stands near the end of an event or a body, on some routes one level down; read the last one there
        is. (The word may stand in there for other reasons: a token's text among log probabilities.)
        """
        at = len(data)
        for _ in range(_MOST_TRIES):
            at = data.rfind(b'"usage"', 0, at)
            if at < 0:
                return
            text = data[at + 7 : at + 7 + _TAIL_BYTES].decode("utf-8", "replace").lstrip(" \t\r\n")
            if text[:1] != ":" or not (text := text[1:].lstrip(" \t\r\n")).startswith("{"):
                continue
            try:
                value, _ = _raw.raw_decode(text)
                self._add(msgspec.convert(value, _Usage))
            except (ValueError, RecursionError):
                continue
            return

    def _add(self, usage: _Usage) -> None:
        prompt = _count(usage.prompt_tokens) or _count(usage.input_tokens)
        completion = _count(usage.completion_tokens) or _count(usage.output_tokens)
        if not prompt and not completion:
            return
        self.reported = True
        if prompt:
            self.prompt_tokens = prompt
        if completion:
            self.completion_tokens = completion
        details = usage.prompt_tokens_details or usage.input_tokens_details
        cached = _detail(details, "cached_tokens") if details else 0
        if not cached and usage.cache_read_input_tokens is not None:
            cached = _count(usage.cache_read_input_tokens)
        if cached:
            self.cached_tokens = cached
        details = usage.completion_tokens_details or usage.output_tokens_details
        reasoning = _detail(details, "reasoning_tokens") if details else 0
        if reasoning:
            self.reasoning_tokens = reasoning


def _count(value: object) -> int:
    """What an engine says is a count of tokens; 0 for what cannot be one."""
    return value if type(value) is int and 0 < value <= _MOST_TOKENS else 0


def _detail(details: object, name: str) -> int:
    return _count(details.get(name)) if isinstance(details, dict) else 0

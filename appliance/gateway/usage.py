"""What an answer used: tokens, as the engine counted them, and the times of its first and last content.

The engine's own figures count, the last value wins. An answer that was cut, or whose engine publishes no usage, is
charged for what can be seen: about four bytes of prompt a token, and a token per delivered event; it is marked
`estimated`.
"""

from __future__ import annotations

import json
import re

import msgspec

PROMPT_BYTES_PER_TOKEN = 4
"""A guess for English text in the tokenizers of the last years; only used where the engine gave no figure."""

_TAIL_BYTES = 8192
_SMALL_BYTES = 16384
_CONTENT = re.compile(rb'"(?:content|text|delta|reasoning|reasoning_content|thinking|arguments|partial_json)": ?"(?!")')


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct, gc=False):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer)
_RESPONSE_ID = re.compile(rb'"id": ?"(resp[A-Za-z0-9_\-]{1,200})"')
_raw = json.JSONDecoder()


class Tally:
    """Counts one answer. Times are in seconds of `time.monotonic`, 0.0 while nothing has come.

    `wants_id` asks for the id of a stored response, which `answer_id` then holds: later requests name it.
    """

    answer_id = ""
    cached_tokens = 0
    completion_tokens = 0
    content_events = 0
    events = 0
    first_content_at = 0.0
    last_content_at = 0.0
    prompt_tokens = 0
    reasoning_tokens = 0
    reported = False
    wants_id = False

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
        if self.wants_id:
            self._find_id(body)
        if b'"usage"' not in body:
            return
        if len(body) <= _SMALL_BYTES:
            try:
                usage = _answer.decode(body).usage
            except msgspec.MsgspecError:
                usage = None
            if usage is not None:
                self._add(usage)
                return
        self._tail(body)

    def estimate(self, request_bytes: int) -> None:
        """Fill in what the engine did not report."""
        if not self.reported:
            self.prompt_tokens = request_bytes // PROMPT_BYTES_PER_TOKEN
            self.completion_tokens = self.content_events

    def _find_id(self, data: bytes) -> None:
        found = _RESPONSE_ID.search(data)
        if found is not None:
            self.answer_id = found[1].decode("latin-1")
            self.wants_id = False

    def _tail(self, data: bytes) -> None:
        """Usage stands near the end of an event or a body, on some routes one level down; read the last one there
        is.
        """
        at = data.rfind(b'"usage"')
        text = data[at + 7 : at + 7 + _TAIL_BYTES].decode("utf-8", "replace").lstrip(" \t\r\n:")
        if not text.startswith("{"):
            return
        try:
            value, _ = _raw.raw_decode(text)
            self._add(msgspec.convert(value, _Usage))
        except (ValueError, RecursionError):
            return

    def _add(self, usage: _Usage) -> None:
        self.reported = True
        prompt = usage.prompt_tokens or usage.input_tokens
        if prompt:
            self.prompt_tokens = prompt
        completion = usage.completion_tokens or usage.output_tokens
        if completion:
            self.completion_tokens = completion
        for details in (usage.prompt_tokens_details, usage.input_tokens_details):
            if details is not None and details.cached_tokens:
                self.cached_tokens = details.cached_tokens
        if usage.cache_read_input_tokens:
            self.cached_tokens = usage.cache_read_input_tokens
        for details in (usage.completion_tokens_details, usage.output_tokens_details):
            if details is not None and details.reasoning_tokens:
                self.reasoning_tokens = details.reasoning_tokens

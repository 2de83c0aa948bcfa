"""What the shapes of all routes have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import attrs
import msgspec

to_json = msgspec.json.encode


@attrs.frozen
class Usage:
    """Tokens of one request, over all its choices."""

    prompt: int
    completion: int
    cached: int


@attrs.frozen
class Choice:
    """One finished answer: its text and why it ended ("stop" or "length")."""

    text: str
    reason: str


class Shape(ABC):
    """Makes the bytes of one request's answer. Events are whole, with their empty line; no HTTP framing in here.

    `word` is called for every token of every stream, so an implementation prepares everything around the word once.
    """

    def __init__(self, answer_id: str, model: str, created: int, fingerprint: str) -> None:
        self.id = answer_id
        self.model = model
        self.created = created
        self.fingerprint = fingerprint

    @abstractmethod
    def opening(self, choices: int, usage: Usage) -> list[bytes]:
        """What precedes the first word."""

    @abstractmethod
    def word(self, index: int, text: str) -> bytes:
        """One word of choice `index`."""

    @abstractmethod
    def closing(self, index: int, choice: Choice) -> list[bytes]:
        """What follows the last word of one choice."""

    @abstractmethod
    def ending(self, choices: list[Choice], usage: Usage, *, include_usage: bool, terminated: bool) -> list[bytes]:
        """What follows the last choice; the route's own end only when `terminated`."""

    @abstractmethod
    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def failure(self, message: str) -> list[bytes]:
        """The events of an engine that fails in the middle of an answer."""


def event(data: Any, name: str = "") -> bytes:
    """One server-sent event of JSON; `name` is its `event:` field, which the Anthropic and responses routes use."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + to_json(data) + b"\n\n"


def around_word(data: Any, name: str = "") -> tuple[bytes, bytes]:
    """The event of `data`, cut in two at the one string "\\0" in it: word events are joined, not encoded."""
    before, _, after = event(data, name).partition(b'"\\u0000"')
    return before, after

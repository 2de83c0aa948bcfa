"""`/v1/completions`."""

from __future__ import annotations

from typing import Any

from .chat import DONE, openai_failure, openai_usage
from .shape import Choice, Shape, Usage, around_word, event, to_json


class Completions(Shape):
    def opening(self, choices: int, usage: Usage) -> list[bytes]:
        self._around = [around_word(self._envelope([self._choice(index, "\0", None)])) for index in range(choices)]
        return []

    def word(self, index: int, text: str) -> bytes:
        before, after = self._around[index]
        return before + to_json(text) + after

    def closing(self, index: int, choice: Choice) -> list[bytes]:
        return [event(self._envelope([self._choice(index, "", choice.reason)]))]

    def ending(self, choices: list[Choice], usage: Usage, *, include_usage: bool, terminated: bool) -> list[bytes]:
        events = [event(self._envelope([], usage=openai_usage(usage)))] if include_usage else []
        return [*events, DONE] if terminated else events

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        made = [self._choice(index, choice.text, choice.reason) for index, choice in enumerate(choices)]
        return to_json(self._envelope(made, usage=openai_usage(usage)))

    def failure(self, message: str) -> list[bytes]:
        return openai_failure(message)

    def _envelope(self, choices: list[Any], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint, "choices": choices, **more}

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}

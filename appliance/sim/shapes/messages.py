"""`/v1/messages`, Anthropic's shape: one choice, named events, `message_stop` as the end."""

from __future__ import annotations

from typing import Any

from .shape import Choice, Shape, Usage, around_word, event, to_json

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class Messages(Shape):
    def opening(self, choices: int, usage: Usage) -> list[bytes]:
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "\0"}}
        self._before, self._after = around_word(delta, "content_block_delta")
        message = self._message([], None, {"input_tokens": usage.prompt, "output_tokens": 0})
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return [
            event({"type": "message_start", "message": message}, "message_start"),
            event(block, "content_block_start"),
        ]

    def word(self, index: int, text: str) -> bytes:
        return self._before + to_json(text) + self._after

    def closing(self, index: int, choice: Choice) -> list[bytes]:
        return [event({"type": "content_block_stop", "index": 0}, "content_block_stop")]

    def ending(self, choices: list[Choice], usage: Usage, *, include_usage: bool, terminated: bool) -> list[bytes]:
        delta = {"stop_reason": _STOP_REASONS[choices[0].reason], "stop_sequence": None}
        counts = {
            "input_tokens": usage.prompt,
            "output_tokens": usage.completion,
            "cache_read_input_tokens": usage.cached,
        }
        last = event({"type": "message_delta", "delta": delta, "usage": counts}, "message_delta")
        return [last, event({"type": "message_stop"}, "message_stop")] if terminated else [last]

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        counts = {
            "input_tokens": usage.prompt,
            "output_tokens": usage.completion,
            "cache_read_input_tokens": usage.cached,
        }
        content = [{"type": "text", "text": choices[0].text}]
        return to_json(self._message(content, _STOP_REASONS[choices[0].reason], counts))

    def failure(self, message: str) -> list[bytes]:
        return [event({"type": "error", "error": {"type": "api_error", "message": message}}, "error")]

    def _message(self, content: list[Any], reason: str | None, usage: dict[str, int]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return {**head, "stop_reason": reason, "stop_sequence": None, "usage": usage}

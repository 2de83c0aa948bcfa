"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from .shape import Choice, Shape, Usage, around_word, event, to_json

DONE = b"data: [DONE]\n\n"


def openai_usage(usage: Usage) -> dict[str, Any]:
    """Usage in the words of the chat and completions routes."""
    return {
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt + usage.completion,
        "completion_tokens": usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def openai_failure(message: str) -> list[bytes]:
    """An error event and, as vLLM does, the end after it: a stream that has [DONE] and is no success."""
    body = {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}
    return [event(body), DONE]


class Chat(Shape):
    def opening(self, choices: int, usage: Usage) -> list[bytes]:
        self._around = [around_word(self._chunk(index, {"content": "\0"}, None)) for index in range(choices)]
        return [event(self._chunk(index, {"role": "assistant", "content": ""}, None)) for index in range(choices)]

    def word(self, index: int, text: str) -> bytes:
        before, after = self._around[index]
        return before + to_json(text) + after

    def closing(self, index: int, choice: Choice) -> list[bytes]:
        return [event(self._chunk(index, {"content": ""}, choice.reason))]

    def ending(self, choices: list[Choice], usage: Usage, *, include_usage: bool, terminated: bool) -> list[bytes]:
        events = (
            [event(self._envelope("chat.completion.chunk", [], usage=openai_usage(usage)))] if include_usage else []
        )
        return [*events, DONE] if terminated else events

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        made = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.reason,
                "stop_reason": None,
            }
            for index, choice in enumerate(choices)
        ]
        return to_json(self._envelope("chat.completion", made, usage=openai_usage(usage)))

    def failure(self, message: str) -> list[bytes]:
        return openai_failure(message)

    def _envelope(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint, "choices": choices, **more}

    def _chunk(self, index: int, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._envelope("chat.completion.chunk", [choice])

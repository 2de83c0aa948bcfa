"""`/v1/responses`: one message of one text part, numbered named events, `response.completed` as the end."""

from __future__ import annotations

from typing import Any

from .shape import Choice, Shape, Usage, to_json


class Responses(Shape):
    _number = 0

    def opening(self, choices: int, usage: Usage) -> list[bytes]:
        self._item_id = "msg_" + self.id.partition("_")[2]
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        begun = self._response("in_progress", [], None)
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        events = [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **where, part=_part("")),
        ]
        delta = {"type": "response.output_text.delta", **where, "logprobs": []}
        self._before = b"event: response.output_text.delta\ndata: " + to_json(delta)[:-1] + b',"sequence_number":'
        return events

    def word(self, index: int, text: str) -> bytes:
        number = self._number
        self._number = number + 1
        return b'%b%d,"delta":%b}\n\n' % (self._before, number, to_json(text))

    def closing(self, index: int, choice: Choice) -> list[bytes]:
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return [
            self._event("response.output_text.done", **where, text=choice.text, logprobs=[]),
            self._event("response.content_part.done", **where, part=_part(choice.text)),
            self._event("response.output_item.done", output_index=0, item=self._item(choice)),
        ]

    def ending(self, choices: list[Choice], usage: Usage, *, include_usage: bool, terminated: bool) -> list[bytes]:
        if not terminated:
            return []
        return [self._event("response.completed", response=self._ended(choices[0], usage))]

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        self._item_id = "msg_" + self.id.partition("_")[2]
        return to_json(self._ended(choices[0], usage))

    def failure(self, message: str) -> list[bytes]:
        if self._number == 0:  # nothing has been created that could fail
            return [self._event("error", code="server_error", message=message, param=None)]
        failed = self._response("failed", [], None)
        failed["error"] = {"code": "server_error", "message": message}
        return [self._event("response.failed", response=failed)]

    def _event(self, name: str, **fields: Any) -> bytes:
        number = self._number
        self._number = number + 1
        data = {"type": name, "sequence_number": number, **fields}
        return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(data))

    def _item(self, choice: Choice) -> dict[str, Any]:
        status = "completed" if choice.reason == "stop" else "incomplete"
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(choice.text)],
        }

    def _ended(self, choice: Choice, usage: Usage) -> dict[str, Any]:
        status = "completed" if choice.reason == "stop" else "incomplete"
        response = self._response(status, [self._item(choice)], usage)
        if choice.reason != "stop":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str, output: list[Any], usage: Usage | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": None
            if usage is None
            else {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            },
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

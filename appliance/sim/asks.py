"""What a client asks for: the bodies of the generating routes, read into one small value.

Only what the sim acts on is read; every other field (temperature, tools, an odd number) is accepted and has no effect.
What is read is checked for its type, and the refusals have vLLM's shape, for the router in front to pass on.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from .words import count_tokens, token_bytes

MAX_CHOICES = 128
GARBAGE = ("head", "chunk", "body", "endless_head", "endless_body")


class Rejected(Exception):
    """A request this engine does not serve: `status`, vLLM's word for the kind of error, and the field at fault."""

    def __init__(
        self, status: int, kind: str, message: str, param: str | None = None, *, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `sim` field of a body (or the `x-sim` header): how to misbehave for this request alone.

    `status` answers that error at once, with `retry_after_s` as its Retry-After. The `…_after` faults strike after so
    many words of the answer; 0 is before the first, -1 before the response head. `cut` closes the connection, `reset`
    resets it, `error` sends an error event and then the route's end as vLLM does, `stall` falls silent. `delay_s`
    holds the first word back, `no_done` leaves the route's end out, `model` lies about who answered, `garbage` sends
    bytes that are no HTTP, no chunk or no JSON, or a head or body without end.
    """

    status: int = 0
    retry_after_s: int | None = None
    delay_s: float = 0.0
    cut_after: int | None = None
    reset_after: int | None = None
    error_after: int | None = None
    stall_after: int | None = None
    no_done: bool = False
    model: str | None = None
    garbage: str | None = None


NO_FAULTS = Faults()


@attrs.frozen
class Prompt:
    """`text` is everything the engine reads, in order; `said` is what the user said last, which the answer repeats."""

    text: bytes
    said: str

    @property
    def tokens(self) -> int:
        return count_tokens(self.text)


@attrs.frozen
class Ask:
    """One request for text: `prompts` times `n` answers. `max_tokens` None leaves their length to the sim."""

    route: str
    model: str | None
    prompts: tuple[Prompt, ...]
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    faults: Faults = NO_FAULTS


_ABSENT = msgspec.Raw(b"null")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    sim: Faults | None = None


class _Chat(_Body):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = _ABSENT


class _Completion(_Body):
    prompt: str | list[Any] = ""


class _Response(_Body):
    input: str | list[dict[str, Any]] = ""
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw = _ABSENT


class _Message(_Body):
    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: msgspec.Raw = _ABSENT


_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "chat": msgspec.json.Decoder(_Chat),
    "completions": msgspec.json.Decoder(_Completion),
    "responses": msgspec.json.Decoder(_Response),
    "messages": msgspec.json.Decoder(_Message),
}
_FAULTS = msgspec.json.Decoder(Faults)


def read_ask(route: str, body: bytes, fault_header: bytes | None = None) -> Ask:
    """Read the body of a generating route ("chat", "completions", "responses", "messages"). Raises Rejected."""
    asked: _Body = decode(_DECODERS[route], body)
    prompts: tuple[Prompt, ...]
    match asked:
        case _Chat():
            prompts = (_conversation(asked.messages, None, asked.tools),)
            max_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        case _Completion():
            prompts = tuple(_texts(asked.prompt))
            max_tokens = asked.max_tokens
        case _Response():
            turns = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
            prompts = (_conversation(turns, asked.instructions, asked.tools),)
            max_tokens = asked.max_output_tokens
        case _:
            assert isinstance(asked, _Message)
            if asked.max_tokens is None:
                raise _wrong("max_tokens is required", "max_tokens")
            prompts = (_conversation(asked.messages, asked.system, asked.tools),)
            max_tokens = asked.max_tokens
    n = 1 if asked.n is None or route in ("responses", "messages") else asked.n
    if not 1 <= n <= MAX_CHOICES:
        raise _wrong(f"n must be between 1 and {MAX_CHOICES}, got {n}", "n")
    if max_tokens is not None and max_tokens < 1:
        raise _wrong(f"max_tokens must be at least 1, got {max_tokens}", "max_tokens")
    stream = bool(asked.stream)
    if asked.stream_options is not None and not stream:
        raise _wrong("stream_options is only allowed together with stream=true", "stream_options")
    faults = asked.sim or (decode(_FAULTS, fault_header) if fault_header else NO_FAULTS)
    if faults.garbage is not None and faults.garbage not in GARBAGE:
        raise _wrong(f"sim.garbage is one of {', '.join(GARBAGE)}", "sim")
    moments = (faults.cut_after, faults.reset_after, faults.error_after, faults.stall_after)
    if any(after is not None and after < -1 for after in moments):
        raise _wrong("the sim.…_after faults take a number of words, 0 for none, or -1 for before the head", "sim")
    if faults.status and not 400 <= faults.status <= 599:
        raise _wrong("sim.status is an error status, 400 to 599", "sim")
    return Ask(
        route=route,
        model=asked.model,
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        min_tokens=max(0, asked.min_tokens or 0),
        ignore_eos=bool(asked.ignore_eos),
        stream=stream,
        include_usage=asked.stream_options is not None and bool(asked.stream_options.include_usage),
        faults=faults,
    )


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Decode JSON of the client's. Raises Rejected with what is wrong and where."""
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:  # covers ValidationError: wrong types
        raise _wrong(f"invalid JSON body: {error}") from None
    except UnicodeDecodeError:
        raise _wrong("invalid JSON body: not UTF-8") from None
    except RecursionError:
        raise _wrong("invalid JSON body: nested too deeply") from None


def _wrong(message: str, param: str | None = None) -> Rejected:
    return Rejected(400, "BadRequestError", message, param)


def _conversation(
    turns: list[dict[str, Any]] | None, system: str | list[dict[str, Any]] | None, tools: msgspec.Raw
) -> Prompt:
    """A conversation as one text: tools, system prompt, then the turns in order, as a chat template would put them."""
    if not turns:
        raise _wrong("at least one message is required", "messages")
    parts = [bytes(tools)] if bytes(tools) != b"null" else []
    if system is not None:
        parts.append(b"system: " + _text_of(system).encode())
    said = ""
    for turn in turns:
        role = turn.get("role", turn.get("type", "user"))
        if not isinstance(role, str):
            raise _wrong("a message's role must be a string", "messages")
        text = _text_of(turn.get("content", turn.get("output")))
        if role == "user":
            said = text
        parts.append(f"{role}: {text}".encode())
    return Prompt(b"\n".join(parts), said)


def _text_of(content: object) -> str:
    """The text of a message's content: a string, or the text parts of a list; other parts count as their JSON."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return " ".join(_text_of_part(part) for part in content)
    raise _wrong("a message's content must be a string or a list of parts", "messages")


def _text_of_part(part: object) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    return msgspec.json.encode(part).decode()


def _texts(prompt: str | list[Any]) -> list[Prompt]:
    """The prompts of a completion: a text, several, the tokens of one, or the tokens of several."""
    if isinstance(prompt, str):
        texts = [prompt]
    elif prompt and all(isinstance(item, str) for item in prompt):
        texts = prompt
    elif prompt and all(isinstance(item, int) for item in prompt):
        texts = [_detokenized(prompt)]
    elif prompt and all(isinstance(item, list) and item for item in prompt):
        texts = [_detokenized(item) for item in prompt]
    else:
        raise _wrong("prompt must be a string, a list of strings, or a list of tokens", "prompt")
    return [Prompt(text.encode(), text) for text in texts]


def _detokenized(ids: list[Any]) -> str:
    try:
        return token_bytes(ids).decode("utf-8", "replace")
    except (AttributeError, OverflowError, ValueError) as error:
        raise _wrong(f"prompt holds something that is no token: {error}", "prompt") from None

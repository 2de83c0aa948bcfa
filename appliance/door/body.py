"""Request bodies: expanded where they came compressed, and the few fields of them that the router reads.

Whatever is read, the engine gets the body byte for byte. So a field that two readers could see differently is refused:
a second top-level `model` or `stream`, of which msgspec takes the last and an engine might take the first.
"""

from __future__ import annotations

import zlib

import msgspec

from ..facts.call import Ask
from ..facts.errors import Refusal
from ..wire import fields

BOM = b"\xef\xbb\xbf"
_decoder = msgspec.json.Decoder(Ask)
_LARGE_BYTES = 1024


def expand(body: bytes, encoding: bytes, limit_bytes: int) -> bytes:
    """The body without its Content-Encoding and without a byte-order mark. Raises Refusal (400, 413, 415)."""
    for name in reversed([part.strip().lower() for part in encoding.split(b",")]) if encoding else ():
        if name in (b"", b"identity"):
            continue
        try:
            if name in (b"gzip", b"x-gzip"):
                body = _inflate(body, 31, limit_bytes)
            elif name == b"deflate":
                # RFC 9110 means the zlib format; the raw one is in the field all the same
                body = _inflate(body, 15 if _looks_like_zlib(body) else -15, limit_bytes)
            elif name == b"zstd":
                body = _unzstd(body, limit_bytes)
            else:
                shown = name.decode("latin-1")[:40]
                raise Refusal(
                    415,
                    "unsupported_encoding",
                    f"Content-Encoding {shown!r} is not understood here: use gzip, zstd, deflate or none",
                )
        except (zlib.error, EOFError, ValueError) as error:
            raise Refusal(400, "invalid_encoding", f"the body is not valid {name.decode()}: {error}") from None
    return body[3:] if body.startswith(BOM) else body


def read_json(body: bytes) -> Ask:
    """The fields of a JSON body. Raises Refusal (400)."""
    try:
        ask = _decoder.decode(body)
    except msgspec.ValidationError:
        raise Refusal(400, "invalid_json", "the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        detail = "it is empty" if not body else str(error) or "nested too deeply"
        raise Refusal(400, "invalid_json", f"the body is not valid JSON: {detail}") from None
    if not isinstance(ask.model, str) or not ask.model:
        problem = "is missing" if ask.model is None else "must be a string that is not empty"
        raise Refusal(
            400, "model_missing", f"the field `model` {problem}; /v1/models lists what there is", param="model"
        )
    # Keys written with \u escapes count too; all letters of the two names are below U+0100.
    if body.count(b'"model"') > 1 or body.count(b'"stream"') > 1 or b"\\u00" in body:
        _refuse_duplicates(body, ask)
    return ask


def read_multipart(body: bytes, content_type: bytes) -> Ask:
    """The `model` (and `stream`) of a form, wherever they stand in it. Raises Refusal (400)."""
    values: dict[bytes, bytes] = {}
    try:
        for name, start, end in fields.parts(body, content_type):
            if name in (b"model", b"stream", b"user"):
                if name in values:
                    shown = name.decode()
                    raise Refusal(400, "duplicate_field", f"the form field `{shown}` is there twice", param=shown)
                values[name] = body[start:end]
    except ValueError as error:
        raise Refusal(400, "invalid_multipart", f"the form cannot be read: {error}") from None
    if b"model" not in values:
        raise Refusal(
            400, "model_missing", "the form has no field `model`; /v1/models lists what there is", param="model"
        )
    try:
        model = values[b"model"].decode().strip()
    except UnicodeDecodeError:
        model = ""
    if not model:
        raise Refusal(400, "model_missing", "the form field `model` must be a name", param="model")
    stream = values.get(b"stream", b"").strip().lower() in (b"true", b"1")
    return Ask(model=model, stream=msgspec.Raw(b"true" if stream else b"false"))


def _refuse_duplicates(body: bytes, ask: Ask) -> None:
    # The long values are the conversation; what repeats in there is none of ours, and walking through megabytes token
    # by token would hold everybody up. A `0` in its place is a value where it was one, and text where it was text.
    for raw in (ask.messages, ask.prompt, ask.input):
        value = bytes(raw)
        if len(value) > _LARGE_BYTES:
            body = body.replace(value, b"0", 1)
    seen: set[str] = set()
    for name, _ in fields.top_level(body):
        if name in ("model", "stream"):
            if name in seen:
                raise Refusal(400, "duplicate_field", f"the field `{name}` is there twice", param=name)
            seen.add(name)


def _inflate(body: bytes, window: int, limit_bytes: int) -> bytes:
    """Bounded: a kilobyte can expand to a megabyte, so the output is counted, never the input."""
    pieces: list[bytes] = []
    size = 0
    while body:
        stream = zlib.decompressobj(window)
        piece = stream.decompress(body, limit_bytes - size + 1)
        size += len(piece)
        if size > limit_bytes:
            raise _expands_too_much(limit_bytes)
        pieces.append(piece)
        if not stream.eof:
            raise EOFError("it is cut off")
        body = stream.unused_data  # gzip files may be joined
    return b"".join(pieces)


def _looks_like_zlib(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0


def _unzstd(body: bytes, limit_bytes: int) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body, read_across_frames=True) as reader:
            expanded = bytes(reader.read(limit_bytes + 1))
            if len(expanded) <= limit_bytes and not expanded and body:
                raise EOFError("it is cut off")
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if len(expanded) > limit_bytes:
        raise _expands_too_much(limit_bytes)
    return expanded


def _expands_too_much(limit_bytes: int) -> Refusal:
    return Refusal(
        413,
        "body_too_large",
        f"the expanded body is larger than {limit_bytes} bytes (server.max_body_bytes)",
        should_retry=False,
    )

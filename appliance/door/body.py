"""Request bodies: expanded where they came compressed, and the few fields of them that the router reads.

Whatever is read, the engine gets the body byte for byte. So a field that two readers could see differently is refused:
a second top-level `model` or `stream`, of which msgspec takes the last and an engine might take the first.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec

from ..facts.call import Ask
from ..facts.errors import Refusal
from ..wire import fields, multipart

BOM = b"\xef\xbb\xbf"
MOST_CODINGS = 2
"""Each layer may expand to the whole limit, so a long list of them is work without end for a short header."""
PIECE_BYTES = 1 << 20
"""What expanding yields at a time, so that others get their turn: about 5 ms. A zstd piece may be eight times that."""
MOST_MEMBERS = 1000
"""Compressed files joined in one body; each costs a fresh decompressor, however little is in it."""
_ZSTD_WINDOW_BYTES = 1 << 23  # what RFC 9659 lets senders assume
_ZSTD_SLICE_BYTES = 256  # four bytes can stand for 128 KiB, and this decompressor takes no bound on its output
_SLICE_BYTES = 16384

_decoder = msgspec.json.Decoder(Ask)


def codings(encoding: bytes) -> list[bytes]:
    """The codings in a Content-Encoding, the outermost first. Raises Refusal (415)."""
    names = [name for part in encoding.split(b",") if (name := part.strip().lower()) not in (b"", b"identity")]
    unknown = next((name for name in names if name not in _EXPANDERS), None)
    if unknown is None and len(names) <= MOST_CODINGS:
        return names[::-1]
    shown = unknown.decode("latin-1")[:40] if unknown else encoding.decode("latin-1")[:40]
    raise Refusal(
        415,
        "unsupported_encoding",
        f"Content-Encoding {shown!r} is not understood here: use gzip, zstd, deflate or none",
        should_retry=False,
        headers=(("Accept-Encoding", "gzip, zstd, deflate"),),
    )


def expanding(body: bytes, coding: bytes, limit_bytes: int) -> Iterator[bytes]:
    """The pieces of the body under one of `codings`; some may be empty. Between two of them others should get a turn.

    Raises Refusal: 400 for what is not valid, 413 above the limit. Counted is the output: a kilobyte can expand to a
    megabyte.
    """
    size = 0
    try:
        for piece in _EXPANDERS[coding](body):
            size += len(piece)
            if size > limit_bytes:
                raise Refusal(
                    413,
                    "body_too_large",
                    f"the expanded body is larger than {limit_bytes} bytes (server.max_body_bytes)",
                    should_retry=False,
                )
            yield piece
    except (zlib.error, ValueError) as error:
        raise Refusal(400, "invalid_encoding", f"the body is not valid {coding.decode()}: {error}") from None


def read_json(body: bytes) -> Ask:
    """The fields of a JSON body. Raises Refusal (400)."""
    try:
        ask = _decoder.decode(body)
    except msgspec.ValidationError:
        raise Refusal(400, "invalid_json", "the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        detail = "it is empty" if not body else _why(error)
        raise Refusal(400, "invalid_json", f"the body is not valid JSON: {detail}") from None
    if not isinstance(ask.model, str) or not ask.model:
        problem = "is missing" if ask.model is None else "must be a string that is not empty"
        raise Refusal(
            400, "model_missing", f"the field `model` {problem}; /v1/models lists what there is", param="model"
        )
    # the first look of `fields.repeated`, here to save every request the call
    if body.count(b'"model"') > 1 or body.count(b'"stream"') > 1 or b"\\u00" in body:
        _refuse_repeated(body)
    return ask


def read_multipart(body: bytes, content_type: bytes) -> Ask:
    """The `model` (and `stream`) of a form, wherever they stand in it. Raises Refusal (400)."""
    values: dict[bytes, bytes] = {}
    try:
        for name, start, end in multipart.parts(body, content_type):
            if name in (b"model", b"stream"):
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
        model = values[b"model"].decode()
    except UnicodeDecodeError:
        model = ""
    if not model:
        raise Refusal(400, "model_missing", "the form field `model` must be a name", param="model")
    stream = values.get(b"stream", b"").strip().lower() in (b"true", b"1")
    return Ask(model=model, stream=msgspec.Raw(b"true" if stream else b"false"))


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    # what the decoder says of half a pair too, which programs write that cut a text in the middle of an emoji
    return "it is cut off, or holds half of a \\u pair" if "truncated" in str(error) else str(error)


def _refuse_repeated(body: bytes) -> None:
    try:
        name = fields.repeated(body, "model", "stream")
    except fields.Unclear as unclear:
        raise Refusal(400, "duplicate_field", f"whether a field is there twice cannot be told: {unclear}") from None
    if name is not None:
        raise Refusal(400, "duplicate_field", f"the field `{name}` is there twice", param=name)


def _gzip(body: bytes) -> Iterator[bytes]:
    return _inflate(body, 31)


def _deflate(body: bytes) -> Iterator[bytes]:
    # RFC 9110 means the zlib format; the raw one is in the field all the same
    zlib_head = len(body) >= 2 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return _inflate(body, 15 if zlib_head else -15)


def _inflate(body: bytes, window: int) -> Iterator[bytes]:
    """gzip files may be joined. Fed in slices, because what follows the end of one is copied for every one of them."""
    at = 0
    for _ in range(MOST_MEMBERS):
        stream = zlib.decompressobj(window)
        while not stream.eof:
            data = stream.unconsumed_tail
            if not data:
                data = body[at : at + _SLICE_BYTES]
                at += len(data)
            piece = stream.decompress(data, PIECE_BYTES)  # without data: what it still holds back
            if not data and not piece and not stream.eof:
                raise ValueError("it is cut off")
            yield piece
        at -= len(stream.unused_data)
        if at == len(body):
            return
    raise ValueError(f"more than {MOST_MEMBERS} files are joined in it")


def _unzstd(body: bytes) -> Iterator[bytes]:
    import zstandard

    at = 0
    for _ in range(MOST_MEMBERS):
        stream = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
        held: list[bytes] = []
        size = 0
        while not stream.eof:
            data = body[at : at + _ZSTD_SLICE_BYTES]
            at += len(data)
            if not data:
                raise ValueError("it is cut off")
            try:
                held.append(stream.decompress(data))
            except zstandard.ZstdError as error:
                raise ValueError(str(error).rpartition(": ")[2]) from None
            size += len(held[-1])
            if size >= PIECE_BYTES:
                yield b"".join(held)
                held, size = [], 0
        yield b"".join(held)
        at -= len(stream.unused_data)
        if at == len(body):
            return
    raise ValueError(f"more than {MOST_MEMBERS} frames are joined in it")


_EXPANDERS = {b"gzip": _gzip, b"x-gzip": _gzip, b"deflate": _deflate, b"zstd": _unzstd}

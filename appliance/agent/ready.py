"""Whether an engine serves, asked of the engine itself; and whether something listens."""

from __future__ import annotations

import json

import attrs
import trio

from appliance.facts.launch import HttpReady, Listening
from appliance.rules.engines import metrics
from appliance.wire.framing import BadFraming, Chunked
from appliance.wire.head import BadHead, end_of_head, read_response

MAX_ANSWER_BYTES = 4 << 20
"""vLLM's metrics are 50 KiB; more than this is no answer to anything asked here."""

_RETRY_S = 0.2
_RECEIVE_BYTES = 65536


class NoAnswer(Exception):
    """There was no whole answer; the text says why, in a few words."""


@attrs.frozen
class Probed:
    """What one look at an engine found: `ready`, or `why_not` in a few words."""

    ready: bool
    why_not: str = ""


async def probe(wanted: HttpReady) -> Probed:
    """Ask once for health and for the models. Takes up to twice `timeout_s`; raises nothing for what it does."""
    try:
        status, _ = await get(wanted.host, wanted.port, wanted.health, wanted.key, wanted.timeout_s)
        if status != 200:
            return Probed(False, f"{wanted.health} answers {status}")
        status, body = await get(wanted.host, wanted.port, wanted.models, wanted.key, wanted.timeout_s)
        if status != 200:
            return Probed(False, f"{wanted.models} answers {status}")
    except NoAnswer as none:
        return Probed(False, str(none))
    names = served(body)
    if names is None:
        return Probed(False, f"{wanted.models} answers something else than a list of models")
    if wanted.name not in names:
        return Probed(False, f"it serves {', '.join(names) or 'nothing'}, not {wanted.name}")
    return Probed(True)


def served(body: bytes) -> list[str] | None:
    """The names that an answer of `/v1/models` lists, aliases too; None when it is no such list."""
    try:
        rows = json.loads(body)["data"]
        names = [str(row["id"]) for row in rows]
        return names + [str(alias) for row in rows for alias in row.get("aliases") or ()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


async def idle(engine: str, wanted: HttpReady) -> bool:
    """Whether the engine says that no request runs or waits in it. An engine that does not say so is not idle."""
    if not metrics.scraped(engine):
        return False
    try:
        status, body = await get(wanted.host, wanted.port, "/metrics", wanted.key, wanted.timeout_s)
    except NoAnswer:
        return False
    if status != 200:
        return False
    reading = metrics.read(engine, body)
    return reading.running == 0 and reading.waiting == 0


async def listens(wanted: Listening) -> bool:
    """Wait until something accepts connections there; False when nothing did within its time."""
    with trio.move_on_after(wanted.within_s):
        while True:
            try:
                stream = await trio.open_tcp_stream(wanted.host, wanted.port)
            except OSError:
                await trio.sleep(_RETRY_S)
            else:
                await stream.aclose()
                return True
    return False


async def get(host: str, port: int, path: str, key: str, within_s: float) -> tuple[int, bytes]:
    """One GET on a connection of its own: status and body. Raises NoAnswer."""
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    request = f"GET {path} HTTP/1.1\r\nhost: {at}\r\naccept: */*\r\nconnection: close\r\n"
    request += f"authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
    try:
        with trio.fail_after(within_s):
            stream = await trio.open_tcp_stream(host, port)
            async with stream:
                await stream.send_all(request.encode())
                return await _read_answer(stream)
    except trio.TooSlowError:
        raise NoAnswer(f"no answer to {path} within {within_s:g} s") from None
    except OSError as refused:
        # Trio gathers what became of every address it tried.
        raise NoAnswer(f"nothing listens on {at}" if "connect" in str(refused) else str(refused)) from None
    except trio.BrokenResourceError:
        raise NoAnswer(f"the connection broke while asking for {path}") from None
    except (BadHead, BadFraming) as garbage:
        raise NoAnswer(f"{path} is answered with something that is not HTTP: {garbage}") from None


async def _read_answer(stream: trio.SocketStream) -> tuple[int, bytes]:
    data = b""
    while (end := end_of_head(data)) < 0:
        data += await _more(stream, len(data))
    head = read_response(data[:end])
    body, chunks = data[end:], Chunked() if head.chunked else None
    if chunks is not None:
        pieces = chunks.feed(body)
        size = 0
        while not chunks.done:
            pieces += chunks.feed(await _more(stream, size))
            size = sum(map(len, pieces))
        return head.status, b"".join(pieces)
    received = [body]
    size = len(body)
    while head.length is None or size < head.length:
        piece = await stream.receive_some(_RECEIVE_BYTES)
        if not piece:
            if head.length is not None:
                raise trio.BrokenResourceError
            break
        size += len(piece)
        received.append(piece)
        _check(size)
    return head.status, b"".join(received)


async def _more(stream: trio.SocketStream, size: int) -> bytes:
    _check(size)
    piece = bytes(await stream.receive_some(_RECEIVE_BYTES))
    if not piece:
        raise trio.BrokenResourceError
    return piece


def _check(size: int) -> None:
    if size > MAX_ANSWER_BYTES:
        raise NoAnswer(f"an answer of more than {MAX_ANSWER_BYTES} bytes")

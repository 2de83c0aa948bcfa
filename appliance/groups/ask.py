"""One question over HTTP to a daemon or an engine: a fresh connection, a GET, a bounded answer.

The answer is one document every few seconds, so nothing is kept between two questions, and no connection is ever
found closed by the other side. What still happens is that an established one breaks: then the question is put once more
on another. A refused connection and a timeout are answers, and are not asked again.
"""

from __future__ import annotations

import functools
import os
import socket
import ssl
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

import attrs
import trio

from ..rules.groups.sources import is_one_of
from ..wire import via
from ..wire.framing import BadFraming, Chunked
from ..wire.head import BadHead, ResponseHead, end_of_head, read_response

MOST_BYTES = 4 << 20
MOST_INTERIM = 10
"""Heads with a status of 1xx that may come before the answer."""
_MOST_HEAD_BYTES = 64 << 10
_RECV_BYTES = 64 << 10


class AskFailed(Exception):
    """No answer that can be used. The message is for operators."""


class _Broke(Exception):
    """An established connection failed before the answer was whole."""


Listening = Sequence[tuple[str, int]]
"""The sockets of this router. A group that is announced there would serve whatever it is told to serve by ourselves:
its models would never go away, and their requests go round in a circle."""


@attrs.frozen
class Answer:
    """`router` tells that another router of this kind has answered."""

    body: bytes
    router: bool = False


async def ask(url: str, within_s: float, listening: Listening = (), *, as_router: bool = False) -> Answer:
    """What an http or https URL holds, which must not be one of `listening`. `as_router`: for what we serve in turn, so
    that another router tells us only of what it does not have from us. Raises AskFailed within `within_s` seconds."""
    fields = f"Via: {via.value()}\r\n" if as_router else ""
    try:
        with trio.fail_after(within_s):
            return await _again(url, listening, fields)
    except trio.TooSlowError:
        raise AskFailed(f"timeout after {within_s:.1f}s") from None


async def _again(url: str, listening: Listening, fields: str) -> Answer:
    try:
        return await _get(url, listening, fields)
    except _Broke as first:
        try:
            return await _get(url, listening, fields)
        except _Broke as second:
            raise AskFailed(f"{second} (and before that: {first})") from None
        except AskFailed as second:
            raise AskFailed(f"{second} (and before that: {first})") from None


async def _get(url: str, listening: Listening, fields: str) -> Answer:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if tls else 80)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        plain = await trio.open_tcp_stream(host, port)
    except OSError as error:
        raise AskFailed(f"cannot connect: {_reason(error)}") from None
    try:
        there, here = plain.socket.getpeername()[:2], plain.socket.getsockname()[0]
        if is_one_of(listening, there, here):
            raise AskFailed("this router itself listens there")
        stream: trio.abc.Stream = plain
        if tls:
            stream = trio.SSLStream(plain, _context(), server_hostname=host, https_compatible=True)
        shown = f"[{host}]" if ":" in host else host
        request = (
            f"GET {target} HTTP/1.1\r\nHost: {shown}:{port}\r\nAccept: application/json\r\n"
            f"User-Agent: appliance\r\n{fields}Connection: close\r\n\r\n"
        )
        await stream.send_all(request.encode())
        return await _answer(stream)
    except (trio.BrokenResourceError, OSError) as error:  # of TLS, too
        raise _Broke(f"connection lost: {_reason(error.__cause__ or error)}") from None
    finally:
        await trio.aclose_forcefully(plain)  # without a word, and without waiting for the other side


async def _answer(stream: trio.abc.Stream) -> Answer:
    """Raises AskFailed, _Broke, or what the stream raises."""
    received = b""
    for _ in range(MOST_INTERIM):
        head, received = await _head(stream, received)
        if head.status >= 200:
            break
    else:
        raise AskFailed("nothing but interim answers")
    body = await _body(stream, head, received)
    if not 200 <= head.status < 300:
        raise AskFailed(f"HTTP {head.status} {_phrase(head.status)}".rstrip())
    return Answer(body, bool(via.marks_in(head.fields)))


async def _head(stream: trio.abc.Stream, received: bytes) -> tuple[ResponseHead, bytes]:
    try:
        while (end := end_of_head(received)) < 0:
            if len(received) > _MOST_HEAD_BYTES:
                raise AskFailed("the answer's header is too large")
            more = await stream.receive_some(_RECV_BYTES)
            if not more:
                raise _Broke("connection closed without an answer")
            received += bytes(more)
        return read_response(received[:end]), received[end:]
    except BadHead as bad:
        raise AskFailed(f"the answer is not HTTP: {bad}") from None


async def _body(stream: trio.abc.Stream, head: ResponseHead, received: bytes) -> bytes:
    chunked = Chunked() if head.chunked else None
    length = head.length
    if length is not None and length > MOST_BYTES:
        raise AskFailed(f"more than {MOST_BYTES} bytes")
    body = bytearray()
    more = received
    while True:
        if chunked is not None:
            try:
                for piece in chunked.feed(more):
                    body += piece
            except BadFraming as bad:
                raise AskFailed(f"the answer is not HTTP: {bad}") from None
            if chunked.done:
                return bytes(body)
        else:
            body += more
            if length is not None and len(body) >= length:
                return bytes(body[:length])
        if len(body) > MOST_BYTES:
            raise AskFailed(f"more than {MOST_BYTES} bytes")
        more = bytes(await stream.receive_some(_RECV_BYTES))
        if not more:
            if chunked is None and length is None:
                return bytes(body)
            raise _Broke("connection closed within the answer")


@functools.cache
def _context() -> ssl.SSLContext:
    from ..wire.tls import client_context  # groups on https are rare

    return client_context()


def _reason(error: BaseException) -> str:
    """In the kernel's words where they are its. Trio wraps what went wrong at each address of a host."""
    inner: BaseException | None = error
    while inner is not None and not getattr(inner, "errno", None):
        inner = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner.__cause__
    number = getattr(inner, "errno", None)
    if isinstance(inner, socket.gaierror) or not isinstance(number, int):
        return str(inner or error)
    return os.strerror(number)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""

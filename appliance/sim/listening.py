"""Addresses to listen at: bound early, so that a port that is taken is told at once, not after a minute of loading."""

from __future__ import annotations

import socket


class CannotListen(Exception):
    """An address that cannot be bound; the text says which and which flag to change."""


def bind(host: str, port: int, flag: str, *, backlog: int = 0) -> socket.socket:
    """A bound TCP socket; listening already when `backlog` is given. The caller closes it. Raises CannotListen.

    Bound and not listening, a port refuses connections and cannot be taken by others: how vLLM looks while it loads.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(
            f"cannot listen at {host}:{port}: {error.strerror or error}; choose another {flag}"
        ) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        if backlog:
            sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise CannotListen(
            f"cannot listen at {host}:{port}: {error.strerror or error}; choose another {flag}"
        ) from None
    sock.setblocking(False)
    return sock

"""Loopback ports for the demonstration."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def first_free(preferred: int, *taken: int) -> int:
    """`preferred`, or the next port on which one can listen and that is not among `taken`."""
    for port in range(preferred, preferred + 200):
        if port not in taken and _can_listen(port):
            return port
    raise OSError(f"no free port in {preferred} to {preferred + 199}")


def any_free() -> int:
    """A port that the kernel chooses. Another process may take it before it is used; this is a demonstration."""
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        port: int = sock.getsockname()[1]
        return port


def _can_listen(port: int) -> bool:
    with socket.socket() as sock:
        # What lingers in TIME_WAIT of the last demonstration is no obstacle to the next one.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((LOOPBACK, port))
        except OSError:
            return False
        return True

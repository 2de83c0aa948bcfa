"""TLS over a line: the same two non-blocking calls, with the encryption in between."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
from collections.abc import Callable

from ..nursery.sleeper import Sleeper, breathe
from .line import READ_BYTES, Line, Poller

MAX_HELD_BYTES = 262144
"""Ciphertext that may wait for the socket before `try_send` takes no more plaintext."""


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """A context that serves the certificate chain in `certificate` with the key in `key`. Raises OSError,
    ssl.SSLError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context


def client_context() -> ssl.SSLContext:
    """A context that trusts certifi's roots, or those of SSL_CERT_FILE where it is set: the host's own folder is not
    asked, since a node laid out unlike the builder would give no root at all, without an error."""
    import certifi

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(_environment_roots() or certifi.where())
    return context


def _environment_roots() -> str:
    return os.environ.get("SSL_CERT_FILE", "")


CONTROL_NAME = "control.appliance"
"""The name that every control plane's certificate bears and every agent asks for (`server_hostname`), whatever address
it dials: the root says which cluster this is, and a machine may change its address."""


def link_server_context(certificate: str, key: str, root: str) -> ssl.SSLContext:
    """For the port that agents call. A client may show no certificate (it is joining); one that is shown must be signed
    by the cluster's root and be for clients. Reads the files anew at each call; raises OSError, ssl.SSLError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(root)
    # A resumed session is not verified again, and a certificate may have ended. Links are few and long: no loss.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context


def link_client_context(certificate: str, key: str, root: str) -> ssl.SSLContext:
    """For an agent that calls: trusts the cluster's root and no other. To be used with `CONTROL_NAME` as
    `server_hostname`. Reads the files anew at each call; raises OSError, ssl.SSLError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(root)
    context.load_cert_chain(certificate, key)
    return context


class FreshContext:
    """A context made from files, and made again once one of them has changed: a certificate is renewed while it serves.

    Looking costs three `stat`s. While the new files cannot be read, because they are being replaced, the old context
    goes on.
    """

    def __init__(self, make: Callable[[str, str, str], ssl.SSLContext], *files: str) -> None:
        """Raises OSError, ssl.SSLError."""
        self._make = make
        self._files = files
        self._seen = self._look()
        self._context = make(*files)

    def get(self) -> ssl.SSLContext:
        with contextlib.suppress(OSError, ssl.SSLError):
            seen = self._look()
            if seen != self._seen:
                self._context = self._make(*self._files)
                self._seen = seen
        return self._context

    def _look(self) -> list[tuple[int, int, int]]:
        found = [os.stat(file) for file in self._files]
        return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in found]


class TlsLine(Line):
    """A line whose bytes are encrypted. Call `handshake` first; every Line method then means plaintext."""

    __slots__ = ("_ended", "_held", "_incoming", "_outgoing", "_tls")

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        context: ssl.SSLContext,
        sleeper: Sleeper | None = None,
        *,
        server_side: bool,
        server_hostname: str | None = None,
    ) -> None:
        super().__init__(sock, poller, sleeper)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._held = memoryview(b"")
        self._ended = False

    async def handshake(self) -> None:
        """Raises ssl.SSLError, OSError (also when the peer leaves in the middle), or the reason of a cut."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self.flush()
                while not self._pull():
                    if self._ended:
                        raise ConnectionResetError("the peer left during the TLS handshake") from None
                    await self._sleep()
            except ssl.SSLError:
                # the alert tells the peer why; it may be gone already
                with contextlib.suppress(OSError):
                    self._push()
                raise
            else:
                await self.flush()
                return

    def news(self, events: int) -> None:
        """What waited for room in the socket goes first: the task that wrote it may be waiting for something else by
        now.
        """
        if self._held and events & select.EPOLLOUT:
            self.writable = True
            try:
                self._push()
            except OSError:
                events |= select.EPOLLERR
        super().news(events)

    def try_recv(self) -> bytes | None:
        while True:
            try:
                return self._tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                # at the end of the stream TLS is asked once more: whether the peer said so, or was cut off
                if not self._pull() and not self._ended:
                    return None
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLError as error:
                raise ConnectionResetError(f"TLS: {error.reason}") from error

    def try_send(self, data: bytes | memoryview) -> int:
        self._push()
        if len(self._held) > MAX_HELD_BYTES:
            return 0
        piece = data[:READ_BYTES]
        if not piece:
            return 0
        try:
            taken = self._tls.write(piece)
        except ssl.SSLError as error:
            raise BrokenPipeError(f"TLS: {error.reason}") from error
        self._push()
        return taken

    async def send_all(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            self._operations += 1
            await breathe(self._operations)
            sent = self.try_send(rest)
            rest = rest[sent:]
            if rest and self._held and not self.writable:
                await self._sleep()
        await self.flush()

    async def flush(self) -> None:
        self._push()
        self.push()
        while self.unsent:
            await self._sleep()
            self._push()
            self.push()

    @property
    def unsent(self) -> bool:
        return bool(self._held or self._backlog)

    def _finish(self) -> None:
        # Nothing can be read through TLS from here on: should plaintext be on its way, OpenSSL takes that for a fault.
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        self._push()
        super()._finish()

    def _pull(self) -> bool:
        """Move ciphertext from the socket to TLS; False when there was none, with `_ended` set at the end of the
        stream.
        """
        data = super().try_recv()
        if data:
            self._incoming.write(data)
            return True
        if data is not None and not self._ended:
            self._ended = True
            self._incoming.write_eof()
        return False

    def _push(self) -> None:
        """Move ciphertext from TLS to the socket, as much as it takes."""
        if self._outgoing.pending:
            fresh = self._outgoing.read()
            self._held = memoryview(bytes(self._held) + fresh) if self._held else memoryview(fresh)
        while self._held:
            sent = super().try_send(self._held)
            if not sent:
                return
            self._held = self._held[sent:]

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(ssl.SSLError, OSError):
                self._tls.unwrap()
            with contextlib.suppress(OSError):
                self._push()
        super().close()

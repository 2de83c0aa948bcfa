"""The two questions of a machine that joins: which root is yours, and will you sign this.

The first connection believes nobody: it fetches the root, and a fingerprint that came by another way says whether it is
the right one. The second believes that root alone; only over it goes the token.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from typing import Any

from attrs import field, frozen

from ..wire.certificates import BadPem, fingerprint
from ..wire.handshake import handshake_fault
from ..wire.tls import CONTROL_NAME

ANSWER_S = 10.0
"""For each step, and for the whole answer: a byte now and then, or "go on" without end, is no answer either."""

ANSWER_BYTES = 65536


class CannotJoin(Exception):
    """The machine does not join; one line with the next step. `code` is the control plane's word, "" for ours."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@frozen
class Control:
    """Where the control plane answers."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@frozen
class Given:
    """What came of it, both in PEM."""

    certificate: bytes = field(repr=False)
    root: bytes = field(repr=False)


def fetch_root(control: Control, expected: str) -> bytes:
    """The cluster's root in PEM, which has the expected fingerprint. Raises CannotJoin."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    status, body = _ask(control, context, "GET", "/root", None)
    try:
        found = fingerprint(body) if status == 200 else ""
    except BadPem:
        found = ""
    if not found:
        raise CannotJoin(f"what answers at {control} is no control plane: look at --control")
    if found != expected:
        raise CannotJoin(
            f"the control plane at {control} has the root {found}, and --root says {expected}: run 'appliance ctl node"
            " add' there and the line that it prints here; if they still differ, something stands in between"
        )
    return body


def ask_to_sign(control: Control, root: bytes, token: str, name: str, csr: str) -> Given:
    """A certificate for `name`, from the control plane whose root this is. Raises CannotJoin."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=root.decode("ascii"))
    body = json.dumps({"token": token, "name": name, "csr": csr}).encode("utf-8")
    status, answer = _ask(control, context, "POST", "/join", body)
    document: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(answer)
    if isinstance(document, dict):
        match document:
            case {"certificate": str(certificate), "root": str(given)} if status == 200:
                return Given(certificate.encode("utf-8", "replace"), given.encode("utf-8", "replace"))
            case {"error": {"message": str(message), "code": str(code)}}:
                raise CannotJoin(f"the control plane at {control} says no ({code}): {message}", code)
    raise CannotJoin(f"{control} answered with {status} and nothing that is understood; look at the log of its serve")


class _Connection(http.client.HTTPSConnection):
    """Asks for the name that every control plane bears, whatever address it is called at."""

    def __init__(self, control: Control, context: ssl.SSLContext) -> None:
        super().__init__(control.host, control.port, timeout=ANSWER_S, context=context)
        self.late = False
        self._control = control
        self._tls = context
        self._wire: socket.socket | None = None

    def connect(self) -> None:
        plain = socket.create_connection((self._control.host, self._control.port), self.timeout)
        self._wire = plain.dup()  # the other one becomes TLS's, and must not be touched from another thread
        try:
            self.sock = self._tls.wrap_socket(plain, server_hostname=CONTROL_NAME)
        except BaseException:
            plain.close()
            raise

    def give_up(self) -> None:
        """End whatever is waited for, from another thread."""
        self.late = True
        with contextlib.suppress(OSError):
            if self._wire is not None:
                self._wire.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close all of it. `close` is called by the library itself, once the answer has begun."""
        self.close()
        if self._wire is not None:
            self._wire.close()


def _ask(control: Control, context: ssl.SSLContext, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    connection = _Connection(control, context)
    bound = threading.Timer(ANSWER_S, connection.give_up)
    bound.daemon = True
    bound.start()
    try:
        headers = {"host": str(control), "content-type": "application/json"}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read(ANSWER_BYTES)
        if connection.late:
            raise TimeoutError
        return answer.status, content
    except (OSError, http.client.HTTPException) as error:
        raise CannotJoin(_why(control, TimeoutError() if connection.late else error)) from None
    finally:
        bound.cancel()
        connection.release()


def _why(control: Control, error: Exception) -> str:
    match error:
        case ssl.SSLError():
            return f"no TLS with {control}: {handshake_fault(error)}; look at --control"
        case socket.gaierror():
            return f"{control.host} is no host that this machine knows: look at --control"
        case TimeoutError():
            return (
                f"no answer from {control} within {ANSWER_S:g} s: is the port open in the firewalls between, and is"
                " 'appliance serve' running there?"
            )
        case OSError():
            return (
                f"cannot reach {control}: {error.strerror or error}; is 'appliance serve' running there with a model"
                " that has a profile, and was 'ctl init' run before it?"
            )
        case _:
            return f"what answers at {control} is no control plane: look at --control"

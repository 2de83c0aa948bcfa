"""Files that the configuration names: read once at load, so that a start or a reload fails before it has begun.

What they hold is looked at and never kept; no message holds a byte of it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from appliance.cli.config.schema import leaves
from appliance.facts.errors import Fault
from appliance.facts.settings import Settings

if TYPE_CHECKING:
    from ssl import SSLError

_LARGEST_KEY_FILE_BYTES = 16 * 1024


def check_files(settings: Settings, faulty: Collection[str] = ()) -> list[Fault]:
    """Faults of every file named in `settings`; `faulty` holds paths of keys whose value failed already."""
    faults: list[Fault] = []
    for path, field, value in leaves(settings):
        if field.key.form in ("file", "key_file", "secret_file") and value and path not in faulty:
            look = {"key_file": _no_key, "secret_file": _no_secret}.get(field.key.form)
            faults.extend(list(_unreadable(path, value)) or (list(look(path, value)) if look else []))
    server = settings.server
    pair = ("server.tls_cert", "server.tls_key")
    failed = {*faulty, *(fault.path for fault in faults)}
    if server.tls_cert and server.tls_key and not failed.intersection(pair):
        faults.extend(_no_pair(server.tls_cert, server.tls_key))
    return faults


def _unreadable(path: str, file: str) -> Iterator[Fault]:
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # opening a pipe would wait for its writer
            yield Fault(path, f"expected a regular file, got {file}")
            return
        with open(file, "rb") as opened:
            opened.read(1)
    except OSError as error:
        yield Fault(path, f"expected a readable file, got {file}: {error.strerror}")


def _no_key(path: str, file: str) -> Iterator[Fault]:
    """A key travels in a header, so it is one word of visible ASCII."""
    with open(file, "rb") as opened:
        key = opened.read(_LARGEST_KEY_FILE_BYTES).strip()
    if not re.fullmatch(rb"[\x21-\x7e]+", key):
        what = "an empty one" if not key else "something else"
        yield Fault(path, f"expected a file with one key on one line, got {what} in {file}")


def _no_secret(path: str, file: str) -> Iterator[Fault]:
    """An empty file must not mean that nothing is signed."""
    with open(file, "rb") as opened:
        if not opened.read(_LARGEST_KEY_FILE_BYTES).strip(b" \t\n\f\r"):
            yield Fault(path, f"expected a file with a secret, got an empty one in {file}")


def _no_pair(cert: str, key: str) -> Iterator[Fault]:
    import ssl  # only a door with a certificate pays for it

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a callback OpenSSL asks the terminal for the password of an encrypted key, and a start would hang.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as error:
        yield _tls_fault(cert, key, error)
    except (OSError, ValueError) as error:
        yield Fault("server.tls_key", f"expected a key in PEM without a password, in {key}: {error}")


def _tls_fault(cert: str, key: str, error: SSLError) -> Fault:
    if error.reason == "KEY_VALUES_MISMATCH":
        return Fault("server.tls_key", f"expected the key of {cert}, got another one's in {key}")
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert)
    except ssl.SSLError:
        return Fault("server.tls_cert", f"expected a certificate in PEM, in {cert}")
    return Fault("server.tls_key", f"expected a key in PEM without a password, in {key}")

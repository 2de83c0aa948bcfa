"""What a certificate says in a handshake, and what a failed one means, in words an operator can act on."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from attrs import frozen

_VERIFIED = {
    7: "its signature is wrong",
    9: "it is not valid yet: the clock of one of the two machines is off",
    10: "it has expired, or the clock of one of the two machines is off",
    18: "it was not signed by this cluster's root",
    19: "it was not signed by this cluster's root",
    20: "it was not signed by this cluster's root",
    21: "it was not signed by this cluster's root",
    23: "it was revoked",
    24: "it was signed by something that is no root",
    26: "it is not meant for this end of a link",
    62: "it is for another name",
    64: "it is for another address",
}
"""By OpenSSL's `verify_code`: why we did not take the peer's certificate."""

_ALERTS = {
    "CERTIFICATE_EXPIRED": "the other side says that our certificate has expired, or one of the two clocks is off",
    "UNKNOWN_CA": "the other side says that our certificate was not signed by its root",
    "BAD_CERTIFICATE": "the other side says that our certificate is wrong: not valid yet, or damaged",
    "UNSUPPORTED_CERTIFICATE": "the other side says that our certificate is not meant for this end of a link",
    "CERTIFICATE_REVOKED": "the other side says that our certificate was revoked",
    "CERTIFICATE_UNKNOWN": "the other side did not take our certificate",
    "CERTIFICATE_REQUIRED": "the other side wants a certificate, and we showed none",
    "DECRYPT_ERROR": "the other side says that our certificate is not of our key, or of another root of the same name",
    "HANDSHAKE_FAILURE": "the two ends share no way to encrypt",
    "PROTOCOL_VERSION": "the two ends share no version of TLS",
}
"""By the end of OpenSSL's word for an alert: why the peer did not take ours."""

_REASONS = {
    "WRONG_VERSION_NUMBER": "what answers there does not speak TLS",
    "HTTP_REQUEST": "plain HTTP was spoken to a port with TLS",
    "UNEXPECTED_EOF_WHILE_READING": "the other side closed the connection in the middle of the handshake",
    "NO_SHARED_CIPHER": "the two ends share no way to encrypt",
    "UNSUPPORTED_PROTOCOL": "the two ends share no version of TLS",
    "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
}


@frozen
class Holder:
    """Who a verified certificate was given to. `serial` is lower case hex without leading zeros, `not_after` seconds
    since 1970."""

    name: str
    serial: str
    not_after: float


def holder(shown: Mapping[str, Any] | None) -> Holder | None:
    """From what `getpeercert()` gives after a handshake that verified it; None where no certificate was shown."""
    if not shown:
        return None
    names = [value for part in shown.get("subject", ()) for kind, value in part if kind == "commonName"]
    return Holder(
        names[0] if len(names) == 1 else "",
        format(int(shown["serialNumber"], 16), "x"),
        float(ssl.cert_time_to_seconds(shown["notAfter"])),
    )


def handshake_fault(error: BaseException) -> str:
    """What came out of a handshake, or of the first read after one: with TLS 1.3 the server judges the client's
    certificate when the client takes the handshake for done. Looks through wrappings for the first ssl.SSLError.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    if found is None:
        return str(error) or type(error).__name__
    if isinstance(found, ssl.SSLCertVerificationError):
        why = _VERIFIED.get(found.verify_code) or found.verify_message
        return f"the certificate of the other side was not accepted: {why}"
    reason = found.reason or ""
    if "ALERT_" in reason:
        alert = reason.partition("ALERT_")[2]
        return _ALERTS.get(alert) or f"the other side ended the handshake: {alert.lower().replace('_', ' ')}"
    return _REASONS.get(reason) or f"TLS: {reason.lower().replace('_', ' ') or found}"

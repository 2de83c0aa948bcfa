"""X.509 as both ends of the link need it: keys, signing requests, and what a certificate says.

Loads `cryptography` (60 ms), so it is imported by those alone who join, renew or sign; a handshake needs none of it.
"""

from __future__ import annotations

import re

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""What a node may be called; the same as `agent.node`."""


class BadPem(Exception):
    """The text is not what it should be; the message completes "expected ..."."""


@frozen
class Details:
    """What a certificate says. Times are seconds since 1970, `serial` lower case hex without leading zeros."""

    name: str
    serial: str
    not_before: float
    not_after: float
    fingerprint: str


def new_key() -> bytes:
    """A private key on P-256, in PEM without a password."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(pem: bytes) -> CertificateIssuerPrivateKeyTypes:
    """Raises BadPem."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadPem("a private key in PEM without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadPem("a private key on an elliptic curve")
    return key


def signing_request(key: bytes, name: str) -> str:
    """A request in PEM for a certificate of `name`, signed with the key in PEM. Raises BadPem."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = x509.CertificateSigningRequestBuilder(subject).add_extension(
        x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False
    )
    return builder.sign(load_key(key), hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode("ascii")


def load(pem: bytes) -> x509.Certificate:
    """The one certificate in PEM. Raises BadPem."""
    try:
        (certificate,) = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise BadPem("one certificate in PEM") from None
    return certificate


def details(pem: bytes) -> Details:
    """Raises BadPem."""
    certificate = load(pem)
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return Details(
        str(names[0].value) if names else "",
        format(certificate.serial_number, "x"),
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
        fingerprint(pem),
    )


def fingerprint(pem: bytes) -> str:
    """`sha256:` and the hex digest of the one certificate in PEM. Raises BadPem."""
    return f"sha256:{load(pem).fingerprint(hashes.SHA256()).hex()}"


def signed_by(pem: bytes, root: bytes) -> bool:
    """Whether the certificate was signed by this root, whatever its dates. Raises BadPem."""
    try:
        load(pem).verify_directly_issued_by(load(root))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def belong(key: bytes, pem: bytes) -> bool:
    """Whether the certificate is of this key. Raises BadPem."""
    return load_key(key).public_key() == load(pem).public_key()


def is_fingerprint(text: str) -> bool:
    return re.fullmatch(r"sha256:[0-9a-f]{64}", text) is not None

"""The cluster's root, and what it signs: the control plane's own certificate, and one for each node.

The root is this cluster's and nobody else's: it is in no system's list, agents trust it alone, and what it signs is
good for one end of one link only (`clientAuth` or `serverAuth`). Everything is dated back by `BACK_S`, since a node's
clock that is off by its time zone is the commonest fault of a fresh machine.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Collection, Sequence

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes, CertificatePublicKeyTypes

from ..store.papers import PUBLIC, Papers, make_folder, put
from ..store.rows import Certificate
from ..wire import certificates
from ..wire.certificates import BadPem
from ..wire.tls import CONTROL_NAME

DAY_S = 86400.0
ROOT_S = 3650 * DAY_S
SERVER_S = 365 * DAY_S
NODE_S = 90 * DAY_S
BACK_S = DAY_S
"""How long each is good, and how far before its making its time begins."""

SERVER_DUE_S = 90 * DAY_S
"""What is left of it when the control plane's is renewed: time enough for somebody to notice that it did not work."""

CSR_BYTES = 8192

MOST_NAMES = 32
"""Names and addresses of the machine that the control plane's certificate bears, present ones first."""

_KEY_USE = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
_KEY_USE_CA = ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")


class PkiFailed(Exception):
    """The root or the control plane's certificate cannot be made or used; one line with the next step."""


class CsrRefused(Exception):
    """A signing request that is not signed. `code` is a stable word: `invalid_csr` or `name_mismatch`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@frozen
class Signed:
    """A certificate in PEM, and what the store keeps of it."""

    pem: str
    row: Certificate


@frozen
class Authority:
    """The cluster's root with its key. Made by `create` or `load`."""

    papers: Papers
    certificate: x509.Certificate
    key: CertificateIssuerPrivateKeyTypes
    pem: bytes

    @property
    def fingerprint(self) -> str:
        """`sha256:` and hex: what a node that joins compares."""
        return certificates.fingerprint(self.pem)

    def sign_csr(self, csr: str, name: str, now: float) -> Signed:
        """A node's certificate for exactly `name`. Nothing of the request counts but its key. Raises CsrRefused."""
        public = _checked(csr, name)
        certificate = self._sign(
            _subject(name), public, [x509.DNSName(name)], x509.ExtendedKeyUsageOID.CLIENT_AUTH, now, NODE_S
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")
        details = certificates.details(pem.encode("ascii"))
        return Signed(pem, Certificate(name, details.serial, details.not_after, now))

    def keep_server(self, names: Collection[str], now: float, chosen: Collection[str] = ()) -> bool:
        """Make or renew the control plane's certificate where it is missing, of another root, not of its key, lacks one
        of `names` (hosts and addresses) or ends within `SERVER_DUE_S`; whether that was done. Its key stays, so that
        one file is replaced. `chosen` names are those the operator gave: they stand before `CONTROL_NAME`, stay for
        good, and nodes are told to call the first of them. Raises PkiFailed."""
        papers = self.papers
        known, due = self._server(now)
        if not due and set(known).issuperset((*names, *chosen)):
            return False
        ours = known.index(CONTROL_NAME) if CONTROL_NAME in known else 0
        first = dict.fromkeys((*chosen, *known[:ours]))
        rest = [each for each in dict.fromkeys((*names, *known[ours + 1 :])) if each not in first][:MOST_NAMES]
        try:
            key = _read_or_none(papers.server_key)
            if key is None:
                key = certificates.new_key()
                put(papers.server_key, key)
            public = certificates.load_key(key).public_key()
            certificate = self._sign(
                _subject(CONTROL_NAME),
                public,
                [_general_name(name) for name in (*first, CONTROL_NAME, *rest)],
                x509.ExtendedKeyUsageOID.SERVER_AUTH,
                now,
                SERVER_S,
            )
            put(papers.server, certificate.public_bytes(serialization.Encoding.PEM), PUBLIC)
        except BadPem as error:
            raise PkiFailed(f"{papers.server_key}: expected {error}; remove it, and a new one is made") from None
        except OSError as error:
            raise _unwritable(error, papers) from None
        return True

    def chosen_names(self, now: float) -> list[str]:
        """The hosts and addresses that the operator gave the control plane."""
        known, _ = self._server(now)
        return known[: known.index(CONTROL_NAME)] if CONTROL_NAME in known else []

    def _server(self, now: float) -> tuple[list[str], bool]:
        """Hosts and addresses in the control plane's certificate, and whether a new one is due."""
        papers = self.papers
        try:
            pem, key = _read_or_none(papers.server), _read_or_none(papers.server_key)
            if pem is None or not certificates.signed_by(pem, self.pem):
                return [], True
            server = certificates.load(pem)
            names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            whole = key is not None and certificates.belong(key, pem)
        except (BadPem, OSError, ValueError, x509.ExtensionNotFound):
            return [], True
        due = not whole or server.not_valid_after_utc.timestamp() - now < SERVER_DUE_S
        return [str(each.value) for each in names], due

    def _sign(
        self,
        subject: x509.Name,
        public: CertificatePublicKeyTypes,
        names: Sequence[x509.GeneralName],
        use: x509.ObjectIdentifier,
        now: float,
        length_s: float,
    ) -> x509.Certificate:
        end = min(now + length_s, self.certificate.not_valid_after_utc.timestamp())
        return (
            x509.CertificateBuilder(self.certificate.subject, subject, public, x509.random_serial_number())
            .not_valid_before(_moment(now - BACK_S))
            .not_valid_after(_moment(end))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.certificate.public_key()),  # type: ignore[arg-type]
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )


def create(papers: Papers, now: float) -> Authority:
    """A new root in a folder that has none. Raises PkiFailed."""
    for file in (papers.root_key, papers.root):
        if os.path.lexists(file):
            raise taken(papers, file)
    raw = certificates.new_key()
    key = certificates.load_key(raw)
    public = key.public_key()
    subject = _subject("appliance cluster root")
    certificate = (
        x509.CertificateBuilder(subject, subject, public, x509.random_serial_number())
        .not_valid_before(_moment(now - BACK_S))
        .not_valid_after(_moment(now + ROOT_S))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    try:
        make_folder(papers.folder)
        put(papers.root_key, raw)
        put(papers.root, pem, PUBLIC)
    except OSError as error:
        raise _unwritable(error, papers) from None
    return Authority(papers, certificate, key, pem)


def taken(papers: Papers, file: str) -> PkiFailed:
    """Why no root is made where `file` of one is there."""
    return PkiFailed(
        f"{file} is there already; nothing was changed. To begin anew, after which every node must join again, move"
        f" {papers.folder} away first"
    )


def load(papers: Papers, now: float) -> Authority:
    """The root that `create` made. Raises PkiFailed."""
    pem, raw = _read(papers.root), _read(papers.root_key)
    restore = "put the one from a backup there, or move the folder away, run 'ctl init' and let every node join again"
    try:
        certificate = certificates.load(pem)
    except BadPem as error:
        raise PkiFailed(f"{papers.root}: expected {error}; {restore}") from None
    try:
        key = certificates.load_key(raw)
    except BadPem as error:
        raise PkiFailed(f"{papers.root_key}: expected {error}; {restore}") from None
    if key.public_key() != certificate.public_key():
        raise PkiFailed(f"{papers.root_key}: expected the key of {papers.root}, got another one; {restore}")
    if certificate.not_valid_after_utc.timestamp() <= now:
        raise PkiFailed(
            f"{papers.root}: the cluster's root has expired on {certificate.not_valid_after_utc:%Y-%m-%d}; move the"
            " folder away, run 'ctl init' and let every node join again"
        )
    return Authority(papers, certificate, key, pem)


def _checked(csr: str, name: str) -> CertificatePublicKeyTypes:
    """The key of a request that asks for `name` and nothing else, and that its sender holds. Raises CsrRefused."""
    if len(csr) > CSR_BYTES:
        raise CsrRefused("invalid_csr", f"a signing request has at most {CSR_BYTES} bytes")
    try:
        request = x509.load_pem_x509_csr(csr.encode("utf-8", "replace"))
        good = request.is_signature_valid
        names = [str(each.value) for each in request.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
        names += _alternative_names(request)
        public = request.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise CsrRefused("invalid_csr", "expected a signing request in PEM") from None
    if not good:
        raise CsrRefused("invalid_csr", "the signing request is not signed with its own key")
    if not names or set(names) != {name}:
        asked = ", ".join(dict.fromkeys(names)) or "nobody"
        raise CsrRefused("name_mismatch", f"the signing request is for {asked[:200]}, and may only be for {name}")
    strong = isinstance(public, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey) or (
        isinstance(public, rsa.RSAPublicKey) and public.key_size >= 2048
    )
    if not strong:
        raise CsrRefused("invalid_csr", "expected a key on an elliptic curve, or RSA with at least 2048 bits")
    return public


def _alternative_names(request: x509.CertificateSigningRequest) -> list[str]:
    try:
        found = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(each.value) for each in found]


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _key_usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in (*_KEY_USE, *_KEY_USE_CA)})


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _read(file: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except FileNotFoundError:
        raise PkiFailed(f"{file} is missing: put the one from a backup there, or run 'ctl init'") from None
    except OSError as error:
        raise PkiFailed(f"{file} cannot be read: {error.strerror}; give it to the user of 'appliance serve'") from None


def _read_or_none(file: str) -> bytes | None:
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except FileNotFoundError:
        return None


def _unwritable(error: OSError, papers: Papers) -> PkiFailed:
    return PkiFailed(
        f"{papers.folder} cannot be written: {error.strerror}; run this as the user of 'appliance serve', and look"
        " whether the disk is full"
    )

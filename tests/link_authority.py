"""A cluster's root and what it signs, for tests of the link: made in memory, as long or as short lived as asked for."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NOW = datetime.datetime(2024, 1, 1)
DAY = datetime.timedelta(days=1)


@attrs.frozen
class Signed:
    """A certificate and its key in PEM files. `serial` as the control plane writes it."""

    cert: Path
    key: Path
    serial: str


class Authority:
    """`Authority(folder)` is a root; `sign` gives certificates for nodes and for the control plane."""

    def __init__(self, folder: Path, name: str = "root") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        cert = (
            x509.CertificateBuilder(self._name, self._name, self._key.public_key(), 1, NOW, NOW + 36500 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.cert = folder / f"{name}.pem"
        self.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, expired: bool = False) -> Signed:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        end = NOW + DAY if expired else NOW + 36000 * DAY
        serial = x509.random_serial_number()
        cert = (
            x509.CertificateBuilder(self._name, subject, key.public_key(), serial, NOW, end)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        made = Signed(
            self.folder / f"{name}-{serial % 10000}.pem", self.folder / f"{name}-{serial % 10000}.key", f"{serial:x}"
        )
        made.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        made.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return made

    def server(self, *, clients: bool = True) -> ssl.SSLContext:
        """For the control plane: a certificate of clients is asked for, not demanded, and must be from this root."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        mine = self.sign("control")
        context.load_cert_chain(mine.cert, mine.key)
        if clients:
            context.load_verify_locations(self.cert)
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def client(self, own: Signed | None = None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.cert)
        if own is not None:
            context.load_cert_chain(own.cert, own.key)
        return context

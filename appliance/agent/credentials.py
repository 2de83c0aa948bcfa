"""What this node shows the control plane: the certificate that `agent join` brought, and its key.

The files (`store/papers.py` says where) are read anew for each connection, so whatever is put there counts from the
next one on. All methods block on the disk, and the first call loads what reads certificates: they belong in a thread.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

import attrs

from appliance.store.papers import PUBLIC, Papers, put
from appliance.wire.tls import link_client_context

RENEW_SHARE = 1 / 3
"""Of a certificate's life: with less than that left it is renewed, early enough for a control plane that is away."""

JOIN = "run 'appliance ctl node add NODE' on the control plane, and the line it prints here"


class NoCertificate(Exception):
    """There is none that could be shown; the text says why, and what to do."""


@attrs.frozen
class Certificate:
    """Our certificate. Times are seconds since 1970; `serial` is hexadecimal, `root` the fingerprint of the root that
    is believed here, `signed` whether that root signed ours."""

    name: str
    serial: str
    begins: float
    ends: float
    root: str
    signed: bool = True

    def __str__(self) -> str:
        until = datetime.fromtimestamp(self.ends, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        by = "of" if self.signed else "not of"
        return f"{self.name}, serial {self.serial}, good until {until}, {by} the root {self.root}"

    def renew_at(self) -> float:
        """When it is time for another one."""
        return self.ends - (self.ends - self.begins) * RENEW_SHARE


class Credentials:
    """The papers of one state directory."""

    def __init__(self, papers: Papers) -> None:
        self._papers = papers

    def read(self) -> Certificate:
        """What is there now. Raises NoCertificate."""
        from appliance.wire import certificates

        papers = self._papers
        ours, root = _content(papers.node), _content(papers.root)
        try:
            found = certificates.details(ours)
        except certificates.BadPem as wrong:
            raise NoCertificate(f"{papers.node}: expected {wrong}; {JOIN}") from None
        try:
            fingerprint, signed = certificates.fingerprint(root), certificates.signed_by(ours, root)
        except certificates.BadPem as wrong:
            raise NoCertificate(f"{papers.root}: expected {wrong}; {JOIN}") from None
        return Certificate(found.name, found.serial, found.not_before, found.not_after, fingerprint, signed)

    def context(self) -> ssl.SSLContext:
        """For a connection that shows them. Raises NoCertificate."""
        papers = self._papers
        for path in (papers.node, papers.node_key, papers.root):
            _content(path)  # ssl does not say which file is missing
        try:
            return link_client_context(papers.node, papers.node_key, papers.root)
        except (OSError, ssl.SSLError) as error:
            why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            what = f"{papers.node}, {papers.node_key} and {papers.root} cannot be used together"
            raise NoCertificate(f"{what} ({why}); {JOIN}") from None

    def request(self) -> str:
        """A signing request for our name, in PEM. The key stays: another one would have to be put in place together
        with its certificate, and a crash between the two would leave a node that nobody believes. Raises
        NoCertificate."""
        from appliance.wire import certificates

        key = _content(self._papers.node_key)
        try:
            return certificates.signing_request(key, self.read().name)
        except certificates.BadPem as wrong:
            raise NoCertificate(f"{self._papers.node_key}: expected {wrong}; {JOIN}") from None

    def renew(self, pem: str) -> Certificate:
        """Put another certificate in the place of ours. Raises NoCertificate for one that would not do; ours stays."""
        from appliance.wire import certificates

        before, new, papers = self.read(), pem.encode("utf-8", "replace"), self._papers
        try:
            found = certificates.details(new)
            if found.name != before.name:
                raise NoCertificate(f"what came is for {found.name}, and this is {before.name}")
            if not certificates.belong(_content(papers.node_key), new):
                raise NoCertificate("what came is for another key")
            if not certificates.signed_by(new, _content(papers.root)):
                raise NoCertificate("what came is not signed by the root that is believed here")
        except certificates.BadPem as wrong:
            raise NoCertificate(f"what came is not {wrong}") from None
        if found.not_after <= before.ends:
            raise NoCertificate("what came ends no later than the one that is here")
        try:
            put(papers.node, new, PUBLIC)
        except OSError as error:
            raise NoCertificate(f"{papers.node} cannot be written: {error.strerror}") from None
        return self.read()


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise NoCertificate(f"there is no {path}; {JOIN}") from None
    except OSError as error:
        raise NoCertificate(f"{path} cannot be read: {error.strerror}") from None

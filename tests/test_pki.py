"""The cluster's root and what it signs: who is let in on either end of a link, and what is told to the others."""

from __future__ import annotations

import datetime
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from appliance.control import pki
from appliance.control.pki import DAY_S, CsrRefused, PkiFailed
from appliance.store.papers import Papers, put
from appliance.wire import certificates
from appliance.wire.handshake import Holder, handshake_fault, holder
from appliance.wire.tls import CONTROL_NAME, FreshContext, link_client_context, link_server_context

NOW = time.time()


def made(folder: Path, now: float = NOW) -> pki.Authority:
    authority = pki.create(Papers.of(str(folder)), now)
    authority.keep_server(["box", "10.0.0.1"], now)
    return authority


def node(folder: Path, authority: pki.Authority, name: str = "node-a", now: float = NOW) -> Papers:
    """A node's folder, as 'agent join' leaves it."""
    papers = Papers(str(folder / name))
    os.makedirs(papers.folder)
    put(papers.node_key, key := certificates.new_key())
    put(papers.node, authority.sign_csr(certificates.signing_request(key, name), name, now).pem.encode())
    put(papers.root, authority.pem)
    return papers


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> pki.Authority:
    return made(tmp_path_factory.mktemp("control"))


def test_the_root_signs_ends_of_links_and_no_further_roots(authority: pki.Authority) -> None:
    root = authority.certificate
    basic = root.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.value.ca, basic.value.path_length, basic.critical) == (True, 0, True)
    assert isinstance(root.public_key(), ec.EllipticCurvePublicKey)
    assert root.not_valid_after_utc.timestamp() - NOW == pytest.approx(3650 * DAY_S, abs=2)
    assert certificates.is_fingerprint(authority.fingerprint)
    assert os.stat(authority.papers.root_key).st_mode & 0o777 == 0o600
    assert os.stat(authority.papers.server_key).st_mode & 0o777 == 0o600
    assert sorted(os.listdir(authority.papers.folder)) == ["root.key", "root.pem", "server.key", "server.pem"]


def test_what_was_made_is_loaded_again_and_never_made_over(tmp_path: Path) -> None:
    first = made(tmp_path)
    assert pki.load(first.papers, NOW).fingerprint == first.fingerprint
    before = {name: (Path(first.papers.folder) / name).read_bytes() for name in os.listdir(first.papers.folder)}
    with pytest.raises(PkiFailed, match=r"root\.key is there already; nothing was changed"):
        pki.create(first.papers, NOW)
    os.unlink(first.papers.root_key)
    with pytest.raises(PkiFailed, match=r"root\.pem is there already"):
        pki.create(first.papers, NOW)
    put(first.papers.root_key, before["root.key"])
    assert before == {name: (Path(first.papers.folder) / name).read_bytes() for name in before}


def test_a_nodes_certificate_is_for_its_name_and_for_calling_only(authority: pki.Authority) -> None:
    key = certificates.new_key()
    signed = authority.sign_csr(certificates.signing_request(key, "node-a"), "node-a", NOW)
    certificate = certificates.load(signed.pem.encode())
    assert certificates.signed_by(signed.pem.encode(), authority.pem)
    assert certificates.belong(key, signed.pem.encode())
    value = certificate.extensions.get_extension_for_class
    assert value(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName) == ["node-a"]
    assert list(value(x509.ExtendedKeyUsage).value) == [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not value(x509.BasicConstraints).value.ca
    assert certificate.not_valid_before_utc.timestamp() == pytest.approx(NOW - DAY_S, abs=2)
    details = certificates.details(signed.pem.encode())
    assert (details.name, details.serial, details.not_after) == ("node-a", signed.row.serial, signed.row.not_after)
    assert signed.row.not_after == pytest.approx(NOW + 90 * DAY_S, abs=2)
    assert (signed.row.node, signed.row.issued_at) == ("node-a", NOW)


def test_nothing_outlives_the_root(authority: pki.Authority) -> None:
    late = NOW + 3640 * DAY_S
    signed = authority.sign_csr(certificates.signing_request(certificates.new_key(), "a"), "a", late)
    assert signed.row.not_after == authority.certificate.not_valid_after_utc.timestamp()


def request(*names: str, also: tuple[str, ...] = (), key: object = None, key_usage: bool = False) -> str:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name) for name in names])
    builder = x509.CertificateSigningRequestBuilder(subject)
    if also:
        builder = builder.add_extension(x509.SubjectAlternativeName(map(x509.DNSName, also)), critical=False)
    if key_usage:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    signer = key or ec.generate_private_key(ec.SECP256R1())
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()  # type: ignore[arg-type]


def forged() -> str:
    """A request with somebody else's key in it: its signature is not by that key."""
    theirs = request("node-a")
    mine = x509.load_pem_x509_csr(theirs.encode()).public_bytes(serialization.Encoding.DER)
    cut = bytearray(mine)
    cut[-3] ^= 0x01
    return x509.load_der_x509_csr(bytes(cut)).public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize(
    ("csr", "code", "told"),
    [
        (lambda: request("node-b"), "name_mismatch", "is for node-b, and may only be for node-a"),
        (lambda: request("node-a", also=("node-a", "control.appliance")), "name_mismatch", "control.appliance"),
        (lambda: request("node-a", "node-b"), "name_mismatch", "node-b"),
        (lambda: request(), "name_mismatch", "is for nobody"),
        (lambda: "hello", "invalid_csr", "expected a signing request in PEM"),
        (lambda: "", "invalid_csr", "expected a signing request in PEM"),
        (lambda: "ü\ud800", "invalid_csr", "expected a signing request in PEM"),
        (lambda: "x" * 9000, "invalid_csr", "at most 8192 bytes"),
        (forged, "invalid_csr", "not signed with its own key"),
        (lambda: request("node-a", key=rsa.generate_private_key(65537, 1024)), "invalid_csr", "2048 bits"),
    ],
)
def test_a_request_that_is_wrong_is_not_signed(
    authority: pki.Authority, csr: Callable[[], str], code: str, told: str
) -> None:
    with pytest.raises(CsrRefused, match=told) as refused:
        authority.sign_csr(csr(), "node-a", NOW)
    assert refused.value.code == code


def test_a_request_for_more_rights_gets_those_of_a_node(authority: pki.Authority) -> None:
    signed = authority.sign_csr(request("node-a", key_usage=True), "node-a", NOW)
    certificate = certificates.load(signed.pem.encode())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_servers_certificate_is_made_anew_when_it_must_be_and_only_then(tmp_path: Path) -> None:
    authority = made(tmp_path)
    papers = authority.papers
    key = Path(papers.server_key).read_bytes()

    def names() -> list[str]:
        found = certificates.load(Path(papers.server).read_bytes())
        return [str(each.value) for each in found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]

    assert names() == [CONTROL_NAME, "box", "10.0.0.1"]
    assert not authority.keep_server(["10.0.0.1"], NOW)
    assert not authority.keep_server(["box"], NOW + 270 * DAY_S)
    assert authority.keep_server(["10.0.0.2"], NOW)
    assert names() == [CONTROL_NAME, "10.0.0.2", "box", "10.0.0.1"]
    assert authority.keep_server(["10.0.0.2"], NOW, ["box.example.org", "box"])
    assert names() == ["box.example.org", "box", CONTROL_NAME, "10.0.0.2", "10.0.0.1"]
    assert authority.keep_server([f"10.0.1.{number}" for number in range(40)], NOW)
    assert len(names()) == 2 + 1 + pki.MOST_NAMES
    assert authority.keep_server(["10.0.0.3"], NOW + 280 * DAY_S)
    assert names()[:4] == ["box.example.org", "box", CONTROL_NAME, "10.0.0.3"]
    assert authority.chosen_names(NOW) == ["box.example.org", "box"]
    assert Path(papers.server_key).read_bytes() == key
    os.unlink(papers.server_key)
    assert authority.keep_server(["box"], NOW)
    assert certificates.belong(Path(papers.server_key).read_bytes(), Path(papers.server).read_bytes())
    Path(papers.server).write_text("damaged")
    assert authority.keep_server(["box"], NOW)
    (tmp_path / "other").mkdir()
    other = made(tmp_path / "other")
    Path(papers.server).write_bytes(Path(other.papers.server).read_bytes())
    assert authority.keep_server(["box"], NOW)
    assert certificates.signed_by(Path(papers.server).read_bytes(), authority.pem)


def test_a_servers_key_that_is_damaged_is_named(tmp_path: Path) -> None:
    authority = made(tmp_path)
    Path(authority.papers.server_key).write_text("damaged")
    with pytest.raises(PkiFailed, match=r"server\.key: expected a private key in PEM.*; remove it"):
        authority.keep_server(["box"], NOW)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda papers: os.unlink(papers.root), r"root\.pem is missing: .*'ctl init'"),
        (lambda papers: os.unlink(papers.root_key), r"root\.key is missing: put the one from a backup there"),
        (lambda papers: put(papers.root, b"rubbish"), r"root\.pem: expected one certificate in PEM; put the one"),
        (lambda papers: put(papers.root_key, b"rubbish"), r"root\.key: expected a private key in PEM"),
        (lambda papers: put(papers.root_key, certificates.new_key()), r"root\.key: expected the key of .*root\.pem"),
        (lambda papers: (os.unlink(papers.root), os.mkdir(papers.root)), r"root\.pem cannot be read: Is a directory"),
    ],
)
def test_a_root_that_cannot_be_used_names_its_file_and_what_to_do(
    tmp_path: Path, damage: Callable[[Papers], None], told: str
) -> None:
    papers = made(tmp_path).papers
    damage(papers)
    with pytest.raises(PkiFailed, match=told) as failed:
        pki.load(papers, NOW)
    assert "\n" not in str(failed.value)


def test_a_root_that_has_ended_says_when(tmp_path: Path) -> None:
    with pytest.raises(PkiFailed, match=r"has expired on 20\d\d-\d\d-\d\d; move the folder away, run 'ctl init'"):
        pki.load(made(tmp_path).papers, NOW + 3651 * DAY_S)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "pki").write_text("in the way")
    with pytest.raises(PkiFailed, match=r"pki cannot be written: Not a directory"):
        pki.create(Papers.of(str(tmp_path)), NOW)


# -- handshakes --------------------------------------------------------------------------------------------------------


@attrs.define
class Met:
    """What came of a handshake in memory: who the server saw, or what each side was told."""

    seen: Holder | None = None
    server: str = ""
    client: str = ""


def meet(server: ssl.SSLContext, client: ssl.SSLContext, name: str = CONTROL_NAME) -> Met:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        "server": server.wrap_bio(to_server, to_client, server_side=True),
        "client": client.wrap_bio(to_client, to_server, server_hostname=name),
    }
    steps = {side: [end.do_handshake, lambda end=end: end.read(1)] for side, end in ends.items()}
    met = Met()
    for _ in range(8):
        for side, todo in steps.items():
            while todo:
                try:
                    todo[0]()
                except ssl.SSLWantReadError:
                    break
                except ssl.SSLError as error:
                    setattr(met, side, handshake_fault(error))
                    todo.clear()
                else:
                    todo.pop(0)
    if not met.server:
        met.seen = holder(ends["server"].getpeercert())
    return met


def serving(authority: pki.Authority) -> ssl.SSLContext:
    papers = authority.papers
    return link_server_context(papers.server, papers.server_key, papers.root)


def calling(papers: Papers) -> ssl.SSLContext:
    return link_client_context(papers.node, papers.node_key, papers.root)


def test_a_node_is_let_in_under_its_name_and_serial(authority: pki.Authority, tmp_path: Path) -> None:
    papers = node(tmp_path, authority)
    details = certificates.details(Path(papers.node).read_bytes())
    assert meet(serving(authority), calling(papers)) == Met(Holder("node-a", details.serial, details.not_after))


def test_who_has_no_certificate_yet_may_ask_to_join(authority: pki.Authority) -> None:
    client = ssl.create_default_context(cafile=authority.papers.root)
    assert meet(serving(authority), client) == Met()
    assert meet(serving(authority), client, "box") == Met()
    assert "another name" in meet(serving(authority), client, "elsewhere").client


def test_an_expired_certificate_is_named_as_that_on_both_sides(authority: pki.Authority, tmp_path: Path) -> None:
    met = meet(serving(authority), calling(node(tmp_path, authority, now=NOW - 100 * DAY_S)))
    assert met.server == (
        "the certificate of the other side was not accepted: it has expired, or the clock of one of the two machines"
        " is off"
    )
    assert met.client == "the other side says that our certificate has expired, or one of the two clocks is off"


def test_a_certificate_from_the_future_names_the_clock(authority: pki.Authority, tmp_path: Path) -> None:
    met = meet(serving(authority), calling(node(tmp_path, authority, now=NOW + 3 * DAY_S)))
    assert "not valid yet: the clock" in met.server
    assert "not valid yet" in met.client


def test_a_foreign_root_is_named_by_who_finds_it(authority: pki.Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = made(tmp_path / "other")
    theirs = node(tmp_path / "other", other)
    # an agent of another cluster does not take this control plane
    met = meet(serving(authority), calling(theirs))
    assert "was not signed by this cluster's root" in met.client or "signature is wrong" in met.client
    # one that does, because it was given the right root, shows a certificate of the wrong one
    put(theirs.root, authority.pem)
    met = meet(serving(authority), calling(theirs))
    assert "was not signed by this cluster's root" in met.server or "signature is wrong" in met.server
    assert met.client.startswith("the other side says that our certificate")


def test_a_node_cannot_pose_as_the_control_plane_nor_it_as_a_node(authority: pki.Authority, tmp_path: Path) -> None:
    papers = node(tmp_path, authority, CONTROL_NAME)
    posing = link_server_context(papers.node, papers.node_key, papers.root)
    client = ssl.create_default_context(cafile=authority.papers.root)
    assert "not meant for this end" in meet(posing, client).client
    own = authority.papers
    assert (
        "not meant for this end"
        in meet(serving(authority), link_client_context(own.server, own.server_key, own.root)).server
    )


def test_a_system_root_does_not_make_a_control_plane(authority: pki.Authority, tmp_path: Path) -> None:
    context = calling(node(tmp_path, authority))
    assert [found["subject"] for found in context.get_ca_certs()] == [((("commonName", "appliance cluster root"),),)]


def test_a_renewed_certificate_serves_the_next_handshake(tmp_path: Path) -> None:
    authority = made(tmp_path)
    papers = authority.papers
    fresh = FreshContext(link_server_context, papers.server, papers.server_key, papers.root)
    first = fresh.get()
    assert fresh.get() is first
    before = Path(papers.server).read_bytes()
    put(papers.server, b"half a")
    assert fresh.get() is first
    put(papers.server, before)
    assert authority.keep_server(["renewed"], NOW)
    assert fresh.get() is not first
    client = ssl.create_default_context(cafile=papers.root)
    assert meet(fresh.get(), client, "renewed") == Met()
    assert "another name" in meet(first, client, "renewed").client


def test_a_fault_is_told_through_what_wraps_it() -> None:
    inner = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required")
    inner.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    outer = RuntimeError("broken")
    outer.__cause__ = inner
    assert handshake_fault(outer) == "the other side wants a certificate, and we showed none"
    assert handshake_fault(ConnectionResetError(104, "Connection reset by peer")).endswith("Connection reset by peer")
    assert handshake_fault(TimeoutError()) == "TimeoutError"


def test_a_certificate_without_one_name_is_nobodys() -> None:
    shown = {
        "subject": ((("commonName", "a"),), (("commonName", "b"),)),
        "serialNumber": "0ABC",
        "notAfter": "Jan  5 09:34:43 2030 GMT",
    }
    assert holder(shown) == Holder("", "abc", datetime.datetime(2030, 1, 5, 9, 34, 43, tzinfo=datetime.UTC).timestamp())
    assert holder({}) is None
    assert holder(None) is None

"""How a machine becomes a node: an operator makes a token for a name, and the machine changes it for a certificate.

Over the port that agents call, without a client's certificate:

    GET  /root                       the cluster's root certificate in PEM; everybody may know it
    POST /join {token, name, csr}    {certificate, root}, both in PEM, or {"error": {code, message, ...}}

A token is good once, for an hour, for one name. Only its digest is kept, so whoever reads the database cannot join. The
certificate is noted in the transaction that uses the token up: one that nobody noted does not exist.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec
import structlog
import trio
from attrs import field, frozen

from ..facts.address import Address
from ..facts.errors import Refusal
from ..facts.link import Renewed
from ..store.failed import StoreFailed
from ..store.rows import Certificate, JoinToken
from ..store.store import Store
from ..wire.certificates import NAME
from ..wire.tls import CONTROL_NAME
from . import whereabouts
from .guesses import Guesses
from .pki import Authority, CsrRefused, PkiFailed

TOKEN_S = 3600.0
TOKEN_BYTES = 20
BODY_BYTES = 16384
"""Most that a request to join may have: a signing request of RSA keys has 2 KB."""

CARE_S = 86400.0
"""How often the control plane's own certificate is looked at."""

PORT = 6384

log = structlog.get_logger("control")


@frozen
class Answer:
    """What goes back over HTTP."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Ask(msgspec.Struct):
    """The body of POST /join."""

    token: str
    name: str
    csr: str


@frozen
class Invitation:
    """A token that was made: what to run on the node, until when (seconds since 1970)."""

    node: str
    command: str = field(repr=False)
    expires_at: float
    known: bool
    """Whether the name has a good certificate already, so that this replaces a machine."""


class Joining:
    """Tokens and certificates of nodes. `listen` is where agents call; whoever opens port 0 sets it anew.

    `clock` gives seconds since 1970, `steady` seconds that never go back.
    """

    def __init__(
        self,
        store: Store,
        authority: Authority,
        listen: Sequence[Address],
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.authority = authority
        self.listen = tuple(listen)
        self._store = store
        self._clock = clock
        self._steady = steady
        self._guesses = Guesses()

    # -- over the port that agents call --------------------------------------------------------------------------------

    async def answer(self, method: str, path: str, body: bytes, peer: str) -> Answer:
        """The answer to a request without a client's certificate. `peer` is the address it came from. Never raises."""
        try:
            match method, path.partition("?")[0]:
                case (("GET" | "HEAD"), "/root"):
                    return Answer(200, "application/x-pem-file", self.authority.pem)
                case "POST", "/join":
                    return _json(200, await self._join(body, peer))
                case _, "/root" | "/join" as known:
                    allowed = "POST" if known == "/join" else "GET, HEAD"
                    raise Refusal(405, "method_not_allowed", f"{known} takes {allowed}", headers=(("Allow", allowed),))
                case _:
                    raise Refusal(404, "not_found", "agents call /link here; /join and /root are for those who join")
        except Refusal as refusal:
            headers = list(refusal.headers)
            if refusal.retry_after_s is not None:
                headers.append(("Retry-After", f"{max(1, round(refusal.retry_after_s))}"))
            return _json(refusal.status, _document(refusal), tuple(headers))

    async def _join(self, body: bytes, peer: str) -> dict[str, str]:
        if wait_s := self._guesses.wait_s(peer, self._steady()):
            raise Refusal(
                429, "too_many_tries", f"too many wrong tokens from {peer}; try again later", retry_after_s=wait_s
            )
        if len(body) > BODY_BYTES:
            raise Refusal(413, "too_large", f"a request to join has at most {BODY_BYTES} bytes")
        try:
            asked = msgspec.json.decode(body, type=Ask)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise Refusal(400, "invalid_request", 'expected JSON: {"token": ..., "name": ..., "csr": ...}') from None
        now = self._clock()
        digest = _digest(asked.token)
        try:
            self._check(await self._store.token(digest), asked.name, peer, now)
            signed = self.authority.sign_csr(asked.csr, asked.name, now)
            if not await self._store.redeem(digest, signed.row, by=f"machine at {peer}"):
                raise Refusal(403, "token_used", f"this join token was used just now; {_again(asked.name)}")
        except CsrRefused as refused:
            raise Refusal(400, refused.code, str(refused)) from None
        except StoreFailed as failed:
            log.error("cannot let a node join", node=asked.name, peer=peer, reason=str(failed))
            raise Refusal(
                503, "store_unavailable", "the control plane cannot use its database; look at its log", retry_after_s=5
            ) from None
        log.info("node joined", node=asked.name, peer=peer, serial=signed.row.serial)
        return {"certificate": signed.pem, "root": self.authority.pem.decode("ascii")}

    def _check(self, token: JoinToken | None, name: str, peer: str, now: float) -> None:
        """Raises Refusal. More than "wrong" is told to those alone who hold a token of ours."""
        if token is None:
            self._guesses.wrong(peer, self._steady())
            log.warning("a machine wanted to join with a token that nobody made", peer=peer)
            raise Refusal(
                403,
                "token_invalid",
                "this is no join token of this control plane: run 'appliance ctl node add' there, and the line that it"
                " prints here",
            )
        if token.used_at is not None:
            raise Refusal(403, "token_used", f"this join token was used or taken back; {_again(token.node)}")
        if token.expires_at <= now:
            raise Refusal(403, "token_expired", f"this join token has expired; {_again(token.node)}")
        if token.node != name:
            raise Refusal(
                403,
                "name_mismatch",
                f"this join token is for {token.node}, not for {name[:100]}: join with --name {token.node}",
            )

    # -- over a link ---------------------------------------------------------------------------------------------------

    async def renew(self, node: str, csr: str) -> Renewed:
        """A new certificate for a node whose present one was verified and not revoked. Never raises."""
        try:
            signed = self.authority.sign_csr(csr, node, self._clock())
            if not await self._store.renew_certificate(signed.row, by=node):
                return Renewed(reason=f"{node} has no certificate that is good and was given by this control plane")
        except CsrRefused as refused:
            return Renewed(reason=str(refused))
        except StoreFailed as failed:
            log.error("cannot renew a node's certificate", node=node, reason=str(failed))
            return Renewed(reason="the control plane cannot use its database; its log says more")
        log.info("node's certificate renewed", node=node, serial=signed.row.serial)
        return Renewed(signed.pem)

    # -- for operators -------------------------------------------------------------------------------------------------

    async def add(self, node: str, by: str, host: str = "") -> Invitation:
        """Make a token for `node`. `host` is what the node should call; "" leaves that to us. Raises Refusal,
        StoreFailed."""
        if not NAME.fullmatch(node) or node.lower() == CONTROL_NAME:
            raise Refusal(
                400, "bad_name", f"{node[:100]}: expected at most 63 letters, digits and . _ -, a letter or digit first"
            )
        host = host.removeprefix("[").removesuffix("]")
        if host and not whereabouts.is_host(host):
            raise Refusal(400, "bad_host", f"--host {host[:100]}: expected a host name or an address, without a port")
        now = self._clock()
        host = host or await self._host(now)
        token = secrets.token_hex(TOKEN_BYTES)
        earlier = await self._store.certificates(node)
        known = any(each.good(now) for each in earlier)
        await self._store.add_token(JoinToken(_digest(token), node, now + TOKEN_S), by, now)
        port = self.listen[0].port if self.listen else PORT
        command = (
            f"appliance agent join --control {whereabouts.control_url(host, port)} --name {node} --token {token}"
            f" --root {self.authority.fingerprint}{' --replace' if earlier else ''}"
        )
        log.info("node may join", node=node, by=by, for_s=round(TOKEN_S))
        return Invitation(node, command, now + TOKEN_S, known)

    async def nodes(self) -> list[dict[str, Any]]:
        """Every name that has a certificate or an open token: what stands in `ctl node list`. Raises StoreFailed."""
        now = self._clock()
        newest: dict[str, Certificate] = {each.node: each for each in await self._store.certificates()}
        open_until = {token.node: token.expires_at for token in await self._store.tokens(now)}
        return [_node(name, newest.get(name), open_until.get(name), now) for name in sorted({*newest, *open_until})]

    async def revoke(self, node: str, by: str) -> list[str]:
        """Take back every certificate of `node` and its open tokens; serials of the certificates that were good until
        now. Ending its link is the caller's. Raises Refusal, StoreFailed."""
        now = self._clock()
        known = {document["name"]: document["state"] for document in await self.nodes()}
        if node not in known:
            some = ", ".join(list(known)[:20]) or "nobody"
            raise Refusal(
                404, "node_not_found", f"no certificate was given to {node[:100]}; those who have one: {some}"
            )
        revoked = await self._store.revoke(node, by, now)
        log.info("node revoked", node=node, by=by, certificates=len(revoked))
        return [each.serial for each in revoked if now < each.not_after]

    async def _host(self, now: float) -> str:
        chosen = self.authority.chosen_names(now)
        return chosen[0] if chosen else await trio.to_thread.run_sync(whereabouts.best, self.listen)

    async def keep_certificate(self) -> NoReturn:
        """Renew the control plane's own certificate before it ends, for as long as this runs."""
        while True:
            await trio.sleep(CARE_S)
            await self.renew_own()

    async def renew_own(self) -> bool:
        """Whether it was due and is made. A failure is logged, and tried again on the next day: there are ninety."""
        names = whereabouts.names(self.listen)
        try:
            made = await trio.to_thread.run_sync(self.authority.keep_server, names, self._clock())
        except (PkiFailed, RuntimeError) as failed:  # the latter where there is no further thread
            log.error("cannot renew the control plane's certificate", reason=str(failed))
            return False
        if made:
            log.info("control plane's certificate made", names=",".join(names))
        return made


def _node(name: str, certificate: Certificate | None, open_until: float | None, now: float) -> dict[str, Any]:
    if certificate is None:
        state = "invited"
    elif certificate.revoked_at is not None:
        state = "revoked"
    else:
        state = "joined" if certificate.good(now) else "expired"
    return {
        "name": name,
        "state": state,
        "serial": certificate.serial if certificate else None,
        "issued_at": certificate.issued_at if certificate else None,
        "not_after": certificate.not_after if certificate else None,
        "revoked_at": certificate.revoked_at if certificate else None,
        "token_expires_at": open_until,
    }


def _again(node: str) -> str:
    return f"run 'appliance ctl node add {node}' on the control plane for another one"


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _document(refusal: Refusal) -> dict[str, Any]:
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}}


def _json(status: int, document: dict[str, Any], headers: tuple[tuple[str, str], ...] = ()) -> Answer:
    return Answer(status, "application/json", msgspec.json.encode(document), headers)

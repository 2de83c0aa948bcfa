"""The tables, as methods. Each that changes something is one transaction, with its line in the audit.

`at` and `now` are seconds since 1970. `by` is who did it, as the admin socket knows them. All raise StoreFailed.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator

from .database import LOCKED_S, Database, location, opened
from .failed import explain
from .rows import Certificate, Cordon, Entry, JoinToken

DEAD_TOKENS_S = 30 * 86400.0
"""How long a token that is used or over is remembered, so that its second use is told from a wrong one."""


@contextlib.asynccontextmanager
async def open_store(url: str, state_dir: str, locked_s: float = LOCKED_S) -> AsyncIterator[Store]:
    """The database that `store.url` names, made if there is none. The state folder is made too, other folders are not.

    Raises StoreFailed where it cannot be used.
    """
    path = location(url, state_dir)
    try:
        os.makedirs(state_dir, mode=0o750, exist_ok=True)
    except OSError as error:
        raise explain(path, error) from None
    async with opened(path, locked_s) as database:
        yield Store(database)


class Store:
    """What operators decided. Made by `open_store`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.path = database.path

    # -- cordons -------------------------------------------------------------------------------------------------------

    async def cordons(self) -> dict[str, Cordon]:
        """By node."""

        def look(connection: sqlite3.Connection) -> dict[str, Cordon]:
            rows = connection.execute("SELECT node, at, by, drained_at FROM cordons ORDER BY node")
            return {row[0]: Cordon(*row) for row in rows}

        return await self._database.read(look)

    async def cordon(self, node: str, by: str, at: float) -> bool:
        """Let nothing new go to `node`. False: it was cordoned before, by whoever it says; that is not changed."""
        return await self._database.write(lambda connection: _cordon(connection, node, by, at, ""))

    async def drain(self, node: str, by: str, at: float) -> bool:
        """Cordon `node`, and have what runs there go elsewhere from now on. False: that was so before, and since when
        is not changed."""

        def work(connection: sqlite3.Connection) -> bool:
            _cordon(connection, node, by, at, "to drain it")
            begun = connection.execute(
                "UPDATE cordons SET drained_at = ?2 WHERE node = ?1 AND drained_at IS NULL", (node, at)
            ).rowcount
            if begun:
                _note(connection, by, "drain", node, "", at)
            return begun > 0

        return await self._database.write(work)

    async def uncordon(self, node: str, by: str, at: float) -> bool:
        """Take a cordon back, and with it a drain. False: there was none."""

        def work(connection: sqlite3.Connection) -> bool:
            gone = connection.execute("DELETE FROM cordons WHERE node = ?", (node,)).rowcount > 0
            if gone:
                _note(connection, by, "uncordon", node, "", at)
            return gone

        return await self._database.write(work)

    # -- certificates --------------------------------------------------------------------------------------------------

    async def certificates(self, node: str | None = None) -> tuple[Certificate, ...]:
        """Those of one node, or all, by node and oldest first."""

        def look(connection: sqlite3.Connection) -> tuple[Certificate, ...]:
            rows = connection.execute(
                "SELECT node, serial, not_after, issued_at, revoked_at FROM certificates"
                " WHERE ?1 IS NULL OR node = ?1 ORDER BY node, issued_at, rowid",
                (node,),
            )
            return tuple(Certificate(*row) for row in rows)

        return await self._database.read(look)

    async def renew_certificate(self, certificate: Certificate, by: str) -> bool:
        """Note another certificate for a node that has a good one at `issued_at`. False: it has none any more, because
        the node was thrown out meanwhile. Certificates of the node that are over are dropped."""

        def work(connection: sqlite3.Connection) -> bool:
            good = connection.execute(
                "SELECT 1 FROM certificates WHERE node = ? AND revoked_at IS NULL AND not_after > ?",
                (certificate.node, certificate.issued_at),
            ).fetchone()
            if good is None:
                return False
            _keep(connection, certificate)
            detail = f"serial {certificate.serial}"
            _note(connection, by, "renew certificate", certificate.node, detail, certificate.issued_at)
            return True

        return await self._database.write(work)

    async def revoke(self, node: str, by: str, at: float) -> tuple[Certificate, ...]:
        """Revoke every certificate of `node` and its open join tokens; those certificates that were good until now. A
        cordon goes with certificates: a machine that joins under the name later is another one."""

        def work(connection: sqlite3.Connection) -> tuple[Certificate, ...]:
            rows = connection.execute(
                "UPDATE certificates SET revoked_at = ?2 WHERE node = ?1 AND revoked_at IS NULL"
                " RETURNING node, serial, not_after, issued_at, revoked_at",
                (node, at),
            ).fetchall()
            void = connection.execute(
                "UPDATE join_tokens SET used_at = ?2 WHERE node = ?1 AND used_at IS NULL", (node, at)
            ).rowcount
            forgets = "DELETE FROM cordons WHERE node = ?"
            cordoned = connection.execute(forgets, (node,)).rowcount if rows else 0
            revoked = tuple(Certificate(*row) for row in rows)
            if revoked or void or cordoned:
                taken = [f"serial {each.serial}" for each in revoked] + ["an open join token"] * bool(void)
                taken += ["its cordon"] * bool(cordoned)
                _note(connection, by, "revoke node", node, ", ".join(taken), at)
            return revoked

        return await self._database.write(work)

    # -- join tokens ---------------------------------------------------------------------------------------------------

    async def add_token(self, token: JoinToken, by: str, at: float) -> None:
        """Let a machine join as `token.node`. Another open token for that node ends with it."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM join_tokens WHERE expires_at < ?", (at - DEAD_TOKENS_S,))
            connection.execute(
                "UPDATE join_tokens SET used_at = ? WHERE node = ? AND used_at IS NULL", (at, token.node)
            )
            connection.execute("INSERT INTO join_tokens VALUES (?, ?, ?, NULL)", _row(token))
            _note(connection, by, "add node", token.node, "join token made", at)

        await self._database.write(work)

    async def token(self, sha256: str) -> JoinToken | None:
        """The token with this digest, whether it is still good or not."""

        def look(connection: sqlite3.Connection) -> JoinToken | None:
            row = connection.execute(
                "SELECT sha256, node, expires_at, used_at FROM join_tokens WHERE sha256 = ?", (sha256,)
            ).fetchone()
            return JoinToken(*row) if row else None

        return await self._database.read(look)

    async def tokens(self, now: float) -> tuple[JoinToken, ...]:
        """Those that can still be used, by node."""

        def look(connection: sqlite3.Connection) -> tuple[JoinToken, ...]:
            rows = connection.execute(
                "SELECT sha256, node, expires_at, used_at FROM join_tokens"
                " WHERE used_at IS NULL AND expires_at > ? ORDER BY node",
                (now,),
            )
            return tuple(JoinToken(*row) for row in rows)

        return await self._database.read(look)

    async def redeem(self, sha256: str, certificate: Certificate, by: str) -> bool:
        """Use a token up and note the certificate it was used for, both or neither. False: it was not good any more,
        at the certificate's `issued_at`, for the certificate's node."""

        def work(connection: sqlite3.Connection) -> bool:
            at = certificate.issued_at
            used = connection.execute(
                "UPDATE join_tokens SET used_at = ?3"
                " WHERE sha256 = ?1 AND node = ?2 AND used_at IS NULL AND expires_at > ?3",
                (sha256, certificate.node, at),
            ).rowcount
            if not used:
                return False
            _keep(connection, certificate)
            _note(connection, by, "node joined", certificate.node, f"serial {certificate.serial}", at)
            return True

        return await self._database.write(work)

    # -- audit ---------------------------------------------------------------------------------------------------------

    async def audit(self, by: str, action: str, target: str, detail: str, at: float) -> None:
        """Note what was done where no table of ours is changed."""
        await self._database.write(lambda connection: _note(connection, by, action, target, detail, at))

    async def entries(self, limit: int = 100, before: int | None = None) -> tuple[Entry, ...]:
        """The audit, newest first; `before` is the id of an entry that was seen already."""

        def look(connection: sqlite3.Connection) -> tuple[Entry, ...]:
            rows = connection.execute(
                "SELECT id, at, by, action, target, detail FROM audit WHERE ?1 IS NULL OR id < ?1"
                " ORDER BY id DESC LIMIT ?2",
                (before, limit),
            )
            return tuple(Entry(*row) for row in rows)

        return await self._database.read(look)


def _cordon(connection: sqlite3.Connection, node: str, by: str, at: float, detail: str) -> bool:
    made = connection.execute("INSERT OR IGNORE INTO cordons (node, at, by) VALUES (?, ?, ?)", (node, at, by)).rowcount
    if made:
        _note(connection, by, "cordon", node, detail, at)
    return made > 0


def _keep(connection: sqlite3.Connection, certificate: Certificate) -> None:
    connection.execute(
        "DELETE FROM certificates WHERE node = ? AND not_after < ?", (certificate.node, certificate.issued_at)
    )
    connection.execute(
        "INSERT INTO certificates (node, serial, not_after, issued_at, revoked_at) VALUES (?, ?, ?, ?, ?)",
        (
            certificate.node,
            certificate.serial,
            certificate.not_after,
            certificate.issued_at,
            certificate.revoked_at,
        ),
    )


def _row(token: JoinToken) -> tuple[str, str, float]:
    return token.sha256, token.node, token.expires_at


def _note(connection: sqlite3.Connection, by: str, action: str, target: str, detail: str, at: float) -> None:
    connection.execute(
        "INSERT INTO audit (at, by, action, target, detail) VALUES (?, ?, ?, ?, ?)", (at, by, action, target, detail)
    )

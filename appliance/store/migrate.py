"""Bring a database to this program's version, in one transaction, or leave it as it was."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from .failed import StoreFailed
from .migrations import MIGRATIONS

APPLICATION_ID = 0x41505043
"""Stands in the file's header, so that another program's database is not taken for an old one of ours."""

WHOLE_LOOK_BYTES = 64 << 20
"""Databases up to this size are looked through at the start; about a second for each GiB would be too long a start."""


def migrate(connection: sqlite3.Connection, path: str, steps: Sequence[Sequence[str]] = MIGRATIONS) -> int:
    """Apply the steps that are missing; how many there were. The connection is in autocommit mode.

    Raises StoreFailed for a database that is newer, another program's or damaged, before anything is changed, and
    sqlite3.Error.
    """
    version = _number(connection, "user_version")
    owner = _number(connection, "application_id")
    known = len(steps)
    if version > known and owner == APPLICATION_ID:
        raise StoreFailed(
            f"the database {path} is of a newer version ({version}, this program knows {known}): run the newer"
            " program, or put a backup from before the update in its place"
        )
    if owner != APPLICATION_ID and (version or _tables(connection)):
        raise StoreFailed(f"the database {path} is another program's; set store.url to a file of its own")
    _look_through(connection, path)
    if version == known:
        return 0
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _number(connection, "user_version")  # another process may have been here in the meantime
        for step in steps[version:]:
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {known}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return known - version


def _look_through(connection: sqlite3.Connection, path: str) -> None:
    if _number(connection, "page_count") * _number(connection, "page_size") > WHOLE_LOOK_BYTES:
        return
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StoreFailed(
            f"the database {path} is damaged ({' '.join(str(found).split())}); put a backup in its place, or move it"
            " away to begin anew"
        )


def _tables(connection: sqlite3.Connection) -> int:
    (number,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return int(number)


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    (number,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(number)

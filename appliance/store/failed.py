"""Why the database cannot be used, in one line with the next step."""

from __future__ import annotations

import os

FULL_BYTES = 64 << 10
"""With less than this free the disk is the cause of what SQLite calls an I/O error: it makes a file of 32 KiB beside
the database, and cannot say why it could not."""


class StoreFailed(Exception):
    """The database cannot be opened, read or written. Nothing of what was asked for has been done."""


def explain(path: str, error: Exception) -> StoreFailed:
    """What SQLite or the file system said of the database at `path`, and what to do about it."""
    import sqlite3  # here: the management API of a router without a database catches StoreFailed too

    code = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and _is_full(path)):
        told = "cannot be written, because the disk is full; free some room and do it again"
    elif primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        told = "is locked by another process; end that one and do it again"
    elif primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        told = f"is damaged or no database ({error}); put a backup in its place, or move it away to begin anew"
    elif primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        told = "cannot be written by this user; change its owner, or set store.url to another file"
    elif primary == sqlite3.SQLITE_CANTOPEN:
        told = "cannot be opened; set store.url to a file in a folder that this user can write"
    elif isinstance(error, OSError):
        told = f"cannot be opened: {error.strerror or error}; set store.url to a file that this user can write"
    else:
        told = f"failed: {error}; look at the disk, then do it again"
    return StoreFailed(f"the database {path} {told}")


def _is_full(path: str) -> bool:
    try:
        found = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < FULL_BYTES

"""The steps from an empty database to this version's, oldest first. A step that was released is never changed.

A new one is a new file and a line here; its number, counted from 1, is the version of the database after it.
"""

from __future__ import annotations

from . import m0001_decisions, m0002_drains

MIGRATIONS: tuple[tuple[str, ...], ...] = (m0001_decisions.STATEMENTS, m0002_drains.STATEMENTS)

"""Version 1: what operators decide about nodes, and the audit."""

from __future__ import annotations

STATEMENTS = (
    "CREATE TABLE cordons (node TEXT PRIMARY KEY, at REAL NOT NULL, by TEXT NOT NULL) STRICT",
    "CREATE TABLE certificates (serial TEXT PRIMARY KEY, node TEXT NOT NULL, not_after REAL NOT NULL,"
    " issued_at REAL NOT NULL, revoked_at REAL) STRICT",
    "CREATE INDEX certificates_of_node ON certificates (node)",
    "CREATE TABLE join_tokens (sha256 TEXT PRIMARY KEY, node TEXT NOT NULL, expires_at REAL NOT NULL,"
    " used_at REAL) STRICT",
    "CREATE TABLE audit (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, by TEXT NOT NULL,"
    " action TEXT NOT NULL, target TEXT NOT NULL, detail TEXT NOT NULL) STRICT",
)

"""Version 2: a drain outlives the router. It is a cordon with the moment in which the drain was asked for."""

from __future__ import annotations

STATEMENTS = ("ALTER TABLE cordons ADD COLUMN drained_at REAL",)

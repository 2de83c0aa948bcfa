"""Whether a group's endpoint answers, and which models it says it serves."""

from __future__ import annotations

from typing import Any

from .ask import AskFailed, ask_json

MOST_MODELS = 1000
MOST_NAME = 500
"""Of one engine: models, and characters in the name of one. Whoever announces must not fill the table."""

Entries = dict[str, dict[str, Any]]


async def probe(base: str, within_s: float) -> Entries:
    """The engine's own entries by model. Raises AskFailed."""
    value = await ask_json(f"{base.rstrip('/')}/models", within_s)
    data = value.get("data") if isinstance(value, dict) else None
    return {
        row["id"]: row
        for row in (data[:MOST_MODELS] if isinstance(data, list) else ())
        if isinstance(row, dict) and isinstance(row.get("id"), str) and 0 < len(row["id"]) <= MOST_NAME
    }


async def probe_in_order(bases: tuple[str, ...], within_s: float) -> tuple[str, Entries, list[tuple[str, str]]]:
    """The first of `bases` that answers, with its entries ("" where none does), and what went wrong at those before."""
    errors: list[tuple[str, str]] = []
    for base in bases:
        try:
            return base, await probe(base, within_s), errors
        except AskFailed as failed:
            errors.append((base, str(failed)))
    return "", {}, errors

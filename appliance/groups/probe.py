"""Whether a group's endpoint answers, and which models it says it serves."""

from __future__ import annotations

from typing import Any

from .ask import AskFailed, ask_json

Entries = dict[str, dict[str, Any]]


async def probe(base: str, within_s: float) -> Entries:
    """The engine's own entries by model. Raises AskFailed."""
    value = await ask_json(f"{base.rstrip('/')}/models", within_s)
    data = value.get("data") if isinstance(value, dict) else None
    return {
        row["id"]: row
        for row in (data if isinstance(data, list) else ())
        if isinstance(row, dict) and isinstance(row.get("id"), str) and row["id"]
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

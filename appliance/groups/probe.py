"""Whether a group's endpoint answers, and which models it says it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..rules.groups.skim import NotJson, entries
from .ask import AskFailed, Listening, ask
from .pace import Pace

MOST_NAME = 500
"""Characters in the name of a model. Whoever announces must not fill the table."""

Entries = dict[str, Mapping[str, Any]]


async def probe(base: str, within_s: float, pace: Pace, listening: Listening = ()) -> Entries:
    """The engine's own entries by model. Raises AskFailed."""
    body = await ask(f"{base.rstrip('/')}/models", within_s, listening)
    await pace.turn()
    try:
        with pace.work():
            return {str(row["id"]): row for row in entries(body) if is_model(str(row["id"]))}
    except NotJson as wrong:
        raise AskFailed(str(wrong)) from None


def is_model(name: str) -> bool:
    """Whether a text can stand in logs, labels and tables as the name of a model."""
    return 0 < len(name) <= MOST_NAME and name.isprintable()


async def probe_in_order(
    bases: tuple[str, ...], within_s: float, pace: Pace, listening: Listening = ()
) -> tuple[str, Entries, list[tuple[str, str]]]:
    """The first of `bases` that answers, with its entries ("" where none does), and what went wrong at those before."""
    errors: list[tuple[str, str]] = []
    for base in bases:
        try:
            return base, await probe(base, within_s, pace, listening), errors
        except AskFailed as failed:
            errors.append((base, str(failed)))
    return "", {}, errors

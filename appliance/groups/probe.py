"""Whether a group's endpoint answers, and which models it says it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..rules.groups.skim import NotJson, entries
from .ask import AskFailed, Listening, ask
from .pace import Pace

MOST_NAME = 500
"""Characters in the name of a model. Whoever announces must not fill the table."""

Entries = dict[str, Mapping[str, Any]]


@attrs.frozen
class Found:
    """What answers at `url`: its own entries by model, and whether it is another router of this kind."""

    url: str
    entries: Entries
    router: bool = False


async def probe(base: str, within_s: float, pace: Pace, listening: Listening = (), most_bytes: int = 1 << 20) -> Found:
    """Raises AskFailed. `most_bytes` bounds what is kept of the entries."""
    answer = await ask(f"{base.rstrip('/')}/models", within_s, listening, as_router=True)
    await pace.turn()
    try:
        with pace.work():
            found = {str(row["id"]): row for row in entries(answer.body, most_bytes) if is_model(str(row["id"]))}
            return Found(base, found, answer.router)
    except NotJson as wrong:
        raise AskFailed(str(wrong)) from None


def is_model(name: str) -> bool:
    """Whether a text can stand in logs, labels and tables as the name of a model."""
    return 0 < len(name) <= MOST_NAME and name.isprintable()


async def probe_in_order(
    bases: tuple[str, ...], within_s: float, pace: Pace, listening: Listening = (), most_bytes: int = 1 << 20
) -> tuple[Found | None, list[tuple[str, str]]]:
    """The first of `bases` that answers, None where none does, and what went wrong at those before."""
    errors: list[tuple[str, str]] = []
    for base in bases:
        try:
            return await probe(base, within_s, pace, listening, most_bytes), errors
        except AskFailed as failed:
            errors.append((base, str(failed)))
    return None, errors

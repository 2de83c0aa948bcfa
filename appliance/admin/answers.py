"""Answers of the management API in their common form, and who asked."""

from __future__ import annotations

import pwd
from collections.abc import Iterable
from typing import Any

import msgspec
from quart import Response
from quart import request as asked

from ..gateway.errors import error_body
from ..nursery.sleeper import breathe

CALLER = "x-appliance-caller"


def json(document: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, content_type="application/json")


async def gathered(documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of them, as they are made. Others get a turn behind every sixteenth: there may be thousands."""
    made = []
    for document in documents:
        made.append(document)
        await breathe(len(made))
    return made


def refused(status: int, code: str, message: str) -> Response:
    """A no, in the shape of every refusal."""
    return Response(error_body(status, code, message), status, content_type="application/json")


def caller() -> int:
    """The uid of whoever connected to the admin socket."""
    return int(asked.headers.get(CALLER, "-1"))


def caller_name() -> str:
    """The same as people know it: the name of the user, or `uid 1000` where this machine knows none."""
    uid = caller()
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"uid {uid}"


def number(name: str, least: int, most: int, usual: int) -> int | None:
    """A whole number of the query; None where it is none, or out of bounds."""
    text = asked.args.get(name, str(usual))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        return None
    return int(text) if least <= int(text) <= most else None

"""Values as an operator would write them in TOML, and the same made safe for a message."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and lone surrogates: a terminal obeys the former, and no encoder takes the latter."""

_LONGEST = 80


def toml_value(value: object) -> str:
    """One line of TOML. Floats keep their point, so that they are floats when read again."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return UNPRINTABLE.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(value, ensure_ascii=False))
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case Mapping():
            return f"{{ {', '.join(f'{k} = {toml_value(v)}' for k, v in value.items())} }}" if value else "{}"
        case _:
            return toml_value(str(value))


def got(value: Any) -> str:
    """What was found, for the end of a fault: short, on one line, without what may be a password."""
    match value:
        case dict():
            return "a table"
        case list():
            return "a list"
        case str():
            text = _without_password_greedily(value)
            return toml_value(text if len(text) <= _LONGEST else text[:_LONGEST] + "...")
        case bool() | int() | float():
            text = toml_value(value)
            return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
        case _:
            return "a date or a time"


def masked(url: str) -> str:
    """A well-formed URL without its user name and password."""
    return re.sub(r"(://)[^/?#]*@", r"\1***@", url)


def _without_password_greedily(text: str) -> str:
    """As `masked`, for text that is no well-formed URL: an unquoted slash in a password must not uncover the rest."""
    return re.sub(r"(://).*@", r"\1***@", text, flags=re.S)

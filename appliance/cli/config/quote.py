"""Values as an operator would write them in TOML, and the same made safe for a message."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line breaks and lone surrogates: terminals and log readers obey the former, and no encoder takes
the last."""

_LONGEST = 80


def toml_value(value: object) -> str:
    """One line of TOML that any terminal shows as it is. Floats keep their point, so that they are read as floats."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return "".join(map(_shown, json.dumps(value, ensure_ascii=False)))
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case Mapping():
            return f"{{ {', '.join(f'{_name(k)} = {toml_value(v)}' for k, v in value.items())} }}" if value else "{}"
        case _:
            return toml_value(str(value))


def _name(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def _shown(char: str) -> str:
    return char if char.isprintable() else f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


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

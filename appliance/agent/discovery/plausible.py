"""What no inventory can hold, whatever its form: a file stands in for hardware, and all it says is acted on."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_MOST = 1 << 63
_FREE_TEXT = ("notes",)
"""What is shown to people and nothing else may hold more than words."""


def faults(document: Mapping[str, Any]) -> Iterator[str]:
    """A sentence with the place for each value that cannot be true, or that nobody could be told of."""
    yield from _values({key: value for key, value in document.items() if key not in _FREE_TEXT}, "")
    for number, note in enumerate(_list(document.get("notes"))):
        if isinstance(note, str) and _HALF.search(note):
            yield f"notes[{number}]: holds half a character"
    yield from _addresses(document)
    for number, gpu in enumerate(_list(document.get("gpus"))):
        uuid = gpu.get("uuid") if isinstance(gpu, dict) else None
        # It becomes part of a list in an engine's environment.
        if isinstance(uuid, str) and not re.fullmatch(r"[^\s,]+", uuid):
            yield f"gpus[{number}].uuid: expected a word without commas"


def _values(value: Any, at: str) -> Iterator[str]:
    match value:
        case bool():
            return
        case str():
            if _CONTROL.search(value):
                yield f"{at}: holds a control character, or half of one"
        case int():
            if value < 0:
                yield f"{at}: expected 0 or more, got {value}" if value > -_MOST else f"{at}: expected 0 or more"
            elif value >= _MOST:
                yield f"{at}: expected less than 2^63"
        case float():
            if not 0 <= value < math.inf:
                yield f"{at}: expected a number, 0 or more, got {value:g}"
        case dict():
            for key, each in value.items():
                yield from _values(str(key), at or "a key")
                yield from _values(each, f"{at}.{key}" if at else str(key))
        case list():
            for number, each in enumerate(value):
                yield from _values(each, f"{at}[{number}]")
        case _:
            return


def _addresses(document: Mapping[str, Any]) -> Iterator[str]:
    found = [("address", document["address"])] if document.get("address") else []
    for number, interface in enumerate(_list(document.get("interfaces"))):
        for place, text in enumerate(_list(interface.get("addresses")) if isinstance(interface, dict) else ()):
            found.append((f"interfaces[{number}].addresses[{place}]", text))
    for at, text in found:
        if isinstance(text, str) and not _is_address(text):
            yield f"{at}: expected an IP address, got {_CONTROL.sub('?', text)[:60]}"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

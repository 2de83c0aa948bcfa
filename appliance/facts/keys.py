"""What is known of a configuration key besides its name, its type and its default."""

from __future__ import annotations

from typing import Any

import attrs

METADATA = "appliance.key"
"""Where an attrs field's metadata holds its `Key`; a field without one cannot be set by operators."""


@attrs.frozen
class Key:
    """What is known of a key besides its name, its type and its default.

    `doc` is one line for people. `minimum` (inclusive), `above` (exclusive) and `maximum` (inclusive) bound a number;
    on a list, `minimum` bounds its length. `choices` are the words allowed. `form` names the written form of a string
    (`cli/config/forms.py`). `live` False means that a reload cannot change it, because it is used once, at the start.
    `example` stands in the example file where the default would teach nothing, and must be given for required keys.
    `entry` is the class whose fields an operator writes when the value itself is of another class; its `build` makes
    the value.
    """

    doc: str
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    form: str = ""
    live: bool = True
    example: object = None
    entry: type | None = None


def about(doc: str, **known: Any) -> dict[str, Key]:
    """The metadata of a field that operators may set; the arguments are those of `Key`."""
    return {METADATA: Key(doc, **known)}

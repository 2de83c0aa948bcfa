"""The arguments an operator adds to a profile, read the way engines read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_FLAG = re.compile(r"--?[A-Za-z]")


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag. A negative number is a value."""
    return _FLAG.match(word) is not None


def flag_name(word: str) -> str:
    """The flag without its value, in the spelling with dashes (vLLM and SGLang take underscores too)."""
    name = word.split("=", 1)[0]
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name


def flag_values(args: Sequence[str]) -> dict[str, str]:
    """Flag -> its value, "" where it stands alone; the last of several wins, as it does for engines."""
    found: dict[str, str] = {}
    for at, word in enumerate(args):
        if not is_flag(word):
            continue
        value = word.partition("=")[2]
        if "=" not in word and at + 1 < len(args) and not is_flag(args[at + 1]):
            value = args[at + 1]
        found[flag_name(word)] = value
    return found


def flags_in(argv: Iterable[str]) -> list[str]:
    """The flags of a command line, each once, in order."""
    return list(dict.fromkeys(flag_name(word) for word in argv if is_flag(word)))


def owned_flags(args: Sequence[str], owned: Mapping[str, str]) -> list[str]:
    """One reason for each argument that would undo what the planner sets, with what to set instead.

    Engines take the last of two equal flags, so without this a profile could move an engine to another port, or take
    away its key, and everything that was agreed about it would be wrong.
    """
    found = []
    for name in flag_values(args):
        if name in owned:
            instead = f"; set {owned[name]} instead" if owned[name] else ""
            found.append(f"args: {name} is set by the agent{instead}")
    return found


def count(values: Mapping[str, str], *names: str) -> int:
    """The whole number given for the first of these flags that is there; 1 without one, or for what is no number."""
    for name in names:
        if values.get(name, "").isdecimal():
            return int(values[name])
    return 1

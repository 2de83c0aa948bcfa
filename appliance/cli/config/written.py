"""Set keys in a configuration file as its owner wrote it, keeping every other byte."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

from appliance.cli.config.rows import toml_value


def with_keys(text: str, section: str, values: Mapping[str, str]) -> str | None:
    """`text` with these keys of `section` set; None where that cannot be done without understanding more of TOML than
    lines, such as an inline table. What is returned was parsed: it says what `text` says, and these values besides.

    Raises tomllib.TOMLDecodeError for a text that is none.
    """
    before = tomllib.loads(text)
    table = before.get(section, {})
    if not isinstance(table, dict):
        return None
    wanted = {key: value for key, value in values.items() if table.get(key) != value}
    if not wanted:
        return text
    changed = _changed(text, section, wanted)
    try:
        after = tomllib.loads(changed)
    except tomllib.TOMLDecodeError:
        return None
    return changed if after == {**before, section: {**table, **wanted}} else None


def lines_of(section: str, values: Mapping[str, str]) -> list[str]:
    """The same as a person would write it."""
    return [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in values.items())]


def _changed(text: str, section: str, values: Mapping[str, str]) -> str:
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.splitlines(keepends=True)
    start = next((n for n, line in enumerate(lines) if re.match(rf"\s*\[\s*{section}\s*\]\s*(#.*)?$", line)), None)
    if start is None:
        gap = "" if not text else end if text.endswith("\n") else end * 2
        return text + gap + end.join(lines_of(section, values)) + end
    if not lines[start].endswith("\n"):
        lines[start] += end
    stop = next((n for n in range(start + 1, len(lines)) if re.match(r"\s*\[", lines[n])), len(lines))
    for key, value in values.items():
        line = f"{key} = {toml_value(value)}{end}"
        # where it stands, or stands as an example that is commented out, or else below the section's head
        there = next((n for n in range(start + 1, stop) if re.match(rf"#?{key}\s*=", lines[n].lstrip())), None)
        if there is None:
            lines.insert(start + 1, line)
            stop += 1
        else:
            lines[there] = line
    return "".join(lines)

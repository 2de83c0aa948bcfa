"""The commented example file, written from the classes so that it cannot lag behind them."""

from __future__ import annotations

from typing import Any

from appliance.cli.config.quote import toml_value
from appliance.cli.config.rows import plain
from appliance.cli.config.schema import Field, fields_of
from appliance.facts.settings import Settings

_HEAD = """\
# appliance.toml: every key with its default. Lines that begin with "# " explain; a key is set by taking away the "#"
# before it. Each can be given by the environment too, as APPLIANCE_<SECTION>__<KEY>=value.
"""


def example(cls: type = Settings) -> str:
    """TOML in which every key is commented out; taking the "#" off every line where no space follows makes it whole."""
    return _HEAD + "".join(_section(field, field.name, "") for field in fields_of(cls))


def _section(section: Field, path: str, mark: str) -> str:
    """A section, or each entry that its list has by default, and one where it has none."""
    if section.shape == "table":
        return f"\n# {section.key.doc}\n{mark}[{path}]\n" + _keys(section, path, mark)
    entries = [f"#[[{path}]]\n" + _keys(section, path, "#", entry) for entry in section.default or (None,)]
    return f"\n# {section.key.doc}\n" + "\n".join(entries)


def _keys(section: Field, path: str, mark: str, entry: object = None) -> str:
    """The keys before the inner sections: a key after the header of an inner table would belong to that one."""
    text = ""
    for field in fields_of(section.type):
        if field.shape in ("list", "map", "value"):
            value = example_value(field) if entry is None else plain(getattr(entry, field.name))
            text += f"# {doc(field)}\n#{field.name} = {toml_value(value)}\n"
    inner = [field for field in fields_of(section.type) if field.shape in ("table", "tables")]
    return text + "".join(_section(field, f"{path}.{field.name}", mark) for field in inner)


def doc(field: Field) -> str:
    """The line of meaning, with an example where an empty list or table would not show what goes into it."""
    if field.default in ((), {}) and field.key.example:
        return f"{field.key.doc.rstrip('.')}, for example {toml_value(field.key.example)}."
    return field.key.doc


def example_value(field: Field) -> Any:
    """The default, or the key's example where there is no default to show."""
    return field.key.example if field.required or field.default is None else plain(field.default)

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


def example() -> str:
    """TOML in which every key is commented out; taking the "#" off every line where no space follows makes it whole."""
    return _HEAD + "".join(_section(field, field.name, "") for field in fields_of(Settings))


def _section(section: Field, path: str, mark: str) -> str:
    """A section with its keys first: in TOML, a key after the header of an inner table would belong to that one."""
    repeated = section.shape == "tables"
    mark = "#" if repeated else mark
    header = f"[[{path}]]" if repeated else f"[{path}]"
    lines = ["", f"# {section.key.doc}", mark + header]
    for field in fields_of(section.type):
        if field.shape in ("list", "value"):
            lines += [f"# {doc(field)}", f"#{field.name} = {toml_value(example_value(field))}"]
    inner = [field for field in fields_of(section.type) if field.shape in ("table", "tables")]
    return "\n".join(lines) + "\n" + "".join(_section(field, f"{path}.{field.name}", mark) for field in inner)


def doc(field: Field) -> str:
    """The line of meaning, with an example where an empty list would not show what goes into it."""
    if field.default == () and field.key.example:
        return f"{field.key.doc.rstrip('.')}, for example {toml_value(field.key.example)}."
    return field.key.doc


def example_value(field: Field) -> Any:
    """The default, or the key's example where there is no default to show."""
    return field.key.example if field.required or field.default is None else plain(field.default)

"""Configuration: found, overlaid by the environment, structured, checked, shown and explained.

Everything here is driven by the classes of `facts/settings.py`; no file of this package names a key, except the rules
that compare keys with each other (`check.py`) and with what lies on disk (`files.py`).
"""

from __future__ import annotations

from appliance.cli.config.advice import advice
from appliance.cli.config.example_file import example
from appliance.cli.config.folders import Places, places
from appliance.cli.config.loaded import ConfigError, Loaded, admin_sockets, load
from appliance.cli.config.placed import profiled, without_profiles
from appliance.cli.config.reload import changes, keep_fixed
from appliance.cli.config.rows import Row, show, toml_value

__all__ = [
    "ConfigError",
    "Loaded",
    "Places",
    "Row",
    "admin_sockets",
    "advice",
    "changes",
    "example",
    "keep_fixed",
    "load",
    "places",
    "profiled",
    "show",
    "toml_value",
    "without_profiles",
]

"""How this program is started again, as a child."""

from __future__ import annotations

import sys


def own_argv() -> tuple[str, ...]:
    """The executable itself where it is one file or folder of its own, otherwise the interpreter with the package."""
    return (sys.executable,) if getattr(sys, "frozen", False) else (sys.executable, "-m", "appliance")


def bundle() -> str:
    """The folder that holds the libraries of a frozen executable, "" where Python is installed."""
    return str(getattr(sys, "_MEIPASS", ""))

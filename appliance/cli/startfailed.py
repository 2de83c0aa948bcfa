"""Why a router cannot start."""

from __future__ import annotations


class StartFailed(Exception):
    """The router cannot start; the message is one line with the next step."""

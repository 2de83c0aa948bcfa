"""The key that announcements are signed with, as routers and agents are given it."""

from __future__ import annotations

from ..facts.settings import Settings
from .startfailed import StartFailed

_MOST_BYTES = 16384


def secret(settings: Settings) -> bytes:
    """The key that signs announcements, b"" for none. Raises StartFailed."""
    groups = settings.groups
    if not groups.secret_file:
        return groups.secret.encode()
    try:
        with open(groups.secret_file, "rb") as file:
            return file.read(_MOST_BYTES)
    except OSError as error:  # it could be read when the configuration was loaded
        raise StartFailed(f"groups.secret_file: {groups.secret_file} cannot be read: {error.strerror}") from None

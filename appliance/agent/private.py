"""Files and folders of a state directory, which only the agent's own user may read: keys and commands stand in them."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def make_private(folder: Path) -> None:
    """Close a folder to others. One on a disk that can only be read stays as it is. Raises OSError."""
    try:
        folder.chmod(0o700)
    except OSError as refused:
        if refused.errno != errno.EROFS:
            raise


def replace(path: Path, content: bytes) -> None:
    """Write a file anew, whole or not at all. Raises OSError."""
    beside = path.with_name(f".{path.name}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(content)
    beside.replace(path)

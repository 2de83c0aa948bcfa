"""GNU's OpenMP runtime for machines that have none.

The wheel of llama.cpp wants the system's `libgomp.so.1`. A compiler brings it, and a machine with nothing but Python
has no compiler: Debian's smallest installations lack it. The wheel of pykdtree carries the same library for its own
use, under another name, as wheels do so that two copies never meet. Here it gets its own name back, in memory, and is
loaded before llama.cpp asks for it.
"""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

_NAME = "libgomp.so.1"


def provide() -> bool:
    """Make sure that `libgomp.so.1` can be loaded; False when neither the system nor a wheel has it."""
    try:
        ctypes.CDLL(_NAME)
        return True
    except OSError:
        copy = _in_a_wheel()
    if copy is None:
        return False
    # The loader goes by the name inside the file, so that is what changes; it may be shorter, never longer.
    library = copy.read_bytes().replace(copy.name.encode(), _NAME.encode().ljust(len(copy.name), b"\0"))
    memory = os.memfd_create(_NAME)
    with os.fdopen(memory, "wb", closefd=False) as file:
        file.write(library)
    try:
        ctypes.CDLL(f"/proc/self/fd/{memory}", ctypes.RTLD_GLOBAL)
        return True
    except OSError:
        return False
    finally:
        os.close(memory)


def _in_a_wheel() -> Path | None:
    package = find_spec("pykdtree")
    if package is None or package.origin is None:
        return None
    copies = Path(package.origin).parent.parent.glob("pykdtree.libs/libgomp-*.so*")
    return next(copies, None)

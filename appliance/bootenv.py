"""The environment of the program when it runs from a folder of its own (`make binary`), cleaned before anything else.

What starts such a program puts the folder's libraries on LD_LIBRARY_PATH and leaves words for itself in the
environment. A child that inherits them loads our libraries in place of its own (an engine that finds a foreign libssl
fails in ways that nobody understands), or takes itself for a part of this program. Cleaned here, once, no child can
inherit them, whoever starts it. It costs this process nothing: the loader reads LD_LIBRARY_PATH when a program starts,
never later.
"""

from __future__ import annotations

from collections.abc import MutableMapping

_STARTERS = ("_PYI_", "_MEI", "PYINSTALLER_")


def clean(environ: MutableMapping[str, str], folder: str) -> None:
    """Leave in `environ` what was there before the program was started; `folder` is where its libraries lie."""
    before = environ.pop("LD_LIBRARY_PATH_ORIG", None)
    if before is not None:
        environ["LD_LIBRARY_PATH"] = before
    elif _inside(environ.get("LD_LIBRARY_PATH", "").split(":")[0], folder):
        del environ["LD_LIBRARY_PATH"]
    for name in list(environ):
        if name.startswith(_STARTERS) or (name == "OPENSSL_MODULES" and _inside(environ[name], folder)):
            del environ[name]


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")

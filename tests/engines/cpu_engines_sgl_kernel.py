"""A stand-in for the package `sgl_kernel`, which has no build for ordinary CPUs: SGLang's imports succeed, and whatever
it then would really call says that it is missing. Small dense models need none of it.

It is copied into the environment of the real engines as `sgl_kernel/__init__.py` and never imported by the tests.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

__version__ = "0.0.0"
__path__: list[str] = []


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **named: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    missing.__name__ = name
    return missing


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module below this one is there, and as empty. All but `scalar_type`: where it is missing, SGLang goes on
    without."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("sgl_kernel.") or fullname.endswith("scalar_type"):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = __getattr__  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is to be run: all it has was given to it when it was made."""


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang pins memory for copies to a GPU wherever it makes a tensor, and torch refuses without one."""

    @functools.wraps(make)
    def made(*args: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        return make(*args, **named)

    return made


sys.meta_path.append(_Submodules())
if not torch.cuda.is_available():
    for _name in ("tensor", "empty", "zeros", "ones", "full", "empty_like", "zeros_like"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *args, **named: self

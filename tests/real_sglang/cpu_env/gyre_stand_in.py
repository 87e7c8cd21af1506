"""Packages that have only a CUDA build, so that what imports them at its top can be imported without them.

Every name and every submodule of one is there. To call one raises, unless it has been written here for torch alone.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def stand_in(name: str) -> None:
    """Make every `name.sub.module` one in which all names are there."""
    sys.meta_path.append(_Submodules(name))


def missing(name: str) -> object:
    """What stands for `name`, which nobody may call. Of a module's own `__names__` there are no others."""
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)
    return _Missing(name)


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, inner: str) -> object:
        return missing(f"{self._name}.{inner}")

    def __call__(self, *_: object, **__: object) -> object:
        raise NotImplementedError(f"{self._name} has only a CUDA build, and this process has a stand-in for it")


class _Submodule(ModuleType):
    def __getattr__(self, inner: str) -> object:
        return missing(f"{self.__name__}.{inner}")


class _Submodules(MetaPathFinder, Loader):
    def __init__(self, package: str) -> None:
        self._within = f"{package}."

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._within) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

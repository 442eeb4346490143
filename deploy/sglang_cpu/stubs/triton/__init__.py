"""Stands in for Triton where no GPU kernel is ever launched.

SGLang decorates its kernels when its modules are imported, so the names must exist; Triton's wheel
is hundreds of megabytes. A kernel that is launched all the same raises: nothing is computed wrongly in silence.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "3.0.0"


class _Kernel:
    """A decorated function that may be passed around, but not launched."""

    def __init__(self, function: Any) -> None:
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = getattr(function, "__doc__", None)
        self.fn = function

    def __getitem__(self, grid: object) -> _Kernel:
        return self

    def __call__(self, *arguments: object, **options: object) -> None:
        raise RuntimeError(f"the Triton kernel {self.__name__} was launched, but this SGLang runs on a CPU")


def jit(function: Any = None, **options: object) -> Any:
    return _Kernel if function is None else _Kernel(function)


def autotune(*arguments: object, **options: object) -> Any:
    return lambda kernel: kernel


heuristics = autotune


class Config:
    def __init__(self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 2, **more: object) -> None:
        self.kwargs = kwargs or {}
        self.num_warps = num_warps
        self.num_stages = num_stages


def cdiv(numerator: int, denominator: int) -> int:
    return (numerator + denominator - 1) // denominator


def next_power_of_2(number: int) -> int:
    return 1 if number <= 1 else 2 ** (number - 1).bit_length()


class _Namespace(types.ModuleType):
    """A submodule in which every name exists: classes by capital letters, all else further namespaces."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = jit if name == "jit" else _class(name, self.__name__) if name[0].isupper() else _namespace(self, name)
        setattr(self, name, made)
        return made

    def __call__(self, *arguments: Any, **options: object) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda function: function

    def __contains__(self, item: object) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


def _namespace(parent: types.ModuleType, name: str) -> _Namespace:
    inner = _Namespace(f"{parent.__name__}.{name}")
    inner.__path__ = []
    return inner


def _class(name: str, module: str) -> type:
    base = Exception if name.endswith(("Error", "OutOfResources")) else object
    return type(name, (base,), {"__module__": module, "__init__": lambda self, *arguments, **options: None})


class _ConstantExpression:
    """``triton.language.constexpr``: holds a value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


_KNOWN = {"triton.language": {"constexpr": _ConstantExpression}, "triton.runtime.jit": {"JITFunction": _Kernel}}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Namespace(spec.name)
        vars(module).update(_KNOWN.get(spec.name, {}))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing: the names appear when they are asked for."""


sys.meta_path.append(_Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _class(name, "triton") if name[0].isupper() else importlib.import_module(f"triton.{name}")

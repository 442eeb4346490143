"""torch, imported at its first use: settings are read, from loss files too, in processes that do not need torch."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _LazyModule(ModuleType):
    """A module that is imported when one of its attributes is first read; an attribute that was read is kept."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what inspection asks of a module must not import it
            raise AttributeError(name)
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = _LazyModule("torch")
    Tensor = Any  # read in annotations only

__all__ = ["Tensor", "torch"]

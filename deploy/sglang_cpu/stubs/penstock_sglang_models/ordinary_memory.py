"""Pinned memory of a machine without an accelerator is ordinary memory: torch raises, SGLang's adapters ask for it.

Pinning changes where bytes lie and none of them: it makes copies to an accelerator faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def _ordinary(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*arguments, **options)

    return made


if not torch.accelerator.is_available():
    torch.tensor = _ordinary(torch.tensor)
    torch.zeros = _ordinary(torch.zeros)
    torch.Tensor.pin_memory = lambda self, device=None: self

"""The attention over packed rows: one function, with a backend chosen by device, dtype and head size.

A backend is compared with the reference on a small tree before its first use, gradients included: the kernels' names
are private to torch. One that fails is not used.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import structlog
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from penstock.trainer.algorithm.packed_rows import Layout, pack
from penstock.trainer.learner.attention.cpu_flash import CpuFlash
from penstock.trainer.learner.attention.cuda_flash import CudaFlash
from penstock.trainer.learner.attention.reference import DenseMask

log = structlog.get_logger("trainer.attention")

_TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 1e-2}  # relative to the largest element; others: 1e-4


class Backend(Protocol):
    """A way to compute attention over packed rows."""

    @property
    def name(self) -> str:
        """Name, for logs and tests."""
        ...

    def supports(self, query: Tensor, value: Tensor) -> bool:
        """Return True if it is made for tensors like these."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        """Return attention [1, H, T, Dv], differentiable.

        Args:
            query: [1, H, T, D].
            key: [1, K, T, D]; K divides H, and consecutive query heads share one.
            value: [1, K, T, Dv].
            layout: Which token attends to which.
            scale: Multiplies the products of queries and keys.
        """
        ...


REFERENCE = DenseMask()
BACKENDS: tuple[Backend, ...] = (CudaFlash(), CpuFlash())  # the first that works; else the reference

_chosen: dict[tuple[object, ...], Backend] = {}


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Return attention [1, H, T, Dv] by the fastest backend that works; arguments as in `Backend.attend`."""
    size = value.shape[-1]
    if size < query.shape[-1]:  # as in multi-head latent attention; zeros add nothing, and kernels want equal sizes
        value = F.pad(value, (0, query.shape[-1] - size))
    return backend_for(query, value).attend(query, key, value, layout, scale)[..., :size]


def backend_for(query: Tensor, value: Tensor) -> Backend:
    """Return the first backend that supports such tensors and agrees with the reference; the same in later calls."""
    key = (query.device, query.dtype, query.shape[-1], value.shape[-1])
    if key not in _chosen:
        works = (backend for backend in BACKENDS if backend.supports(query, value) and agrees(backend, query, value))
        _chosen[key] = next(works, REFERENCE)
    return _chosen[key]


def agrees(backend: Backend, query: Tensor, value: Tensor) -> bool:
    """Return True if a backend has the reference's results and gradients for tensors like these."""
    try:
        found = _results(backend, query, value)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError) as err:  # a kernel of another torch or device
        log.warning("attention backend not used: it failed", backend=backend.name, error=str(err)[:300])
        return False
    for some, true in zip(found, _results(REFERENCE, query, value), strict=True):
        error = float((some - true).abs().max() / true.abs().max())
        if not error <= _TOLERANCES.get(query.dtype, 1e-4):
            log.warning("attention backend not used: it is not exact", backend=backend.name, error=error)
            return False
    return True


def _results(backend: Backend, query: Tensor, value: Tensor) -> list[Tensor]:
    """Return output and gradients on a small forest: long and short rows, one that ends in another, two branchings."""
    prompts = [np.arange(150), np.arange(150), np.arange(150), np.arange(7), np.arange(20), np.arange(20) + 5]
    tails = [
        np.arange(3),
        np.arange(40) + 9,
        np.append(np.arange(17) + 9, 1),
        np.arange(100) + 50,
        np.arange(30),
        np.arange(5),
    ]
    rows = [np.append(prompt, tail).astype(np.int32) for prompt, tail in zip(prompts, tails, strict=True)]
    layout = pack(rows, [len(prompt) for prompt in prompts]).layout
    heads = ((2, query.shape[-1]), (1, query.shape[-1]), (1, value.shape[-1]))
    given = [_waves(count, layout.num_tokens, size, 0.7 + n, query) for n, (count, size) in enumerate(heads)]
    # A first call inside a checkpointed layer must not save tensors through the layer's hooks: reading them computes it again.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
        out = backend.attend(given[0], given[1], given[2], layout, 0.3)
        gradients = torch.autograd.grad((out.double() * out.detach().double().cos()).sum(), given)
    return [held.detach().double() for held in (out, *gradients)]


def _waves(heads: int, tokens: int, size: int, pitch: float, like: Tensor) -> Tensor:
    """Return [1, heads, tokens, size] without drawing from torch's random state, which a checkpoint holds."""
    values = torch.arange(heads * tokens * size, device=like.device, dtype=torch.float64)
    return (values * pitch).sin().view(1, heads, tokens, size).to(like.dtype).requires_grad_()

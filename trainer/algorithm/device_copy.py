"""One copy to a device for any number of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; kernels load vectors of this size


def copied_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors on a device: those in host memory by one copy, for which the host does not wait; on the CPU the same ones."""
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if device.type == "cpu" or not on_host:
        return [tensor.to(device) for tensor in tensors]
    starts = [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in on_host)]
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for view, tensor in zip(_views(packed, on_host, starts), on_host, strict=True):
        view.copy_(tensor)
    sent = iter(_views(packed.to(device, non_blocking=True), on_host, starts))
    return [next(sent) if tensor.device.type == "cpu" else tensor.to(device) for tensor in tensors]


def _views(packed: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    return [
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(like, starts, strict=False)
    ]

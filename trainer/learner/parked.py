"""Keeps a frozen module in host memory and computes it on a device: each layer's weights are there while it computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def park(module: nn.Module, device: torch.device) -> None:
    """Park a module: its parameters stay in host memory, pinned for a GPU, and its buffers go to the device.

    Every submodule that owns parameters gets them on the device when it is called, and its copies are freed when it returns. So
    the device holds one layer at a time, and each call transfers all weights once. A submodule must be called to be used:
    reading its weight from outside gives the one in host memory. The module must not be trained.
    """
    for part in module.modules():
        part._buffers.update({name: None if b is None else b.to(device) for name, b in part._buffers.items()})
        if any(parameter is not None for parameter in part._parameters.values()):
            hooks = _Hooks(part, device)
            part.register_forward_pre_hook(hooks.fetch)
            part.register_forward_hook(hooks.release, always_call=True)


class _Hooks:
    """The hooks of one submodule."""

    def __init__(self, part: nn.Module, device: torch.device) -> None:
        self._part, self._device = part, device
        self._parked = {name: one for name, one in part._parameters.items() if one is not None}
        for parameter in self._parked.values():
            parameter.data = _on_host(parameter.data, pinned=device.type == "cuda")

    def fetch(self, *_: object) -> None:
        for name, parked in self._parked.items():
            # In the order of the device's stream: the layer's kernels wait for it, and so does whoever gets this memory next.
            there = parked.data.to(self._device, non_blocking=True)
            self._part._parameters[name] = nn.Parameter(there, requires_grad=False)

    def release(self, *_: object) -> None:
        self._part._parameters.update(self._parked)


def _on_host(tensor: Tensor, *, pinned: bool) -> Tensor:
    found = tensor.to("cpu")
    return found.pin_memory() if pinned and not found.is_pinned() else found

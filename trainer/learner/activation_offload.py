"""Keeps what a model's layers save for the backward pass in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def offload_activations(body: nn.Module) -> None:
    """Have every forward pass of a module with gradient checkpointing keep its saved tensors in host memory.

    Checkpointed layers save only their inputs, which come back to the device one layer at a time. Without checkpointing
    the weights would be moved too.
    """
    open_passes: list[Any] = []

    def begin(*_: Any) -> None:
        open_passes.append(torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()))
        open_passes[-1].__enter__()

    def end(*_: Any) -> None:
        open_passes.pop().__exit__(None, None, None)

    body.register_forward_pre_hook(begin)
    body.register_forward_hook(end, always_call=True)

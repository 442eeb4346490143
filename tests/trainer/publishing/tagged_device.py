"""A device that is none: its tensors hold values on the CPU; copies from and to it, and waits for it, are counted by thread and size."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
to_host: Counter[str] = Counter()  # bytes, by thread
to_device: Counter[str] = Counter()
waits: Counter[str] = Counter()  # for a number that the device computes


def reset() -> None:
    for counter in (to_host, to_device, waits):
        counter.clear()


class Tagged(torch.Tensor):
    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Tagged:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.on_cpu = inner

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor of a device has no array")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Moves tensors to the device where that is asked for; entered by each thread that does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _inner(value: Any) -> Any:
    return value.on_cpu if isinstance(value, Tagged) else value


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    thread = threading.current_thread().name.partition("_")[0]
    flat, _ = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    is_tagged = any(isinstance(tensor, Tagged) for tensor in tensors)
    place = kwargs.get("device")
    named = {key: torch.device("cpu") if key == "device" else _inner(value) for key, value in kwargs.items()}
    result = func(*tree_map(_inner, args), **named)
    if func is aten.copy_.default:
        target, source = args[:2]
        if isinstance(target, Tagged) != isinstance(source, Tagged):
            (to_device if isinstance(target, Tagged) else to_host)[thread] += target.nbytes
        return target
    if func is aten._to_copy.default and place is not None:
        goes = torch.device(place).type == DEVICE.type
        if goes != is_tagged:
            (to_device if goes else to_host)[thread] += result.nbytes
        is_tagged = goes
    elif is_tagged and any(tensor.dim() and not isinstance(tensor, Tagged) for tensor in tensors):
        raise AssertionError(f"{func} mixes tensors of the device with others")
    if func in (aten.nonzero.default, aten._local_scalar_dense.default) and is_tagged:
        waits[thread] += 1
    if not is_tagged or func is aten._local_scalar_dense.default:
        return result
    if func in (aten.index_copy_.default, aten.index_copy.out):
        return args[0]
    return tree_map(lambda value: Tagged(value) if isinstance(value, torch.Tensor) else value, result)

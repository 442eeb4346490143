"""States of a network that are moved to host memory while an engine has the GPU: parameters, gradients, master weights and moments.

What is moved are storages, not tensors: views and flat buffers of DeepSpeed stay what they are, at every ZeRO stage. DeepSpeed's own
`offload_states` moves tensors one kind at a time: at stage 3 it needs its fused Adam, and stage 0 and bfloat16 at stage 1 have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

_SMALLEST_BYTES = 64 * 1024  # smaller storages stay: counters, norms, rotary frequencies
_BYTE = torch.uint8


class HostStates:
    """The storages of one network on one device; `move_back` restores them bit for bit."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By the address of the storage's object, which stays. What was moved out, with its bytes:
        self._moved: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._copies: dict[int, Tensor] = {}  # [bytes] uint8 in host memory, pinned for a GPU; kept between two moves

    def move_out(self, *roots: object, scratch: Iterable[Tensor | None] = ()) -> int:
        """Copy every storage that is reached from ``roots`` and free it on the device; return the bytes that were copied.

        ``scratch`` is freed without a copy, and has arbitrary values afterwards. Nothing may read either until `move_back`.
        """
        scratch = [tensor for tensor in scratch if tensor is not None]
        unused = {tensor.untyped_storage()._cdata for tensor in scratch}
        for tensor in tensors_of(*roots, *scratch):
            storage = tensor.untyped_storage()
            size, address = storage.nbytes(), storage._cdata
            if address in self._moved or tensor.device != self._device:
                continue
            if size < _SMALLEST_BYTES or not storage.resizable():
                continue
            self._moved[address] = storage, size
            if address not in unused:
                copy = self._copies.get(address)
                if copy is None or len(copy) != size:
                    copy = torch.empty(size, dtype=_BYTE, pin_memory=self._device.type == "cuda")
                self._copies[address] = copy.copy_(_bytes_of(storage), non_blocking=True)
        self._synchronize()
        for storage, _ in self._moved.values():
            storage.resize_(0)
        self._copies = {address: copy for address, copy in self._copies.items() if address in self._moved}
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else the allocator would keep the memory from the engine
        return sum(map(len, self._copies.values()))

    def move_back(self) -> None:
        for address, (storage, size) in self._moved.items():
            storage.resize_(size)
            if (copy := self._copies.get(address)) is not None:
                _bytes_of(storage).copy_(copy, non_blocking=True)
        self._synchronize()
        self._moved.clear()

    def readable(self, tensor: Tensor) -> Tensor:
        """Return a tensor, or while its storage is moved out the same values in host memory."""
        address = tensor.untyped_storage()._cdata
        if address not in self._moved or address not in self._copies:
            return tensor
        copy = self._copies[address].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=_BYTE, device=storage.device).set_(storage)


def tensors_of(*roots: object) -> Iterator[Tensor]:
    """Yield the tensors that modules, optimizers, containers and objects of DeepSpeed hold, gradients and partitions of parameters too."""
    seen: dict[int, object] = {}  # also keeps them, so that no id is used twice
    stack: list[object] = list(roots)
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            yield item
            # DeepSpeed keeps partitions, and sums of gradients, as attributes of parameters.
            stack += [item.grad if item.is_leaf else None, *getattr(item, "__dict__", {}).values()]
        else:
            stack += _held_by(item)


def _held_by(item: object) -> Iterable[object]:
    if isinstance(item, nn.Module):
        return [*item.parameters(), *item.buffers()]
    if isinstance(item, Mapping):
        return [*item.keys(), *item.values()]
    if isinstance(item, list | tuple | set):
        return item
    if isinstance(item, torch.optim.Optimizer) or type(item).__module__.startswith("deepspeed."):
        return list(getattr(item, "__dict__", {}).values())
    return ()

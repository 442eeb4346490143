"""A device that is none: its tensors hold values on the CPU, and what a GPU would refuse or wait for is noted with its place in our code.

Forward and backward passes compute what they compute on a CPU. Noted are operations that mix tensors of the device with others, copies
between them, and synchronisations: the host waits until a number that the device computes is there.

A copy to the device makes the host wait unless it is from pinned memory and does not block. A copy to the host always does.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.trainer.learner.attention import backends, cuda_flash
from penstock.trainer.learner.attention.variant import PLAIN, Variant

DEVICE = torch.device("meta")
ROOT = str(Path(backends.__file__).parents[3])
aten = torch.ops.aten
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_WAITING = {  # what computes a size or a number that the host needs
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.bincount.default,
    aten.equal.default, aten._unique2.default, aten.unique_consecutive.default,
}  # fmt: skip
_TAKE_A_NUMBER = {*_INDEXING, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill_.Tensor, aten.copy_.default}


class Event(NamedTuple):
    kind: Literal["mix", "sync", "to device", "to host"]
    place: str  # the innermost line of ours, and what it called outside of it
    thread: str
    num_bytes: int = 0
    blocks: bool = True  # the host waits


events: list[Event] = []
_pinned = WeakTensorKeyDictionary()


def copies() -> Counter[str]:
    """Return how often each function of ours copied to or from the device."""
    return Counter(_function(event) for event in events if event.kind in ("to device", "to host"))


def assert_waits(expected: dict[str, int]) -> None:
    """Check how often each function of ours made the host wait: ``"sync"`` or a copy, its file and its name."""
    found = Counter(_function(event) for event in events if event.blocks and event.kind != "mix")
    lines = Counter(f"{event.kind}: {event.place}" for event in events if event.blocks)
    assert found == expected, "the host waits for the device at\n" + "\n".join(f"{n} x {at}" for at, n in lines.items())


def _function(event: Event) -> str:
    file, _, after = event.place.partition(":")
    return f"{event.kind}: {file} {after.split()[1] if after else ''}".rstrip()


def mixes() -> Counter[str]:
    return Counter(event.place for event in events if event.kind == "mix")


def by_thread(kind: str) -> Counter[str]:
    """Return the bytes of the copies of a kind, by thread."""
    found: Counter[str] = Counter()
    for event in events:
        if event.kind == kind:
            found[event.thread] += event.num_bytes
    return found


def _note(kind: Any, what: str = "", num_bytes: int = 0, *, blocks: bool = True) -> None:
    called, frame = "", sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(ROOT):
        name = frame.f_code.co_filename
        if not called and "/torch/" not in name and name != __file__:
            called = f" > {Path(name).name}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    where = "outside"
    if frame is not None:
        file = frame.f_code.co_filename.removeprefix(ROOT).lstrip("/")
        where = f"{file}:{frame.f_lineno} {frame.f_code.co_qualname.partition('.<locals>')[0]}"
    thread = threading.current_thread().name.partition("_")[0]
    events.append(Event(kind, f"{where}{called}{what and f' ({what})'}", thread, num_bytes, blocks))


class Tagged(torch.Tensor):
    on_cpu: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Tagged:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.on_cpu = inner.detach()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor of a device has no array")

    def tolist(self) -> Any:
        _note("to host", "tolist", self.nbytes)
        return self.on_cpu.tolist()

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        return _sent(torch.tensor(data, dtype=dtype or self.dtype))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Makes and moves tensors to the device where that is asked for; entered by each thread that does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def plain(value: Any) -> Any:
    return value.on_cpu if isinstance(value, Tagged) else value


def tag(value: Any) -> Any:
    return Tagged(value) if isinstance(value, Tensor) and not isinstance(value, Tagged) else value


def _sent(value: Tensor) -> Tensor:
    _note("to device", "torch.tensor", value.nbytes)
    return Tagged(value)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    is_tagged = any(isinstance(tensor, Tagged) for tensor in tensors)
    goes = is_tagged if kwargs.get("device") is None else torch.device(kwargs["device"]).type == DEVICE.type
    is_pinned = bool(kwargs.get("pin_memory"))
    options = {name: plain(value) for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if kwargs.get("device") is not None:
        options["device"] = torch.device("cpu")
    if is_tagged and func is aten.histc.default:  # GPUs take integers
        args = (args[0].double(), *args[1:])
    result = func(*tree_map(plain, args), **options)
    if is_pinned:
        _pinned[result] = True
    if func is aten._to_copy.default:
        _copied(args[0], goes, is_tagged, kwargs.get("non_blocking", False))
    elif func is aten.copy_.default and isinstance(args[0], Tagged) != isinstance(args[1], Tagged):
        _copied(args[1], isinstance(args[0], Tagged), isinstance(args[1], Tagged), len(args) > 2 and args[2])
        return args[0]
    elif is_tagged:
        _judge(func, args, tensors)
    if not goes or func is aten._local_scalar_dense.default:
        return result
    wrapped = tree_map(tag, result)
    aliases = is_tagged and (func.is_view or func._schema.is_mutable)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if aliases else wrapped


def _copied(source: Tensor, goes: bool, was_there: bool, non_blocking: bool) -> None:
    if goes != was_there:
        free = goes and non_blocking and source in _pinned
        _note("to device" if goes else "to host", "", source.nbytes, blocks=not free)


def _judge(func: Any, args: Any, tensors: list[Tensor]) -> None:
    others = [tensor for tensor in tensors if not isinstance(tensor, Tagged)]
    if func in _INDEXING:
        indices = [index for index in args[1] if index is not None]
        for index in indices:
            if not isinstance(index, Tagged):
                _note("to device", "index", index.nbytes)
            if index.dtype in (torch.bool, torch.uint8):
                _note("sync", "boolean index")
        others = [other for other in others if not any(other is index for index in indices)]
    takes = torch.Tag.pointwise in func.tags or func in _TAKE_A_NUMBER
    if any(other.dim() or not takes for other in others):
        _note("mix", str(func))
    if func in _WAITING or (func is aten.repeat_interleave.Tensor and len(args) < 2):
        _note("sync", str(func).removeprefix("aten."))


def put(module: nn.Module) -> None:
    """Put the parameters, buffers and other tensors of a module on the device."""
    there: dict[int, nn.Parameter] = {}  # tied weights stay one
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                moved = nn.Parameter(Tagged(weight.data), requires_grad=weight.requires_grad)
                part._parameters[name] = there.setdefault(id(weight), moved)
        for held in (part._buffers, vars(part)):
            held.update({name: tag(value) for name, value in held.items() if isinstance(value, Tensor)})


@contextmanager
def tagged_device() -> Iterator[None]:
    """Have a device whose attention is `CudaFlash` with the kernels' arithmetic; raises AssertionError for what mixes devices."""
    make = torch.tensor

    def tensor(data: Any, **options: Any) -> Tensor:
        device = options.pop("device", None)
        goes = device is not None and torch.device(device) == DEVICE
        return _sent(make(data, **options)) if goes else make(data, device=device, **options)

    def kernel(compute: Any) -> Any:
        def on_device(*arguments: Any, **options: Any) -> Any:
            *tensors, part, scale = arguments
            on_host = replace(part, query_bounds=plain(part.query_bounds), key_bounds=plain(part.key_bounds))
            found = compute(*map(plain, tensors), on_host, scale)
            return tuple(map(tag, found)) if isinstance(tensors[0], Tagged) else found

        return on_device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(cuda_flash, "_activate", lambda implementation: None)
        patch.setattr(cuda_flash, "_cuda_kernel", kernel(varlen))
        patch.setattr(cuda_flash, "_cuda_kernel_backward", kernel(varlen_backward))
        patch.setattr(backends, "BACKENDS", (_OnDevice(),))
        patch.setattr(backends, "_choice", backends._Choice())
        events.clear()
        with Device():
            yield
    found = mixes()
    assert not found, "\n".join(f"{number} x {place}" for place, number in found.items())


class _OnDevice(cuda_flash.CudaFlash):
    def supports(self, query: Tensor, value: Tensor, variant: Variant = PLAIN) -> str | None:
        return None


def _scores(query: Tensor, key: Tensor, part: Any, scale: float) -> Tensor:
    """Scores [H, Q, K] of a variable-length call, -inf where a query does not attend: sequences are aligned at their ends."""
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) * scale
    sequences, places = [], []
    for tokens, bounds in ((query, part.query_bounds), (key, part.key_bounds)):
        numbers = torch.arange(len(tokens))
        sequences.append(torch.bucketize(numbers, bounds[1:], right=True))
        places.append(bounds[1:][sequences[-1]] - numbers)  # from the end
    distances = places[1][None] - places[0][:, None]
    before, after = (size if size >= 0 else len(key) + len(query) for size in part.window)
    allowed = (sequences[0][:, None] == sequences[1][None]) & (distances <= before) & (distances >= -after)
    return scores.masked_fill(~allowed, float("-inf"))


def varlen(query: Tensor, key: Tensor, value: Tensor, part: Any, scale: float) -> tuple[Tensor, Tensor]:
    """Torch's `varlen_attn` with its log-sum-exp, as it documents itself, in float32 as the kernels compute."""
    wide = [held.to(torch.promote_types(held.dtype, torch.float32)) for held in (query, key, value)]
    scores = _scores(wide[0], wide[1], part, scale)
    groups = query.shape[1] // key.shape[1]
    weights = scores.softmax(-1).to(query.dtype).to(wide[0].dtype)  # kernels round the probabilities
    out = torch.einsum("hqk,khd->qhd", weights, wide[2].repeat_interleave(groups, 1))
    return out.to(query.dtype), scores.logsumexp(-1)


def varlen_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, part: Any, scale: float
) -> tuple[Tensor, ...]:
    """Torch's `_flash_attention_backward`: probabilities from the log-sum-exp that it is given."""
    dtype = query.dtype
    grad, query, key, value, out = (
        held.to(torch.promote_types(held.dtype, torch.float32)) for held in (grad, query, key, value, out)
    )
    groups = query.shape[1] // key.shape[1]
    p = (_scores(query, key, part, scale) - lse.unsqueeze(-1)).exp()
    wide_k, wide_v = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    ds = p * (torch.einsum("qhd,khd->hqk", grad, wide_v) - (grad * out).sum(-1).T.unsqueeze(-1))
    ds, p = ds.to(dtype).to(grad.dtype), p.to(dtype).to(grad.dtype)
    found = (torch.einsum("hqk,qhd->khd", ds, query) * scale, torch.einsum("hqk,qhd->khd", p, grad))
    dk, dv = (held.unflatten(1, (key.shape[1], groups)).sum(2) for held in found)
    return tuple(held.to(dtype) for held in (torch.einsum("hqk,khd->qhd", ds, wide_k) * scale, dk, dv))

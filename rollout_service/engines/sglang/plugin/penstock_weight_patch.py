"""Change single words of an engine's weights where they are, instead of reading the whole model folder again.

An engine's processes import this file, in an environment that has torch, numpy and safetensors and nothing of Penstock. `build_map` finds the
place of every value of the folder in the engine's parameters, which fuse, shard and pad the folder's tensors; `apply_patch` writes words there.

A patch changes all ranks or none. Each rank checks the file, the version it serves, that every position is inside its parameter, and that every
word is the base's or the patch's; the ranks agree before the first write, and again after each has read back what it wrote. What was there
before is kept until then, and written back when a rank fails. So a patch may be applied twice, and repairs an engine that is half patched.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

MAGIC = b"PWP1"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_CHUNK = {"cpu": 1 << 15}  # words changed at once: on a CPU they stay in the cache between write and read
_WHOLE = 1 << 26
_POSITION_LIMIT = 1 << 32


class Refused(Exception):
    """The job cannot be done; nothing was changed."""


@dataclass
class Block:
    """Values of a tensor of the folder, in a parameter: ``dims`` are (length, stride in the tensor, stride in the parameter's storage)."""

    tensor: str
    parameter: str
    tensor_offset: int
    offset: int
    dims: list[tuple[int, int, int]]

    @property
    def num_words(self) -> int:
        return int(np.prod([length for length, _, _ in self.dims], dtype=np.int64))


@dataclass
class ParameterMap:
    blocks: list[Block] = field(default_factory=list)
    padding: dict[str, int] = field(default_factory=dict)  # words of a parameter that a load fills with a constant
    computed: dict[str, str] = field(default_factory=dict)  # parameter → operation that computes what is loaded into it
    unmapped: list[str] = field(default_factory=list)  # tensors that are loaded nowhere, or computed on first


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, each storage once: a tied head is its embedding."""
    by_storage: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        by_storage.setdefault(_storage(tensor), (name, tensor.detach()))
    return dict(by_storage.values())


def signature(tensor: torch.Tensor) -> str:
    """Return what positions in a parameter depend on."""
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()}"


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a parameter as integers [storage words], a view."""
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).as_strided((whole,), (1,), 0)


def build_map(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> ParameterMap:
    """Load the tensors without writing a word, and return where each would have been written.

    Only a copy of a view of a tensor is mapped; what a loader computes first is named instead.
    """
    model_params = parameters(model)
    recorder = _Recorder({_storage(tensor): name for name, tensor in model_params.items()})
    names: list[str] = []

    def feed() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            # A dispatch mode is per thread. With this mark SGLang's loaders copy in this one, instead of in a pool.
            tensor._sglang_runai_streamer_tensor = True  # type: ignore[attr-defined]
            recorder.sources[_storage(tensor)] = (name, tensor)
            names.append(name)
            yield name, tensor

    with torch.no_grad(), recorder:
        model.load_weights(feed())
    if {name: _storage(tensor) for name, tensor in parameters(model).items()} != {
        name: _storage(tensor) for name, tensor in model_params.items()
    }:
        raise Refused("a load replaces parameters instead of writing into them")
    seen = {block.tensor for block in recorder.found.blocks}
    recorder.found.unmapped = sorted(set(names) - seen)
    return recorder.found


class _Recorder(TorchDispatchMode):
    """Note each write into a parameter instead of executing it."""

    def __init__(self, name_by_storage: dict[int, str]) -> None:
        super().__init__()
        self.sources: dict[int, tuple[str, torch.Tensor]] = {}
        self.found = ParameterMap()
        self._own = name_by_storage

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        target = self._written(func, args, kwargs or {})
        if target is None:
            return func(*args, **(kwargs or {}))
        name = self._own[_storage(target)]
        if func is torch.ops.aten.copy_.default and self._is_view(args[1], target):
            self.found.blocks.append(_block(*self.sources[_storage(args[1])], args[1], name, target))
        elif func._schema.name in ("aten::fill_", "aten::zero_"):
            self.found.padding[name] = self.found.padding.get(name, 0) + target.numel()
        else:
            self.found.computed[name] = func._schema.name
        return target

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and _storage(tensor) in self._own:
                    return tensor
        return None

    def _is_view(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        entry = self.sources.get(_storage(source))
        return entry is not None and source.shape == target.shape and source.dtype == entry[1].dtype


def _block(name: str, tensor: torch.Tensor, source: torch.Tensor, parameter: str, target: torch.Tensor) -> Block:
    """Merge neighbouring dimensions that are contiguous on both sides: a row range has one, a block of columns two."""
    dims: list[tuple[int, int, int]] = []
    for length, there, here in zip(source.shape, source.stride(), target.stride(), strict=True):
        if length == 1:
            continue
        if dims and (dims[-1][1], dims[-1][2]) == (length * there, length * here):
            dims[-1] = (dims[-1][0] * length, there, here)
        else:
            dims.append((length, there, here))
    offset = int(source.storage_offset() - tensor.storage_offset())
    return Block(name, parameter, offset, int(target.storage_offset()), dims or [(1, 1, 1)])


def write_map(model: torch.nn.Module, parameter_map: ParameterMap, path: str) -> None:
    model_params = parameters(model)
    document = {
        "signatures": {
            name: signature(model_params[name]) for name in sorted({block.parameter for block in parameter_map.blocks})
        },
        "blocks": [[b.tensor, b.parameter, b.tensor_offset, b.offset, b.dims] for b in parameter_map.blocks],
        "computed": parameter_map.computed,
        "unmapped": parameter_map.unmapped,
    }
    Path(path).write_text(json.dumps(document), encoding="utf-8")


def folder_tensors(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model folder, mapped: their pages are read when a value is."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  (it is not a mapping)
                yield name, file.get_tensor(name)


def check_map(model: torch.nn.Module, parameter_map: ParameterMap, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Compare every mapped word with the folder, read-only; raise Refused unless the map explains the parameters whole."""
    model_params = parameters(model)
    covered = dict(parameter_map.padding)
    by_tensor: dict[str, list[Block]] = {}
    for block in parameter_map.blocks:
        by_tensor.setdefault(block.tensor, []).append(block)
        covered[block.parameter] = covered.get(block.parameter, 0) + block.num_words
    trained = {name for name, _ in model.named_parameters()} & model_params.keys()
    wrong = [n for n in trained - parameter_map.computed.keys() if covered.get(n, 0) != model_params[n].numel()]
    if wrong:
        raise Refused(f"{len(wrong)} parameters are not loaded whole from the folder, such as {min(wrong)}")
    for name, tensor in tensors:
        for block in by_tensor.get(name, ()):
            sizes = [length for length, _, _ in block.dims]
            offset = tensor.storage_offset() + block.tensor_offset
            there = torch.as_strided(tensor, sizes, [stride for _, stride, _ in block.dims], offset)
            parameter = model_params[block.parameter]
            here = torch.as_strided(words_of(parameter), sizes, [stride for _, _, stride in block.dims], block.offset)
            if not torch.equal(here, _as_served(there, parameter)):
                raise Refused(f"{block.parameter} does not hold the words of {name}")


def _as_served(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return values of a folder as the words that a load writes into the parameter."""
    served = values.to(device=parameter.device, dtype=parameter.dtype)
    return served.contiguous().view(_INTEGERS[parameter.element_size()])


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Segment:
    parameter: str
    signature: str  # of the parameter when it was mapped
    dtype: torch.dtype  # of the folder's words
    positions: np.ndarray  # uint32 [n], strictly increasing, in the parameter's storage
    new: np.ndarray  # integers [n], the folder's words
    old: np.ndarray


@dataclass(frozen=True)
class Patch:
    base: str
    version: str
    segments: list[Segment]
    num_bytes: int  # of the file


def read_patch(path: str) -> Patch:
    """Return a patch of one rank, a view of the file.

    The file: ``PWP1``, u32 bytes of the header, the header (JSON, padded to a multiple of 8 together with these 8 bytes), the payload. The
    header has ``base``, ``version``, ``checksum`` (the sum of the payload's u64 words modulo 2^64) and ``segments``: parameter, signature,
    dtype, words, and the byte in the payload at which its positions (u32), new words and old words begin, each padded to 8 bytes.
    Raises Refused for a file that is not of this format, or whose checksum differs.
    """
    with Path(path).open("rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    if data[:4].tobytes() != MAGIC:
        raise Refused(f"{path} is not a patch")
    start = 8 + int(data[4:8].view(np.uint32)[0])
    header = json.loads(data[8:start].tobytes())
    payload = data[start:]
    if len(payload) % 8 or int(np.add.reduce(payload.view(np.uint64), dtype=np.uint64)) != header["checksum"]:
        raise Refused(f"{path} has another checksum than its header says")
    segments = []
    for parameter, of_parameter, dtype_name, count, at in header["segments"]:
        dtype = getattr(torch, dtype_name)
        word = dtype.itemsize
        parts = []
        for kind, size in ((np.uint32, 4), (_NUMPY[word], word), (_NUMPY[word], word)):
            parts.append(payload[at : at + count * size].view(kind))
            at += -(-count * size // 8) * 8
        segments.append(Segment(parameter, of_parameter, dtype, *parts))
    return Patch(header["base"], header["version"], segments, len(data))


class _Write:
    """One segment on the device: what is there is gathered and compared first; then it may be written, and undone."""

    def __init__(self, segment: Segment, model_params: dict[str, torch.Tensor]) -> None:
        parameter = model_params.get(segment.parameter)
        if parameter is None or signature(parameter) != segment.signature:
            raise Refused(f"{segment.parameter} is not what was mapped")
        self._words = words_of(parameter)
        places = segment.positions
        if len(places) and (places[-1] >= len(self._words) or not (places[1:] > places[:-1]).all()):
            raise Refused(f"positions in {segment.parameter} are not increasing, or beyond its end")
        self.num_words = len(places)
        self._chunk = _CHUNK.get(parameter.device.type, _WHOLE)
        self._at = torch.from_numpy(places.view(np.int32)).to(parameter.device).to(torch.int64)
        if len(self._words) > _POSITION_LIMIT // 2:  # as int32 the larger ones were negative
            self._at &= _POSITION_LIMIT - 1
        self._new = _served_words(segment.new, segment.dtype, parameter)
        self._before = self._words.index_select(0, self._at)
        old = _served_words(segment.old, segment.dtype, parameter)
        self.num_strange = ((self._before != old) & (self._before != self._new)).sum()

    def write(self) -> torch.Tensor:
        """Write the new words; return how many are not there afterwards, a tensor []."""
        return self._put(self._new)

    def undo(self) -> torch.Tensor:
        return self._put(self._before)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameter that were read or written: before the write, by it, and read back."""
        return 3 * self.num_words * self._words.element_size()

    def _put(self, words: torch.Tensor) -> torch.Tensor:
        wrong = torch.zeros((), dtype=torch.int64, device=words.device)
        for start in range(0, self.num_words, self._chunk):
            at, part = self._at[start : start + self._chunk], words[start : start + self._chunk]
            self._words.index_copy_(0, at, part)
            wrong += (self._words.index_select(0, at) != part).sum()
        return wrong


def _served_words(words: np.ndarray, dtype: torch.dtype, parameter: torch.Tensor) -> torch.Tensor:
    values = torch.from_numpy(words).to(parameter.device)
    return values if dtype == parameter.dtype else _as_served(values.view(dtype), parameter)


Agree = Callable[[int], int]  # a number of this rank → the sum over all ranks; every rank must call it


def apply_patch(model: Any, path: str, served: str, agree: Agree) -> str:
    """Change this rank's words by the patch file; return figures. Raises Refused when any rank refuses: nothing has changed then.

    ``served`` is the version that the engine serves. Raises RuntimeError when the words before could not be written back.
    """
    writes, num_bytes, problem = [], 0, ""
    try:
        patch = read_patch(path)
        if served != patch.base:
            raise Refused(f"the patch is of version {patch.base}, the engine serves {served}")
        model_params = parameters(model)
        writes = [_Write(segment, model_params) for segment in patch.segments]
        num_bytes = patch.num_bytes + sum(write.num_bytes for write in writes)
        if strange := int(sum(write.num_strange for write in writes)):
            raise Refused(f"{strange} words are neither those of version {patch.base} nor of {patch.version}")
    except Exception as error:  # noqa: BLE001  (every rank must reach the agreement)
        problem = reason_of(error)
    if refusals := agree(bool(problem)):
        raise Refused(problem or f"{refusals} other ranks refuse")
    problem = _write_all(model, writes)
    if failures := agree(bool(problem)):
        _write_back(model, writes)
        raise Refused(f"{problem or f'{failures} other ranks failed'}; the words before are back")
    return f"words={agree(sum(write.num_words for write in writes))} bytes={agree(num_bytes)}"


def _write_all(model: Any, writes: list[_Write]) -> str:
    """Write and read back; return why that failed, or nothing."""
    try:
        if wrong := int(sum(write.write() for write in writes)):
            return f"{wrong} words are not what was written"
        _derive(model)
    except Exception as error:  # noqa: BLE001  (every rank must reach the agreement)
        return reason_of(error)
    return ""


def _write_back(model: Any, writes: list[_Write]) -> None:
    if wrong := int(sum(write.undo() for write in writes)):
        raise RuntimeError(f"{wrong} words could not be written back: the weights are unknown")
    _derive(model)


def _derive(model: Any) -> None:
    """Compute again what a model derives from its parameters, such as the absorbed projections of latent attention."""
    with torch.no_grad():
        if hasattr(model, "post_load_weights"):
            model.post_load_weights()


def reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"

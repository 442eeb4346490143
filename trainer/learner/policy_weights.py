"""The weights of the policy as they are exported and published: whole tensors under their Hugging Face names, on any number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import torch
from torch import Tensor

from penstock.protocol.weights.adapter_format import AdapterConfig, published_name
from penstock.protocol.weights.layout import (
    BUCKET_BYTES,
    TensorDigest,
    TensorSpec,
    WeightLayout,
    build_layout,
    weights_digest,
)
from penstock.trainer.learner import adapter, experts, vision
from penstock.trainer.learner.logprobs import CompletionScorer
from penstock.trainer.learner.trainable import Trainable
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing import changed_words
from penstock.trainer.publishing.changed_words import ChangedPiece, ReadStream, ReadWords, as_words
from penstock.trainer.publishing.rank_publisher import RankPublisher
from penstock.trainer.publishing.weight_buckets import (
    AdapterBase,
    AdapterWeights,
    ModelWeights,
    TensorSink,
    WeightBuckets,
    Weights,
    assign_buckets,
)

if TYPE_CHECKING:
    from penstock.trainer.learner.policy import Policy
    from penstock.trainer.ranks import RankSubgroup

R = TypeVar("R")
_EXCHANGE_DEADLINE = timedelta(minutes=30)  # ranks compare as long as each other; a rank that hangs ends the run
_SENT_AT_ONCE = 4 * 1024**3  # bytes of the buckets whose changes ranks exchange at once
_PREFIX = "language_model."  # of parameter names, added by wrapping the model


class PolicyWeights:
    """Copies of a policy's weights; `snapshot`, `copy_to` and `adapter_tensors` are called on all ranks together."""

    def __init__(self, trainable: Trainable, scorer: CompletionScorer, dims: ParallelDims) -> None:
        self._trainable, self._scorer, self._dims = trainable, scorer, dims
        self._read: Future[Any] | None = None
        self._family = str(scorer.language_model.config.get_text_config().model_type)

    def snapshot(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Copy the whole model to the CPU under its Hugging Face names, adapters merged; empty on ranks that write no files.

        Collective under ZeRO-3, which gathers one parameter at a time. Floating-point tensors are rounded to
        ``dtype`` on their device first, so that only the smaller copy is transferred.
        """
        wanted = {spec.name for spec in self._specs(dtype)} if self._dims.writes_files else set[str]()
        return {name: _to_cpu(values, dtype) for name, _, values in self.whole_tensors(wanted)}

    def layout(self, dtype: torch.dtype | None = None, *, bucket_bytes: int = BUCKET_BYTES) -> WeightLayout:
        return build_layout(self._specs(dtype), bucket_bytes=bucket_bytes)

    def _specs(self, dtype: torch.dtype | None) -> Iterator[TensorSpec]:
        for name, tensor, _ in self._published():
            rounded = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            dtype_name = str(rounded).removeprefix("torch.")
            for own_name, shape in experts.published(name, tuple(self._trainable.whole_shape(tensor)), self._family):
                yield TensorSpec(own_name, dtype_name, shape)

    def copy_to(self, sink: TensorSink, *, merge: bool = True, rounding: adapter.Rounding | None = None) -> None:
        """Give a sink its tensors, whole, one after the other. Collective under ZeRO-3, as `snapshot`.

        Adapters are merged, or omitted if ``merge`` is False. ``rounding`` counts the sink's merged weights.
        """
        for name, _, values in self.whole_tensors(sink.names, merge=merge, rounding=rounding):
            sink.put(name, values)

    @property
    def is_gathered(self) -> bool:
        """True if `copy_to` is collective."""
        return self._trainable.is_gathered

    @property
    def has_own_parts(self) -> bool:
        """True if `own_parts` can stand for `copy_to`: each rank has a part of each parameter, and nothing has to be merged."""
        is_whole = self.adapter_config() is None and self._trainable.is_partitioned
        return is_whole and self._dims.weight_group is None

    def own_parts(self, buffers: Container[str]) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the part of each published tensor that this rank holds under ZeRO-3: name, first value, values [n].

        ``buffers``, of which each rank has all, are those that this one yields.
        """
        for name, tensor, _ in self._published():
            if not hasattr(tensor, "ds_id"):
                if name in buffers:
                    yield name, 0, tensor
                continue
            start, part = self._trainable.own_part(tensor)
            offset = 0
            for own_name, shape in experts.published(name, tuple(self._trainable.whole_shape(tensor)), self._family):
                size = math.prod(shape)
                first, end = max(start, offset), min(start + part.numel(), offset + size)
                if first < end:
                    yield own_name, first - offset, part[first - start : end - start]
                offset += size

    def read_in(self, read: Future[Any]) -> None:
        """Have `wait_until_read` wait for what a thread reads of the weights."""
        self._read = read

    def wait_until_read(self) -> None:
        """Wait until nothing reads the weights that were copied last; whatever changes weights calls it before."""
        if self._read is not None:
            self._read.result()
            self._read = None

    def adapter_config(self) -> AdapterConfig | None:
        return adapter.config(self._scorer)

    def check_adapters(self, targets: Sequence[str]) -> None:
        adapter.check_layers(self._scorer, targets)

    def modules_beside_adapters(self) -> list[str]:
        return sorted({name.removeprefix(_PREFIX).rpartition(".")[0] for name, _ in self._trained_beside_adapters()})

    def adapter_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Copy the adapters to the CPU, by their layer's name followed by ``lora_A.weight`` or ``lora_B.weight``.

        A score that is trained beside adapters is among them, under its own name. Rounded to ``dtype``, if given. Empty without adapters and on ranks that write no files; collective under ZeRO-3.
        """
        copies: dict[str, Tensor] = {}
        for name, (down, up, _) in adapter.factors(self._scorer).items():
            layer = name.removeprefix(_PREFIX).removesuffix(".base_layer.weight")
            with self._trainable.whole(down, up):
                if self._dims.writes_files:
                    copies |= {
                        f"{layer}.lora_A.weight": _to_cpu(down, dtype),
                        f"{layer}.lora_B.weight": _to_cpu(up, dtype),
                    }
        for name, parameter in self._trained_beside_adapters():
            with self._trainable.whole(parameter):
                if self._dims.writes_files:
                    copies[name.removeprefix(_PREFIX)] = _to_cpu(parameter, dtype)
        return copies

    def _trained_beside_adapters(self) -> list[tuple[str, Tensor]]:
        return [
            (name, parameter)
            for name, parameter in self._scorer.named_parameters()
            if parameter.requires_grad and not adapter.is_adapter(name) and adapter.config(self._scorer) is not None
        ]

    def _published(self, *, merge: bool = True) -> Iterator[tuple[str, Tensor, tuple[Any, ...] | None]]:
        adapted = adapter.factors(self._scorer) if merge else {}
        for name, parameter in self._scorer.named_parameters():
            if not adapter.is_adapter(name):
                yield self._saved_name(adapter.plain_name(name)), parameter, adapted.get(name)
        persistent = self._scorer.state_dict().keys()
        for name, buffer in self._scorer.named_buffers():
            if name in persistent:
                yield self._saved_name(name), buffer, None

    def _saved_name(self, name: str) -> str:
        return vision.saved_name(self._scorer.language_model, name.removeprefix(_PREFIX))

    def whole_tensors(
        self, wanted: Container[str], *, merge: bool = True, rounding: adapter.Rounding | None = None
    ) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the published tensors that are ``wanted``, each until the next: name, 0, values. Collective, as `copy_to`."""
        for name, tensor, low_rank in self._published(merge=merge):
            with self._trainable.whole(tensor, *(low_rank[:2] if low_rank else ())) as (whole, *_):
                if low_rank:
                    if name in wanted:
                        yield name, 0, adapter.merged(whole, *low_rank, rounding=rounding)
                    continue
                for own_name, part in experts.parts(name, whole, self._family):
                    if own_name in wanted:
                        yield own_name, 0, part


def _to_cpu(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
        return tensor.to(dtype).to("cpu").contiguous()
    return tensor.to("cpu", copy=True).contiguous()


class WeightCopies:
    """Copies what is published: a whole model once, from then on the words that changed, read by a thread while training goes on."""

    def __init__(
        self, policy: Policy, dims: ParallelDims, all_ranks_root: Callable[[], str], *, kept_on_device: bool = False
    ) -> None:
        """``kept_on_device`` are the words that the next copy is compared with; else they are sent there from host memory each time."""
        self._policy, self._dims, self._all_ranks_root = policy, dims, all_ranks_root
        self._num_copies = 0
        self._newest: WeightBuckets | None = None
        self._source: tuple[str | None, int] | None = None  # dtype and bucket size of the newest
        self._base: tuple[str | None, AdapterBase] | None = None  # dtype that it was rounded to, and the copy
        self._kept_on_device, self._read_words = kept_on_device, ReadWords(kept_on_device)
        self._stream = ReadStream(policy.device)
        self._group: RankSubgroup | None = None
        self._thread = ThreadPoolExecutor(1, "weights")

    def copy(
        self,
        dtype: str | None,
        publisher: RankPublisher | None,
        *,
        as_adapter: bool,
        wanted: Sequence[int],
        bucket_bytes: int,
    ) -> Weights:
        self._num_copies += 1
        weights = self._policy.weights
        config = weights.adapter_config() if as_adapter else None
        if publisher is not None:
            publisher.discard(wanted)
        if config is None:
            buckets = self._copy_changed(dtype, bucket_bytes)
            if publisher is not None:
                publisher.hold(buckets)
            return ModelWeights(buckets, self._all_ranks_root)
        if self._base is None or self._base[0] != dtype:
            buckets = self._empty_buckets(dtype, bucket_bytes)
            weights.copy_to(buckets, merge=False)
            buckets.seal()
            self._base = dtype, AdapterBase(buckets, config, self._gather_root(buckets))
            if publisher is not None:
                publisher.hold(buckets, permanently=True)
        base = self._base[1]
        factors = {published_name(name): tensor for name, tensor in weights.adapter_tensors(dtype_of(dtype)).items()}
        is_zero = not any(name.endswith(".lora_B.weight") and tensor.any() for name, tensor in factors.items())
        if self._policy.steps_done == 0 and is_zero:  # the base itself is published
            return ModelWeights(base.buckets, lambda: base.root)
        return AdapterWeights.of(factors, base, copy_id=self._num_copies)

    def root(self) -> str:
        assert self._newest is not None, "weights are copied before their root is computed"
        return self._gather_root(self._newest)

    def _copy_changed(self, dtype: str | None, bucket_bytes: int) -> WeightBuckets:
        weights, before = self._policy.weights, self._newest
        weights.wait_until_read()
        self._stream.follow()
        if self._group is None and weights.has_own_parts and self._dims.buckets.count > 1:
            self._group = self._dims.ranks.subgroup(self._dims.buckets.count, deadline=_EXCHANGE_DEADLINE)
        if before is None or self._source != (dtype, bucket_bytes):
            self._newest = before = None  # releases the words before while these are copied
            self._newest, self._source = self._empty_buckets(dtype, bucket_bytes), (dtype, bucket_bytes)
            self._read_words = ReadWords(self._kept_on_device)
            copied = self._read(self._copy_whole, self._newest, apart=not weights.is_gathered)
            self._newest.seal(self._thread, copied)
            return self._newest
        changed_pieces = self._read(self._find, before, apart=not weights.is_gathered or weights.has_own_parts)
        self._newest = before.successor(changed_pieces, self._thread, copy_id=self._num_copies)
        return self._newest

    def _read(self, read: Callable[[WeightBuckets, bool], R], buckets: WeightBuckets, *, apart: bool) -> Future[R]:
        """Read the weights in the thread, or here if all ranks have to gather them in the order in which they train."""
        if not apart:
            future: Future[R] = Future()
            future.set_result(read(buckets, apart))
            return future
        future = self._thread.submit(read, buckets, apart)
        self._policy.weights.read_in(future)
        return future

    def _copy_whole(self, buckets: WeightBuckets, apart: bool) -> None:
        with self._stream.reading(apart=apart):
            self._policy.weights.copy_to(buckets)
            if self._group is not None:
                for tensor, start, words in self._words_of(buckets):
                    self._read_words.keep(tensor, start, words)

    def _find(self, before: WeightBuckets, apart: bool) -> list[ChangedPiece]:
        if self._group is None:
            return self._find_own(before, apart)
        try:
            changed_pieces = self._find_own(before, apart)
        except Exception as err:  # the other ranks would wait for this one's part
            self._group.exchange_bytes([changed_words.pack_failure(err)] * self._group.size)
            raise
        return self._exchange(changed_pieces, before.layout, self._group)

    def _find_own(self, before: WeightBuckets, apart: bool) -> list[ChangedPiece]:
        before.wait_until_written()
        with self._stream.reading(apart=apart):
            changed_pieces = [
                piece
                for tensor, start, words in self._words_of(before)
                for piece in self._read_words.changed(tensor, start, words, before.word_place)
            ]
        self._read_words.settle()
        return changed_pieces

    def _words_of(self, buckets: WeightBuckets) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the words that this rank reads: number of the tensor in the layout, first word, words [n] on their device."""
        weights, placed = self._policy.weights, list(buckets.layout.placed())
        numbers = {tensor.name: number for number, (_, _, tensor) in enumerate(placed)}
        read = weights.own_parts(buckets.names) if weights.has_own_parts else weights.whole_tensors(buckets.names)
        for name, start, values in read:
            number = numbers[name]
            yield number, start, as_words(values, getattr(torch, placed[number][1].dtype))

    def _exchange(
        self, changed_pieces: Sequence[ChangedPiece], layout: WeightLayout, group: RankSubgroup
    ) -> list[ChangedPiece]:
        """Send what was found in this rank's parts to the ranks of its buckets, and return what the others found in this one's."""
        shares = assign_buckets(layout, group.size)
        rank_of = {number: rank for rank, numbers in enumerate(shares) for number in numbers}
        bucket_of = [number for number, _, _ in layout.placed()]
        ends = list(itertools.accumulate(bucket.num_bytes for bucket in layout.buckets))
        received: list[ChangedPiece] = []
        for turn in range(ends[-1] // _SENT_AT_ONCE + 1):
            parts: list[list[ChangedPiece]] = [[] for _ in shares]
            for piece in changed_pieces:
                if ends[bucket_of[piece.tensor]] // _SENT_AT_ONCE == turn:
                    parts[rank_of[bucket_of[piece.tensor]]].append(piece)
            for rank, data in enumerate(group.exchange_bytes([changed_words.pack(part) for part in parts])):
                received += changed_words.unpack(data, rank)
        return received

    def _empty_buckets(self, dtype: str | None, bucket_bytes: int) -> WeightBuckets:
        layout = self._policy.weights.layout(dtype_of(dtype), bucket_bytes=bucket_bytes)
        share, pinned = self._dims.buckets, self._policy.device.type == "cuda"
        numbers = assign_buckets(layout, share.count)[share.index]
        return WeightBuckets(layout, numbers, copy_id=self._num_copies, pinned=pinned)

    def _gather_root(self, buckets: WeightBuckets) -> str:
        rows = msgpack.packb([[d.name, d.dtype, d.shape, d.xxh3] for d in buckets.digests()])
        assert rows is not None
        gathered = [row for data in self._dims.ranks.gather(rows) for row in msgpack.unpackb(data)]
        return weights_digest(TensorDigest(name, dtype, tuple(shape), xxh3) for name, dtype, shape, xxh3 in gathered)


def dtype_of(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)

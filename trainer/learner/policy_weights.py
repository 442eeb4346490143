"""The weights of the policy as they are exported and published: whole tensors under their Hugging Face names, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

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

_PREFIX = "language_model."  # of parameter names, added by wrapping the model


class PolicyWeights:
    """Copies of a policy's weights; `snapshot`, `copy_to` and `adapter_tensors` are called on all ranks together."""

    def __init__(self, trainable: Trainable, scorer: CompletionScorer, dims: ParallelDims) -> None:
        self._trainable, self._scorer, self._dims = trainable, scorer, dims
        self._family = str(scorer.language_model.config.get_text_config().model_type)

    def snapshot(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Copy the whole model to the CPU under its Hugging Face names, adapters merged; empty on ranks that write no files.

        Collective under ZeRO-3, which gathers one parameter at a time. Floating-point tensors are rounded to
        ``dtype`` on their device first, so that only the smaller copy is transferred.
        """
        copies: dict[str, Tensor] = {}
        self._visit(
            lambda _: self._dims.writes_files, lambda name, tensor: copies.__setitem__(name, _to_cpu(tensor, dtype))
        )
        return copies

    def layout(self, dtype: torch.dtype | None = None, *, bucket_bytes: int = BUCKET_BYTES) -> WeightLayout:
        specs = []
        for name, tensor, _ in self._published():
            rounded = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            dtype_name = str(rounded).removeprefix("torch.")
            for own_name, shape in experts.published(name, tuple(self._trainable.whole_shape(tensor)), self._family):
                specs.append(TensorSpec(own_name, dtype_name, shape))
        return build_layout(specs, bucket_bytes=bucket_bytes)

    def copy_to(self, sink: TensorSink, *, merge: bool = True, rounding: adapter.Rounding | None = None) -> None:
        """Give a sink its tensors, whole, one after the other. Collective under ZeRO-3, as `snapshot`.

        Adapters are merged, or omitted if ``merge`` is False. ``rounding`` counts the sink's merged weights.
        """
        self._visit(sink.names.__contains__, sink.put, merge=merge, rounding=rounding)

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

    def _visit(
        self,
        wanted: Callable[[str], bool],
        take: Callable[[str, Tensor], None],
        *,
        merge: bool = True,
        rounding: adapter.Rounding | None = None,
    ) -> None:
        for name, tensor, low_rank in self._published(merge=merge):
            with self._trainable.whole(tensor, *(low_rank[:2] if low_rank else ())) as (whole, *_):
                if low_rank:
                    if wanted(name):
                        take(name, adapter.merged(whole, *low_rank, rounding=rounding))
                    continue
                for own_name, part in experts.parts(name, whole, self._family):
                    if wanted(own_name):
                        take(own_name, part)


def _to_cpu(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
        return tensor.to(dtype).to("cpu").contiguous()
    return tensor.to("cpu", copy=True).contiguous()


class WeightCopies:
    def __init__(self, policy: Policy, dims: ParallelDims, all_ranks_root: Callable[[], str]) -> None:
        self._policy, self._dims, self._all_ranks_root = policy, dims, all_ranks_root
        self._num_copies = 0
        self._hashed: Future[list[TensorDigest]] | None = None  # of the model that was copied last
        self._base: tuple[str | None, AdapterBase] | None = None  # dtype that it was rounded to, and the copy

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
            self._hashed = None  # releases the copy before while this one is made
            buckets = self._copy_buckets(dtype, bucket_bytes, merge=True)
            self._hashed = buckets.hashed
            if publisher is not None:
                publisher.hold(buckets)
            return ModelWeights(buckets, self._all_ranks_root)
        if self._base is None or self._base[0] != dtype:
            buckets = self._copy_buckets(dtype, bucket_bytes, merge=False)
            self._base = dtype, AdapterBase(buckets, config, self._gather_root(buckets.hashed))
            if publisher is not None:
                publisher.hold(buckets, permanently=True)
        base = self._base[1]
        if self._policy.steps_done == 0:  # the adapter is still zero: the base itself is published
            return ModelWeights(base.buckets, lambda: base.root)
        factors = {published_name(name): tensor for name, tensor in weights.adapter_tensors(dtype_of(dtype)).items()}
        return AdapterWeights.of(factors, base, copy_id=self._num_copies)

    def root(self) -> str:
        return self._gather_root(self._hashed)

    def _copy_buckets(self, dtype: str | None, bucket_bytes: int, *, merge: bool) -> WeightBuckets:
        layout = self._policy.weights.layout(dtype_of(dtype), bucket_bytes=bucket_bytes)
        share = self._dims.buckets
        buckets = WeightBuckets(layout, assign_buckets(layout, share.count)[share.index], copy_id=self._num_copies)
        self._policy.weights.copy_to(buckets, merge=merge)
        buckets.seal()
        return buckets

    def _gather_root(self, hashed: Future[list[TensorDigest]] | None) -> str:
        assert hashed is not None, "weights are copied before their root is computed"
        rows = msgpack.packb([[d.name, d.dtype, d.shape, d.xxh3] for d in hashed.result()])
        assert rows is not None
        gathered = [row for data in self._dims.ranks.gather(rows) for row in msgpack.unpackb(data)]
        return weights_digest(TensorDigest(name, dtype, tuple(shape), xxh3) for name, dtype, shape, xxh3 in gathered)


def dtype_of(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)

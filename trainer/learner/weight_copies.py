"""Copies one rank's policy into the buckets that are published: a whole model, or an adapter and its base."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgpack
import torch

from penstock.protocol.weights.adapter_format import published_name
from penstock.protocol.weights.digest import TensorDigest, weights_digest
from penstock.trainer.learner.policy import Policy
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing.rank_publisher import RankPublisher
from penstock.trainer.publishing.snapshot import AdapterBase, AdapterWeights, ModelWeights, Weights
from penstock.trainer.publishing.weight_buckets import WeightBuckets, assign_buckets


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """What to copy, and what may be released first; the same on all ranks."""

    copy_id: int
    dtype: str | None  # to round to; None: as trained
    as_adapter: bool
    wanted: tuple[int, ...]  # ids of older copies that are still to be published
    bucket_bytes: int


class WeightCopies:
    """Copies the policy's weights on one rank. `copy` and `root` are called on all ranks together."""

    def __init__(self, policy: Policy, dims: ParallelDims, all_ranks_root: Callable[[], str]) -> None:
        """``all_ranks_root`` calls `root` on all ranks (rank 0)."""
        self._policy = policy
        self._dims = dims
        self._all_ranks_root = all_ranks_root
        self._hashed: Future[list[TensorDigest]] | None = None  # of the model that was copied last
        self._base: tuple[str | None, AdapterBase] | None = None  # dtype that it was rounded to, and the copy

    def copy(self, order: CopyOrder, publisher: RankPublisher | None) -> Weights:
        """Copy what is published; buckets of a model also go to ``publisher`` (all ranks but 0)."""
        config = self._policy.weights.adapter_config() if order.as_adapter else None
        if publisher is not None:
            publisher.discard(order.wanted)
        if config is None:
            return self._copy_model(order, publisher)
        if self._base is None or self._base[0] != order.dtype:
            buckets = self._copy_buckets(order, merge=False)
            self._base = order.dtype, AdapterBase(buckets, config, self._gather_root(buckets.hashed))
            if publisher is not None:
                publisher.hold(buckets, permanently=True)
        return self._copy_adapter(order, self._base[1])

    def root(self) -> str:
        """Return the root of the model that was copied last, on rank 0; collective."""
        return self._gather_root(self._hashed)

    def _copy_model(self, order: CopyOrder, publisher: RankPublisher | None) -> ModelWeights:
        self._hashed = None  # releases the copy before while this one is made
        buckets = self._copy_buckets(order, merge=True)
        self._hashed = buckets.hashed
        if publisher is not None:
            publisher.hold(buckets)
        return ModelWeights(buckets, self._all_ranks_root)

    def _copy_adapter(self, order: CopyOrder, base: AdapterBase) -> Weights:
        if self._policy.steps_done == 0:  # the adapter is still zero: the base itself is published
            return ModelWeights(base.buckets, lambda: base.root)
        tensors = self._policy.weights.adapter_tensors(dtype_of(order.dtype))
        factors = {published_name(name): tensor for name, tensor in tensors.items()}
        return AdapterWeights.of(factors, base, copy_id=order.copy_id)

    def _copy_buckets(self, order: CopyOrder, *, merge: bool) -> WeightBuckets:
        layout = self._policy.weights.layout(dtype_of(order.dtype), bucket_bytes=order.bucket_bytes)
        share = self._dims.buckets
        buckets = WeightBuckets(layout, assign_buckets(layout, share.count)[share.index], copy_id=order.copy_id)
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
    """Return the dtype of a name."""
    return None if name is None else getattr(torch, name)

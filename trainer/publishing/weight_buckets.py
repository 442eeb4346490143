"""One rank's part of a version: some of its buckets, each as the contiguous bytes that are published.

A model is copied straight into its buckets, so what is compared, hashed, stored and kept as the base of the
next patch is one and the same memory: nobody writes to it once it is sealed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from penstock.protocol.weights.bucket_codec import bucket_xxh3
from penstock.protocol.weights.digest import TensorDigest, weights_digest
from penstock.protocol.weights.layout import BUCKET_BYTES, TensorSpec, WeightLayout, bucket_digests, build_layout
from penstock.protocol.weights.manifest_chain import CatchUp
from penstock.protocol.weights.patch_segment import Bytes
from penstock.protocol.weights.version_reader import WeightReader, for_buckets


class Part:
    """Buckets ``numbers`` of a layout. Written by one thread, then sealed, then read by any."""

    def __init__(self, layout: WeightLayout, numbers: Iterable[int], *, taken: int = 0) -> None:
        """Make room; ``taken`` is what the ranks call this copy of the weights, the same on all of them."""
        self.layout = layout
        self.taken = taken
        self.raw: dict[int, Bytes] = {n: np.empty(layout.buckets[n].num_bytes, np.uint8) for n in numbers}
        self._places = {t.name: (n, t) for n in self.raw for t in layout.buckets[n].tensors}
        self._digests: Future[list[TensorDigest]] | None = None
        self._xxh3: dict[int, str] = {}

    @property
    def names(self) -> Collection[str]:
        """The tensors that belong here."""
        return self._places.keys()

    @property
    def num_bytes(self) -> int:
        """Raw bytes of these buckets."""
        return sum(raw.size for raw in self.raw.values())

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy a whole tensor to its place, rounded to the layout's dtype where the tensor is."""
        place, source = self._place(name), tensor.detach()
        if source.device.type != "cpu":
            source = source.to(place.dtype)  # so that only the smaller copy travels
        place.copy_(source)

    def seal(self) -> None:
        """Say that all is written; hashing begins in a thread."""
        pool = ThreadPoolExecutor(1, "digest")
        self._digests = pool.submit(self._hash)
        pool.shutdown(wait=False)

    @property
    def hashed(self) -> Future[list[TensorDigest]]:
        """The digest of every tensor, from the hashing thread."""
        assert self._digests is not None, "a part is sealed before it is read"
        return self._digests

    def digests(self) -> list[TensorDigest]:
        """Return the digest of every tensor, waiting for the hashing thread."""
        return self.hashed.result()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are here, in place: nobody writes to them."""
        return {name: self._place(name) for name in self._places}

    @property
    def state_root(self) -> str:
        """Root over the tensors that are here: that of the version, where all are."""
        return weights_digest(self.digests())

    def xxh3(self, number: int) -> str:
        """The xxh3-128 of a raw bucket; computed once."""
        if number not in self._xxh3:
            self._xxh3[number] = bucket_xxh3(self.raw[number])
        return self._xxh3[number]

    def know_xxh3(self, number: int, found: str | None) -> None:
        """Note the xxh3-128 of a raw bucket that is known from elsewhere, or compute it now."""
        if found is None:
            self.xxh3(number)
        else:
            self._xxh3[number] = found

    def _place(self, name: str) -> Tensor:
        number, placed = self._places[name]
        raw = torch.from_numpy(self.raw[number])[placed.byte_offset : placed.byte_offset + placed.num_bytes]
        return raw.view(getattr(torch, self.layout.buckets[number].dtype)).view(placed.shape)

    def _hash(self) -> list[TensorDigest]:
        return [d for n, raw in self.raw.items() for d in bucket_digests(self.layout.buckets[n], raw.data)]


def split(layout: WeightLayout, num_ranks: int) -> list[list[int]]:
    """Share buckets out over ranks, as equally by bytes as whole buckets allow: the largest first, to who has least.

    Everybody who knows the layout computes the same.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    filled = [0] * num_ranks
    for number in sorted(range(len(layout.buckets)), key=lambda n: (-layout.buckets[n].num_bytes, n)):
        rank = min(range(num_ranks), key=lambda r: (filled[r], r))
        shares[rank].append(number)
        filled[rank] += layout.buckets[number].num_bytes
    return [sorted(share) for share in shares]


def layout_of(tensors: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> WeightLayout:
    """Lay tensors out."""
    return build_layout(
        [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()],
        bucket_bytes=bucket_bytes,
    )


def part_of(tensors: Mapping[str, Tensor], *, taken: int = 0, bucket_bytes: int = BUCKET_BYTES) -> Part:
    """Copy all of these tensors into a part of their own layout, sealed."""
    layout = layout_of(tensors, bucket_bytes)
    part = Part(layout, range(len(layout.buckets)), taken=taken)
    for name, tensor in tensors.items():
        part.put(name, tensor)
    part.seal()
    return part


def read_part(plan: CatchUp, reader: WeightReader, numbers: Iterable[int] | None = None) -> Part:
    """Put buckets of a version together from its anchor and chain, all by default.

    Raises one of `weight_reader.UNUSABLE`, and what a store that is away raises.
    """
    layout = reader.layout(plan.target)
    part = Part(layout, range(len(layout.buckets)) if numbers is None else numbers)
    for raw in part.raw.values():
        raw[:] = 0
    if part.raw:
        for_buckets(list(part.raw), lambda number: reader.bring(plan, number, part.raw[number]))
    part.seal()
    return part

"""What changed is found where the weights are: every version equals a whole copy, and little goes to the host."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests import tagged_device
from tests.tagged_device import DEVICE, Device, Tagged, by_thread
from torch import Tensor

from penstock.protocol.weights import bucket_codec
from penstock.protocol.weights.bucket_codec import bucket_xxh3
from penstock.protocol.weights.layout import WeightLayout
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.learner.policy_weights import PolicyWeights, WeightCopies
from penstock.trainer.parallel_dims import Share
from penstock.trainer.publishing.rank_publisher import RankPublisher
from penstock.trainer.publishing.weight_buckets import WeightBuckets, copy_to_buckets, layout_of

BUCKET_BYTES = 60_000


class Held(PolicyWeights):
    """Weights as a policy publishes them, without a network."""

    is_gathered = has_own_parts = False  # type: ignore[assignment]

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.may_read = threading.Event()
        self.may_read.set()
        self._read: Future[Any] | None = None

    def adapter_config(self) -> None:
        return None

    def layout(self, dtype: torch.dtype | None = None, *, bucket_bytes: int = BUCKET_BYTES) -> WeightLayout:
        return layout_of({name: t if dtype is None else t.to(dtype) for name, t in self.tensors.items()}, bucket_bytes)

    def whole_tensors(self, wanted: Container[str], **_: object) -> Iterator[tuple[str, int, Tensor]]:
        assert self.may_read.wait(30.0)
        for name, tensor in self.tensors.items():
            if name in wanted:
                yield name, 0, tensor


def copies_of(weights: Held, *, kept_on_device: bool = False) -> WeightCopies:
    device = next(iter(weights.tensors.values())).device
    policy: Any = SimpleNamespace(weights=weights, steps_done=1, device=device)
    dims: Any = SimpleNamespace(buckets=Share(), ranks=None)
    return WeightCopies(policy, dims, str, kept_on_device=kept_on_device)


def copied(copies: WeightCopies, publisher: RankPublisher, dtype: str | None, *wanted: int) -> WeightBuckets:
    buckets = copies.copy(dtype, publisher, as_adapter=False, wanted=wanted, bucket_bytes=BUCKET_BYTES).buckets
    copies._policy.weights.wait_until_read()
    publisher._thread.submit(bool).result()  # older versions are forgotten
    return buckets


def model(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {"z.weight": (300, 64), "a.weight": (100, 64), "m.bias": (7,), "b.table": (900, 64), "c.scale": ()}
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def change(tensors: Mapping[str, Tensor], share: float, random: np.random.Generator, but: str = "") -> None:
    for name, tensor in tensors.items():
        if name != but:
            words = tensor.view(-1).view(torch.uint8).numpy()
            words[np.flatnonzero(random.random(words.size) < share)] ^= 1 << int(random.integers(8))


def assert_is(buckets: WeightBuckets, expected: WeightBuckets) -> None:
    assert buckets.digests() == expected.digests()
    for number, raw in expected.raw.items():
        assert bytes(buckets.words(number)) == bytes(raw)
        assert buckets.xxh3(number) == bucket_xxh3(raw)


@pytest.mark.parametrize(
    ("held", "published"),
    [(torch.bfloat16, None), (torch.float32, None), (torch.float32, "bfloat16"), (torch.float16, None)],
)
def test_every_version_equals_a_whole_copy(held: torch.dtype, published: str | None) -> None:
    """Words, hashes and segments, whatever share changed, where versions between are forgotten or kept."""
    tensors, random = model(held), np.random.default_rng(0)
    publisher = RankPublisher(None, "run")  # type: ignore[arg-type]
    copies, versions, wholes = copies_of(Held(tensors)), list[WeightBuckets](), list[WeightBuckets]()
    for version, share in enumerate([0.0, 0.01, 0.0, 0.002, 0.5, 0.01, 0.9, 0.01, 0.02, 0.02]):
        if version == 8:
            publisher._committed = versions[4]
        change(tensors, share, random, but="b.table" if version % 2 else "")
        versions.append(copied(copies, publisher, published, versions[6].copy_id if version > 6 else 0))
        rounded = (
            tensors if published is None else {name: t.to(getattr(torch, published)) for name, t in tensors.items()}
        )
        wholes.append(copy_to_buckets(rounded, bucket_bytes=BUCKET_BYTES))
        assert_is(versions[-1], wholes[-1])
    for old, new in pairwise([0, 1, 2, 3, 4, 6, 8, 9]):
        assert_is(versions[old], wholes[old])
        for number, raw in wholes[new].raw.items():
            word_bytes = versions[new].layout.buckets[number].word_bytes
            expected = bucket_codec.encode(wholes[old].raw[number], raw, word_bytes, bucket=number)
            assert versions[new].encoded_since(versions[old], number) == expected
    assert versions[4]._next is versions[6]
    assert versions[6]._next is versions[8]  # which was the newest when others were forgotten


@pytest.mark.parametrize("kept_on_device", [False, True])
def test_only_positions_and_words_leave_the_device(kept_on_device: bool) -> None:
    """Six bytes for each changed word, by the thread that reads; what was read last goes back unless kept there."""
    tagged_device.events.clear()
    plain, random, publisher = model(), np.random.default_rng(0), RankPublisher(None, "run")  # type: ignore[arg-type]
    num_bytes = sum(tensor.nbytes for tensor in plain.values())
    weights = Held({name: Tagged(tensor) for name, tensor in plain.items()})
    copies = copies_of(weights, kept_on_device=kept_on_device)
    copies._thread = ThreadPoolExecutor(1, "weights", initializer=lambda: Device().__enter__())
    before = copied(copies, publisher, None)
    assert by_thread("to host") == {"weights": num_bytes}
    for version in range(3):
        tagged_device.events.clear()
        change(plain, 0.01, random)
        after = copied(copies, publisher, None)
        assert_is(after, copy_to_buckets(plain, bucket_bytes=BUCKET_BYTES))
        num_changed = sum(after.encoded_since(before, number).num_changed for number in after.raw)
        assert num_changed > 0.01 * num_bytes / 2
        assert by_thread("to host") == {"weights": 6 * num_changed}
        is_sent = version == 0 or not kept_on_device
        assert by_thread("to device") == ({"weights": num_bytes} if is_sent else {})
        assert {event.thread for event in tagged_device.events} == {"weights"}
        assert sum(event.kind == "sync" for event in tagged_device.events) == len(plain)
        assert not any(event.kind == "mix" for event in tagged_device.events)
        before = after
    assert {tensor.device for tensor in weights.tensors.values()} == {DEVICE}


def test_weights_are_read_before_they_change() -> None:
    """A copy returns before anything is read; who changes the weights waits for the thread that reads them."""
    tensors, publisher = model(), RankPublisher(None, "run")  # type: ignore[arg-type]
    weights = Held(tensors)
    copies = copies_of(weights)
    copied(copies, publisher, None)
    expected = copy_to_buckets(tensors, bucket_bytes=BUCKET_BYTES)
    weights.may_read.clear()
    buckets = copies.copy(None, publisher, as_adapter=False, wanted=(), bucket_bytes=BUCKET_BYTES).buckets
    changed: list[bool] = []

    def update() -> None:
        weights.wait_until_read()
        changed.append(weights.may_read.is_set())
        change(tensors, 0.5, np.random.default_rng(0))

    thread = threading.Thread(target=update)
    thread.start()
    weights.may_read.set()
    thread.join()
    assert changed == [True]
    assert_is(buckets, expected)


def test_a_copy_that_failed_is_not_published() -> None:
    """The thread that reads may run out of the device's memory: what it did not copy is no version."""

    class Broken(Held):
        def whole_tensors(self, wanted: Container[str], **_: object) -> Iterator[tuple[str, int, Tensor]]:
            yield next(super().whole_tensors(wanted))
            raise RuntimeError("out of memory")

    copies, publisher = copies_of(Broken(model())), RankPublisher(None, "run")  # type: ignore[arg-type]
    buckets = copies.copy(None, publisher, as_adapter=False, wanted=(), bucket_bytes=BUCKET_BYTES).buckets
    with pytest.raises(RuntimeError, match="out of memory"):
        publisher.digests(buckets.copy_id)
    with pytest.raises(RuntimeError, match="out of memory"):
        buckets.words(0)


def test_versions_behind_which_a_full_snapshot_is_written_do_not_add_up() -> None:
    """However many versions are committed meanwhile, what they replaced takes less than two models."""
    tensors, random, publisher = model(), np.random.default_rng(0), RankPublisher(None, "run")  # type: ignore[arg-type]
    copies, retained = copies_of(Held(tensors)), copy_to_buckets(tensors, bucket_bytes=BUCKET_BYTES)
    first = copied(copies, publisher, None)
    publisher.commit(first.copy_id, retain=True)
    for _ in range(20):
        change(tensors, 0.02, random)
        publisher.commit(copied(copies, publisher, None).copy_id, retain=False)
    num_bytes, version = 0, publisher._retained
    while version is not None:
        num_bytes += sum(replaced.nbytes for replaced in version._replaced.values())
        version = version._next
    assert num_bytes < 2 * first.layout.num_bytes
    assert_is(first, retained)
    newest = publisher._committed
    assert newest is not None
    assert_is(newest, copy_to_buckets(tensors, bucket_bytes=BUCKET_BYTES))


def test_a_tensor_of_which_half_changed_counts_only_what_changed() -> None:
    """All its words are brought to the host; a worker refuses a segment that counts words whose bytes are all equal."""
    tensors, random = model(), np.random.default_rng(0)
    copies, copy = copies_of(Held(tensors)), {"as_adapter": False, "wanted": (), "bucket_bytes": 10 * BUCKET_BYTES}
    before = copies.copy(None, None, **copy).buckets  # type: ignore[arg-type]
    copies._policy.weights.wait_until_read()
    for name, share in {"a.weight": 0.5, "b.table": 0.02}.items():
        words = tensors[name].view(-1).view(torch.int16).numpy()
        words[random.random(words.size) < share] ^= 1
    after = copies.copy(None, None, **copy).buckets  # type: ignore[arg-type]
    (bucket,) = after.layout.buckets
    encoded = after.encoded_since(before, 0)
    assert encoded == bucket_codec.encode(before.words(0), after.words(0), 2)
    bucket_codec.parse(encoded.codec, encoded.data, num_words=bucket.num_words, word_bytes=2)


class Parts(Held):
    """One of two ranks' halves of each tensor; the words that they find are exchanged between threads."""

    is_gathered = has_own_parts = True  # type: ignore[assignment]
    fails = False

    def __init__(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        super().__init__(tensors)
        self.rank = rank

    def own_parts(self, buffers: Container[str]) -> Iterator[tuple[str, int, Tensor]]:
        for name, tensor in self.tensors.items():
            if self.fails:
                raise RuntimeError("out of memory")
            halves = tensor.view(-1).tensor_split(2)
            yield name, halves[0].numel() * self.rank, halves[self.rank]


class Exchange:
    size = 2

    def __init__(self, rank: int, sent: list[list[bytes]], barrier: threading.Barrier) -> None:
        self._rank, self._sent, self._barrier = rank, sent, barrier

    def exchange_bytes(self, parts: list[bytes]) -> list[bytes]:
        self._sent[self._rank] = parts
        self._barrier.wait(30.0)
        received = [sent[self._rank] for sent in self._sent]
        self._barrier.wait(30.0)
        return received


def test_a_rank_whose_reading_failed_says_so_to_those_that_wait_for_its_part() -> None:
    """Else they wait for its part for a day while its training thread waits for rank 0."""
    tensors, sent, barrier = model(), [list[bytes](), list[bytes]()], threading.Barrier(2)
    weights = [Parts(tensors, rank) for rank in range(2)]
    copies = [copies_of(part) for part in weights]
    for rank, of_rank in enumerate(copies):
        dims: Any = of_rank._dims
        dims.buckets = Share(rank, 2)
        dims.ranks = SimpleNamespace(subgroup=lambda _, deadline, rank=rank: Exchange(rank, sent, barrier))

    def copy() -> list[WeightBuckets]:
        how: Any = {"as_adapter": False, "wanted": (), "bucket_bytes": BUCKET_BYTES}
        return [of_rank.copy(None, None, **how).buckets for of_rank in copies]  # type: ignore[misc]

    for share in (0.0, 0.01, 0.9):  # of which all words are sent
        change(tensors, share, np.random.default_rng(0))
        for buckets in copy():
            whole = copy_to_buckets(tensors, bucket_bytes=BUCKET_BYTES)
            assert all(bytes(buckets.words(number)) == bytes(whole.raw[number]) for number in buckets.raw)
    weights[1].fails = True
    leader, other = copy()
    with pytest.raises(PublicationFailed, match="rank 1 could not read its part of the weights: RuntimeError: out of"):
        leader.hashed.result(60.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        other.hashed.result(60.0)

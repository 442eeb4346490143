"""Mutates segments, manifests, layouts and adapters, and checks what the readers guarantee.

    python -m tests.rigs.fuzz_patches --mutations 200000

Every mutation must end in the one named error, or in bytes that the hash then accepts or refuses rightly; nothing is
written outside the bucket, and memory stays within a few buckets. The whole run is under an address space limit, so that
an allocation a hostile field could talk a reader into kills the run.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import struct
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from penstock.protocol.errors import ChainBroken, MalformedFact, MalformedWeights, SegmentRefused
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights import bucket_codec
from penstock.protocol.weights.adapter_format import AdapterConfig
from penstock.protocol.weights.export import merge_into, read_factors
from penstock.protocol.weights.layout import WeightLayout
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.manifest_chain import CatchUp, FetchManifest, Held, plan_catch_up, verify_base
from penstock.protocol.weights.patch_segment import WORD_BYTES
from tests.protocol.weights.published_weights import (
    ADAPTER,
    ADAPTER_LAYOUT,
    LAYOUT,
    PublishedWeights,
    State,
    WrongBytes,
    changed_state,
    packed,
    random_state,
)

CANARY = 64  # bytes on either side of the bucket that must not change
BOMB_BYTES = 64 * 1024**2
SPARE_BYTES = 768 * 1024**2  # address space the whole run may take on top of what the imports took
TRACED_EVERY = 50
NUMBERS = [0, 1, 2, 3, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
LEAVES: list[Any] = [None, True, -1, 0, 1, 2**53, 2**64, 1e308, "", "0" * 32, "0" * 64, "x" * 10_000, [], {}, [[]] * 50]


@dataclass
class Counters:
    """What became of the mutations, by kind and outcome; ``peak_bytes`` is the largest traced allocation."""

    outcomes: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0

    @property
    def num_mutations(self) -> int:
        return sum(self.outcomes.values())


@dataclass(frozen=True)
class Sample:
    """A valid segment, the bucket before it, and the bucket after it."""

    codec: str
    data: bytes
    word_bytes: int
    old: np.ndarray
    new: np.ndarray


def samples(rng: np.random.Generator) -> list[Sample]:
    """Draw valid segments of every word size and codec, sparse and dense, with and without fillers."""
    found = []
    for word_bytes in WORD_BYTES:
        for num_words, density in ((1, 1.0), (700, 0.02), (700, 0.4), (200_000 // word_bytes, 0.00002), (1500, 0.9)):
            old = rng.integers(0, 256, num_words * word_bytes, dtype=np.uint8)
            new = old.copy()
            hit = rng.random(num_words) < density
            hit[-1] = True
            new.reshape(num_words, word_bytes)[hit] += 1
            count = int(hit.sum())
            raw = bucket_codec.encode_whole(new, word_bytes, bucket=1, num_changed=count)
            found.append(Sample("raw_zstd", raw, word_bytes, old, new))
            found.append(Sample("gapabs1", packed(old, new, word_bytes, bucket=1), word_bytes, old, new))
    return found


def bombs() -> list[bytes]:
    """Return zstd frames of 64 MiB decoded size that declare it, declare nothing, or whose declared size can be rewritten."""
    zeros = bytes(BOMB_BYTES)
    honest = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(zeros)
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(zeros)
    skippable = struct.pack("<II", 0x184D2A50, 32) + bytes(32)
    return [honest, silent, skippable, honest + honest, silent + honest]


def forged(frame: bytes, content_size: int) -> bytes:
    """Return a frame that claims another size: its header is rewritten, the blocks are kept."""
    params = zstandard.get_frame_parameters(frame)
    body = frame[zstandard.frame_header_size(frame) :]
    descriptor = 0b1110_0000 | (0b100 if params.has_checksum else 0)  # eight bytes of size, single segment
    return frame[:4] + bytes([descriptor]) + struct.pack("<Q", content_size) + body


class Fuzzer:
    def __init__(self, seed: int) -> None:
        """Prepare valid material; the same seed gives the same mutations."""
        self.random = random.Random(seed)
        rng = np.random.default_rng(seed)
        self.samples = samples(rng)
        self.bombs = bombs()
        self.run = PublishedWeights()
        self.start: State = random_state(rng)
        self.states = [self.start]
        self.manifests = [self.run.publish_anchor(self.start)]
        for density in (0.02, 0.6, 0.02):
            self.states.append(changed_state(self.run.state, rng, density))
            self.manifests.append(self.run.publish(self.states[-1]))
        self.factors = rng.integers(0, 256, ADAPTER_LAYOUT.num_bytes, dtype=np.uint8)
        self.factors[1::2] &= 0x3F  # bfloat16 that is finite
        self.adapter_manifest = self.run.publish_adapter(self.factors)
        self.manifests.append(self.adapter_manifest)
        self.states.append([self.factors])
        self.known = {}
        for manifest in self.manifests[1:]:
            for ancestor in (manifest.parent, manifest.anchor):
                assert ancestor is not None
                self.known[ancestor.manifest.sha256] = VersionManifest.from_json(
                    self.run.objects[ancestor.manifest.key]
                )
        self.counters = Counters()

    def go(self, num_mutations: int) -> Counters:
        """Try mutations; raises AssertionError, or the unexpected error of a reader, at the first failure."""
        kinds = [self.segment, self.segment, self.segment, self.manifest, self.layout, self.adapter]
        for number in range(num_mutations):
            kind = kinds[number % len(kinds)]
            traced = self.random.randrange(TRACED_EVERY) == 0
            try:
                if traced:
                    tracemalloc.start()
                outcome = kind()
                if traced:
                    self.counters.peak_bytes = max(self.counters.peak_bytes, tracemalloc.get_traced_memory()[1])
            except BaseException as err:
                err.add_note(f"mutation {number} of this seed, a {kind.__name__}")
                raise
            finally:
                if traced:
                    tracemalloc.stop()
            self.counters.outcomes[f"{kind.__name__}: {outcome}"] += 1
        return self.counters

    def segment(self) -> str:
        """Mutate a segment; one that passes is applied between canaries and compared by hash."""
        sample = self.random.choice(self.samples)
        data = self._mutated_segment(sample)
        num_words = sample.old.size // sample.word_bytes
        try:
            change = bucket_codec.parse(sample.codec, data, num_words=num_words, word_bytes=sample.word_bytes, bucket=1)
        except SegmentRefused:
            return "refused"
        memory = np.full(sample.old.size + 2 * CANARY, 0xA5, np.uint8)
        target = memory[CANARY:-CANARY]
        target[:] = sample.old
        bucket_codec.apply(change, target)
        assert (memory[:CANARY] == 0xA5).all(), "written before the bucket"
        assert (memory[-CANARY:] == 0xA5).all(), "written behind the bucket"
        once = target.copy()
        bucket_codec.apply(change, target)
        assert np.array_equal(once, target), "applied twice is not applied once"
        right = np.array_equal(target, sample.new)
        assert right == (bucket_codec.bucket_xxh3(target) == bucket_codec.bucket_xxh3(sample.new))
        return "harmless" if right else "applied, refused by the bucket's hash"

    def manifest(self) -> str:
        """Mutate the head's manifest and follow it as a mirror would, without the sha256 check that would refuse it first."""
        index = self.random.randrange(len(self.manifests))
        data = self._mutated_json(self.manifests[index].to_json())
        try:
            head = VersionManifest.from_json(data)
        except MalformedFact:
            return "refused"
        held_index = self.random.randrange(len(self.manifests))
        held = Held(PolicyVersion(held_index), self.manifests[held_index].state_root)
        held = self.random.choice([held, None])
        try:
            plan = plan_catch_up(head, self.known, held)
        except ChainBroken:
            return "chain refused"
        if isinstance(plan, FetchManifest):
            return "asks for another manifest"
        if head.base is not None:
            found = self.known.get(head.base.manifest.sha256)
            if found is None:
                return "asks for another manifest"
            try:
                verify_base(head, found)
            except ChainBroken:
                return "base refused"
        return self._followed(plan, held_index)

    def layout(self) -> str:
        """Mutate a layout; a layout that passes has consistent sizes."""
        try:
            layout = WeightLayout.from_json(self._mutated_json(LAYOUT.to_json()))
        except MalformedFact:
            return "refused"
        assert layout.num_bytes == sum(tensor.num_bytes for _, _, tensor in layout.placed())
        return "harmless" if layout.layout_id == LAYOUT.layout_id else "another layout by its id"

    def adapter(self) -> str:
        """Mutate an adapter's config or layout; what passes is merged into its base, and into no other weight."""
        which = self.random.randrange(2)
        config_json, layout_json = ADAPTER.to_json(), ADAPTER_LAYOUT.to_json()
        try:
            config = AdapterConfig.from_json(self._mutated_json(config_json) if which else config_json)
            layout = WeightLayout.from_json(layout_json if which else self._mutated_json(layout_json))
            if [bucket.num_words for bucket in layout.buckets] != [ADAPTER_LAYOUT.num_words]:
                return "refused, not the manifest's size"
            if layout.num_bytes != self.factors.size:
                return "refused, not the object's size"
            factors = read_factors(config, layout, self.factors, LAYOUT)
        except (MalformedFact, MalformedWeights):
            return "refused"
        for number, bucket in enumerate(LAYOUT.buckets):
            raw = np.zeros(bucket.num_bytes, np.uint8)
            merge_into(raw, bucket, factors, config.scale)
            adapted = [placed for placed in bucket.tensors if placed.name in factors]
            for placed in adapted:
                raw[placed.byte_offset : placed.byte_offset + placed.num_bytes] = 0
            assert not raw.any(), f"written beside the adapted weights of bucket {number}"
        return "harmless"

    def _followed(self, plan: CatchUp, held_index: int) -> str:
        state = self.states[held_index] if plan.anchor is None else []
        try:
            reached = self.run.carry_out(plan, state)
        except (WrongBytes, SegmentRefused, ChainBroken):
            return "refused while it was carried out"
        hashes = [bucket_codec.bucket_xxh3(raw) for raw in reached]
        assert hashes == [bucket.new_xxh3 for bucket in plan.target.buckets], "served something else than was promised"
        return "harmless"

    def _mutated_segment(self, sample: Sample) -> bytes:
        how = self.random.randrange(8)
        data = bytearray(sample.data)
        if how == 0:
            self._flip(data)
        elif how == 1:
            del data[self.random.randrange(len(data)) :]
        elif how == 2:
            data += self.random.randbytes(self.random.randrange(1, 40))
        elif how == 3:
            self._edit_number(data, sample)
        elif how == 4:
            start = self.random.randrange(len(data))
            del data[start : start + self.random.randrange(1, 30)]
        elif how == 5:
            other = self.random.choice(self.samples).data
            data = bytearray(data[: self.random.randrange(len(data))] + other[self.random.randrange(len(other)) :])
        else:
            data = bytearray(self._rebuilt(sample, bomb=how == 6))
        return bytes(data)

    def _flip(self, data: bytearray) -> None:
        for _ in range(self.random.choice([1, 1, 1, 2, 8])):
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)

    def _edit_number(self, data: bytearray, sample: Sample) -> None:
        """Overwrite one number of the header, or several, with a hostile one."""
        for _ in range(self.random.choice([1, 1, 2, 3])):
            at = self.random.randrange(4, min(len(data), 32 + 40 * sample.word_bytes)) // 4 * 4
            old = int.from_bytes(data[at : at + 8], "little")
            new = self.random.choice([*NUMBERS, old + 1, old - 1, old * 2, sample.old.size]) % 2**64
            size = min(self.random.choice([1, 4, 8]), len(data) - at)
            data[at : at + size] = new.to_bytes(8, "little")[:size]

    def _rebuilt(self, sample: Sample, *, bomb: bool) -> bytes:
        """Write a header that agrees with itself around frames that do not: bombs, forged sizes, hostile contents."""
        num_words = sample.old.size // sample.word_bytes
        if sample.codec == "raw_zstd":
            frames = [self._frame(num_words, bomb=bomb) for _ in range(sample.word_bytes)]
            head = struct.pack("<4sB3xIIQQ", b"RAW1", sample.word_bytes, 1, 0, num_words, num_words)
            return head + b"".join(struct.pack("<Q", len(f)) for f in frames) + b"".join(frames)
        heads, frames, counts = [], [], []
        for _ in range(sample.word_bytes):
            num_values = self.random.choice([1, num_words, self.random.randint(1, num_words)])
            num_gaps = num_values + self.random.choice([0, 0, num_words // 65535, 1])
            if bomb and self.random.random() < 0.2:  # a header that agrees with the bomb
                num_values = num_gaps = BOMB_BYTES
                three = [self.bombs[0]] * 3
            else:
                three = [self._frame(count, bomb=bomb) for count in (num_gaps, num_gaps, num_values)]
            heads.append(struct.pack("<QQQQQ", num_values, num_gaps, *map(len, three)))
            frames += three
            counts.append(num_values)
        head = struct.pack("<4sB3xIIQQ", b"GAB1", sample.word_bytes, 1, 0, num_words, max(counts))
        return head + b"".join(heads) + b"".join(frames)

    def _frame(self, expected: int, *, bomb: bool) -> bytes:
        if bomb and self.random.random() < 0.5:
            frame = self.random.choice(self.bombs)
            return forged(frame, expected) if frame is self.bombs[0] and self.random.random() < 0.7 else frame
        fill = self.random.choice([0, 0, 0, 1, 254, 255])
        size = max(0, expected + self.random.choice([0, 0, 0, 0, 1, -1]))
        content = self.random.choice([bytes([fill]) * size, self.random.randbytes(size)])
        frame = zstandard.ZstdCompressor(level=1).compress(content)
        return forged(frame, expected) if self.random.random() < 0.3 else frame

    def _mutated_json(self, data: bytes) -> bytes:
        how = self.random.randrange(5)
        raw = bytearray(data)
        if how == 0:
            self._flip(raw)
            return bytes(raw)
        if how == 1:
            return bytes(raw[: self.random.randrange(len(raw))])
        if how == 2:
            depth = self.random.choice([1, 50, 100_000])
            return b"[" * depth + bytes(raw) + b"]" * depth
        document = json.loads(data)
        for _ in range(self.random.choice([1, 1, 2, 4])):
            self._edit(document)
        return json.dumps(document).encode()

    def _edit(self, document: Any) -> None:
        """Replace, remove or swap a random value of a JSON document."""
        at: Any = document
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                return
            key = self.random.choice(keys)
            if isinstance(at[key], dict | list) and at[key] and self.random.random() < 0.8:
                at = at[key]
                continue
            break
        how = self.random.randrange(4)
        if how == 0:
            del at[key]
        elif how == 1:
            at[key] = copy.deepcopy(self.random.choice([*NUMBERS, *LEAVES]))
        elif how == 2:
            at[key] = copy.deepcopy(at[self.random.choice(keys)])
        elif isinstance(at[key], int):
            at[key] += self.random.choice([-1, 1])
        elif isinstance(at[key], list):
            at[key] = at[key] * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    fuzzer = Fuzzer(wanted.seed)
    prepared = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counters = fuzzer.go(wanted.mutations)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - prepared
    for outcome, count in sorted(counters.outcomes.items()):
        print(f"{count:9,}  {outcome}")
    print(
        f"{counters.num_mutations:9,}  in all, {time.process_time() - started:.0f} CPU s; largest traced allocation of one "
        f"{counters.peak_bytes / 2**20:.2f} MiB; resident memory grew by {grown / 1024:.1f} MiB "
        f"(preparing took {(prepared - before) / 1024:.0f} MiB)"
    )


if __name__ == "__main__":
    main()

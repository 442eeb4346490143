"""Compare sparse weight patches with memcpy, full safetensors and XOR + zstd, on the same tensors in the same run.

    python -m benchmarks.weights.patches                       # 272M parameters (544 MB of bf16), five densities
    python -m benchmarks.weights.patches --densities 0.9 --layers 2 --passes 1

The changes are those of AdamW in its steady state: fp32 masters spread inside their rounding cells, moments as
they are after many random gradients, one step, rounded to bf16; one embedding row in ten has a gradient. The learning rate
determines the density, and is found for each. Every value is process CPU time of one thread, the best of several passes
over all buckets, so that no data of the operation before is still in a cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import zstandard

from penstock.protocol.weights import bucket_codec, bucket_diff, patch_segment, raw_segment
from penstock.protocol.weights.bucket_codec import Encoded
from penstock.protocol.weights.layout import TensorSpec, WeightLayout, build_layout, shard_header

BETA_1, BETA_2, DECAY, STD = 0.9, 0.999, 0.01, 0.02
TOUCHED_ROWS = 0.1  # of the embedding, in one step
BUCKET_BYTES = 32 * 1024**2


def specs(layers: int, vocabulary: int, hidden: int = 1024, feed_forward: int = 2816) -> Iterator[TensorSpec]:
    """Yield the tensors of a small decoder."""
    yield TensorSpec("model.embed_tokens.weight", "bfloat16", (vocabulary, hidden))
    yield TensorSpec("model.norm.weight", "bfloat16", (hidden,))
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield TensorSpec(f"{prefix}input_layernorm.weight", "bfloat16", (hidden,))
        yield TensorSpec(f"{prefix}post_attention_layernorm.weight", "bfloat16", (hidden,))
        for name in "qkvo":
            yield TensorSpec(f"{prefix}self_attn.{name}_proj.weight", "bfloat16", (hidden, hidden))
        for name in ("gate", "up", "down"):
            yield TensorSpec(f"{prefix}mlp.{name}_proj.weight", "bfloat16", (feed_forward, hidden))


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, ties to even, and return the bits as uint16."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def step(rng: np.random.Generator, name: str, shape: tuple[int, ...], lr: float) -> tuple[np.ndarray, np.ndarray]:
    """Return one tensor's bf16 bits before and after a step of AdamW in its steady state."""

    def normal(scale: float) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    masters = 1 + normal(0.05) if "norm" in name else normal(STD)
    gradient, momentum = normal(1.0), normal(((1 - BETA_1) / (1 + BETA_1)) ** 0.5)
    if "embed" in name:
        rows = rng.random(shape[0]) < TOUCHED_ROWS
        gradient[~rows] = momentum[~rows] = 0
    momentum = BETA_1 * momentum + (1 - BETA_1) * gradient
    variance = BETA_2 * (1 + normal((2 * (1 - BETA_2) / (1 + BETA_2)) ** 0.5)) + (1 - BETA_2) * gradient**2
    update = lr * (momentum / np.sqrt(variance, dtype=np.float32) + DECAY * masters)
    return bf16_bits(masters), bf16_bits(masters - update.astype(np.float32))


def states(layout: WeightLayout, lr: float, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return all buckets before and after one step, as uint8."""
    rng = np.random.default_rng(seed)
    old = [np.empty(bucket.num_bytes, np.uint8) for bucket in layout.buckets]
    new = [np.empty(bucket.num_bytes, np.uint8) for bucket in layout.buckets]
    for number, _, tensor in layout.placed():
        before, after = step(rng, tensor.name, tensor.shape, lr)
        span = slice(tensor.byte_offset, tensor.byte_offset + tensor.num_bytes)
        old[number][span] = before.reshape(-1).view(np.uint8)
        new[number][span] = after.reshape(-1).view(np.uint8)
    return old, new


def learning_rate(density: float) -> float:
    """Find the learning rate of a density, by bisection on a model of the same proportions, a sixteenth in size."""
    small = build_layout(specs(2, 2048, hidden=256, feed_forward=704))
    low, high = 1e-9, 1e-1
    for _ in range(24):
        middle = (low * high) ** 0.5
        old, new = states(small, middle)
        changed = sum(np.count_nonzero(a.view(np.uint16) != b.view(np.uint16)) for a, b in zip(old, new, strict=True))
        low, high = (middle, high) if changed / small.num_words < density else (low, middle)
    return high


class Clock:
    """Measure an operation over all buckets: best CPU seconds of several passes."""

    def __init__(self, num_buckets: int, num_bytes: int, passes: int) -> None:
        self.num_buckets, self.num_bytes, self.passes = num_buckets, num_bytes, passes
        self.memcpy_s = 0.0

    def best(self, action: Callable[[int], object]) -> float:
        """Return the seconds of the best pass."""
        seconds = []
        for _ in range(self.passes):
            started = time.process_time()
            for bucket in range(self.num_buckets):
                action(bucket)
            seconds.append(time.process_time() - started)
        return min(seconds)

    def show(self, name: str, action: Callable[[int], object], size: str = "") -> None:
        seconds = self.best(action)
        speed = self.num_bytes / seconds / 1e9
        print(f"| {name} | {size} | {speed:.2f} | {self.memcpy_s / seconds:.3g}x |", flush=True)


def measure(layout: WeightLayout, density: float, lr: float, passes: int) -> None:
    """Print the table of one density."""
    old, new = states(layout, lr)
    target = [bucket.copy() for bucket in old]
    clock = Clock(len(old), layout.num_bytes, passes)
    clock.memcpy_s = clock.best(lambda b: np.copyto(target[b], new[b]))
    encoded: dict[int, Encoded] = {}

    def encode(b: int) -> None:
        encoded[b] = bucket_codec.encode(old[b], new[b], 2, bucket=b)

    clock.best(encode)
    changed = sum(e.num_changed for e in encoded.values())
    print(f"\n### {100 * changed / layout.num_words:.2f} % of the words changed (wanted {density} %, lr {lr:.2g})\n")
    print("| operation | % of bf16 | GB/s of model | relative to memcpy |\n|---|---|---|---|")
    clock.show("memcpy", lambda b: np.copyto(target[b], new[b]), "100")
    share = 100 / layout.num_bytes
    _limits(clock, old, new, target)
    codecs = "/".join(sorted({e.codec for e in encoded.values()}))
    clock.show(f"**patch ({codecs}): encode**", encode, f"{share * sum(len(e.data) for e in encoded.values()):.3f}")

    def decode(b: int) -> None:
        one = encoded[b]
        words = layout.buckets[b].num_words
        if one.codec != "none":
            bucket_codec.apply(
                bucket_codec.parse(one.codec, one.data, num_words=words, word_bytes=2, bucket=b), target[b]
            )

    _restore(target, old)
    clock.show("**patch: verify, decode, apply**", decode)
    _check(target, new)

    def decode_and_hash(b: int) -> None:
        decode(b)
        bucket_codec.bucket_xxh3(target[b])

    clock.show("patch: the same and xxh3-128 of the result", decode_and_hash)
    _xor(clock, old, new, target, share)
    _files(clock, layout, new, share)


def _limits(clock: Clock, old: list[np.ndarray], new: list[np.ndarray], target: list[np.ndarray]) -> None:
    """Print the limits of the memory: reading both states, and writing the changed bytes at known positions."""
    mask = np.empty(1 << 17, np.bool_)

    def compare(b: int) -> None:
        one, two = old[b].view(np.uint64), new[b].view(np.uint64)
        for start in range(0, one.size, mask.size):
            part = one[start : start + mask.size]
            np.not_equal(part, two[start : start + mask.size], out=mask[: part.size])

    clock.show("limit of encoding: compare, keep nothing", compare)
    known = [bucket_diff.difference(a, b, 2).planes for a, b in zip(old, new, strict=True)]

    def scatter(b: int) -> None:
        for plane, changes in enumerate(known[b]):
            target[b][plane::2][changes.indices] = changes.values

    clock.show("limit of applying: write at known positions", scatter)
    clock.show("xxh3-128", lambda b: bucket_codec.bucket_xxh3(new[b]))


def _xor(clock: Clock, old: list[np.ndarray], new: list[np.ndarray], target: list[np.ndarray], share: float) -> None:
    frames: dict[int, bytes] = {}
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def encode(b: int) -> None:
        frames[b] = compressor.compress((old[b].view(np.uint64) ^ new[b].view(np.uint64)).data)

    def decode(b: int) -> None:
        delta = np.frombuffer(decompressor.decompress(frames[b]), np.uint64)
        np.bitwise_xor(target[b].view(np.uint64), delta, out=target[b].view(np.uint64))

    clock.best(encode)
    clock.show("XOR + zstd-1: encode", encode, f"{share * sum(map(len, frames.values())):.3f}")
    _restore(target, old)
    passes, clock.passes = clock.passes, clock.passes // 2 * 2 + 1  # an even number of passes would undo itself
    clock.show("XOR + zstd-1: decode, apply", decode)
    clock.passes = passes
    _check(target, new)


def _files(clock: Clock, layout: WeightLayout, new: list[np.ndarray], share: float) -> None:
    headers = [shard_header(bucket) for bucket in layout.buckets]
    size = share * (layout.num_bytes + sum(map(len, headers)))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.safetensors" for number in range(len(new))]

        def write(b: int) -> None:
            with paths[b].open("wb", buffering=0) as file:
                file.write(headers[b])
                file.write(new[b].data)

        clock.show("full safetensors: write the files", write, f"{size:.1f}")
        clock.show("full safetensors: read them", lambda b: paths[b].read_bytes())


def _restore(target: list[np.ndarray], old: list[np.ndarray]) -> None:
    for raw, before in zip(target, old, strict=True):
        np.copyto(raw, before)


def _check(target: list[np.ndarray], new: list[np.ndarray]) -> None:
    for number, (raw, after) in enumerate(zip(target, new, strict=True)):
        if not np.array_equal(raw, after):
            raise SystemExit(f"bucket {number} differs from the encoded one")


def measure_whole(layout: WeightLayout, passes: int) -> None:
    """Print the density above which sending a whole bucket is faster than sending its changes."""
    print("\n### Sparse or whole: one bucket\n")
    print("| changed | sparse % | encode, decode ms | whole % | encode, decode ms |\n|---|---|---|---|---|")
    for lr in (4e-5, 1e-4, 2e-4, 4e-4, 1e-2):
        old, new = (bucket[0] for bucket in states(WeightLayout(buckets=layout.buckets[-1:]), lr))
        words, target = old.size // 2, old.copy()
        sparse = patch_segment.encode(old, new, 2)
        whole = raw_segment.encode(new, 2, num_changed=words)
        clock = Clock(1, old.size, passes)
        figures = [
            1e3 * clock.best(action)
            for action in (
                lambda _: patch_segment.encode(old, new, 2),  # noqa: B023 called at once
                lambda _: patch_segment.apply(patch_segment.parse(sparse, num_words=words, word_bytes=2), target),  # noqa: B023
                lambda _: raw_segment.encode(new, 2, num_changed=words),  # noqa: B023
                lambda _: raw_segment.apply(raw_segment.parse(whole, num_words=words, word_bytes=2), target),  # noqa: B023
            )
        ]
        changed = bucket_diff.difference(old, new, 2).num_changed
        sizes = [100 * len(data) / old.size for data in (sparse, whole)]
        print(
            f"| {100 * changed / words:.1f} % | {sizes[0]:.1f} | {figures[0]:.0f}, {figures[1]:.0f} "
            f"| {sizes[1]:.1f} | {figures[2]:.0f}, {figures[3]:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.5, 0.9, 3.7, 20.0], help="percent")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--passes", type=int, default=5)
    wanted = parser.parse_args()
    layout = build_layout(specs(wanted.layers, 4096 * wanted.layers), bucket_bytes=BUCKET_BYTES)
    print(
        f"{layout.num_words / 1e6:.0f}M parameters, {layout.num_bytes / 1e6:.0f} MB of bf16 in {len(layout.buckets)} "
        f"buckets of at most {BUCKET_BYTES >> 20} MiB (a larger tensor alone)"
    )
    for density in wanted.densities:
        measure(layout, density, learning_rate(density / 100), wanted.passes)
    measure_whole(layout, wanted.passes)


if __name__ == "__main__":
    main()

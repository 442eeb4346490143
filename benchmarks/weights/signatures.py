"""CPU time of signing and verifying a manifest, beside writing and reading the same manifest without a signature.

python -m benchmarks.weights.signatures        # manifests of 10, 100 and 1,000 buckets
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from penstock.deploy import certificates
from penstock.protocol.facts import BlobRef
from penstock.protocol.weights.manifest import Ancestor, AnchorRef, BucketState, StoredRange, VersionManifest
from penstock.protocol.weights.signature import SigningKey, TrustedKeys

PASSES = 200


def main() -> None:
    """Print a Markdown table, in microseconds of this process."""
    with tempfile.TemporaryDirectory() as folder:
        private, public = certificates.signing_key(Path(folder))
        key, trusted = SigningKey.from_file(private, "key"), TrustedKeys.from_file(public, "key")
    print(
        "| buckets | manifest kB | write µs | + sign µs | read µs | + verify µs | of both |\n|---|---|---|---|---|---|---|"
    )
    for num_buckets in (10, 100, 1000):
        manifest = patch(num_buckets)
        line = manifest.to_json()
        signed = key.sign(line)
        write, sign = cpu_us(manifest.to_json), cpu_us(lambda line=line: key.sign(line))
        read = cpu_us(lambda line=line: VersionManifest.from_json(line))
        verify = cpu_us(lambda signed=signed: trusted.verify(signed, "manifest"))
        more = (sign + verify) / (write + read)
        print(
            f"| {num_buckets} | {len(line) / 1e3:.0f} | {write:.0f} | {sign:.0f} | {read:.0f} | {verify:.0f} | {more:.1%} |"
        )


def patch(num_buckets: int) -> VersionManifest:
    """Return the manifest of a patch of so many buckets."""
    blob = BlobRef(
        key="runs/r/weights/v00000007/0123456789abcdef/patch", size_bytes=num_buckets * 1000, sha256="0" * 64
    )
    states = [
        BucketState(
            codec="gapabs1", num_words=10**7, num_changed=10**5, base_xxh3="0" * 32, new_xxh3="1" * 32,
            stored=StoredRange(object=0, offset=number * 1000, size_bytes=1000, sha256="2" * 64),
        )
        for number in range(num_buckets)
    ]  # fmt: skip
    parent = Ancestor(version=6, manifest=blob, state_root="3" * 64)
    anchor = AnchorRef(version=5, manifest=blob, state_root="4" * 64, num_bytes=10**9)
    return VersionManifest(
        kind="patch", run_id="r", version=7, step=7, epoch=1, parent=parent, anchor=anchor, layout=blob, objects=(blob,),
        buckets=tuple(states), state_root="5" * 64,
    )  # fmt: skip


def cpu_us(act: Callable[[], object]) -> float:
    """Return the CPU microseconds of one call, the least of five series."""
    series = []
    for _ in range(5):
        since = time.process_time()
        for _ in range(PASSES):
            act()
        series.append((time.process_time() - since) / PASSES)
    return min(series) * 1e6


if __name__ == "__main__":
    main()

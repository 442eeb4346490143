"""From the announcement of a version to the engine that serves it, with the copy before the patch and behind it, alternating in one run.

    python -m benchmarks.weights.worker_part --mb 512 --changed 0.01 --versions 12

Synthetic bfloat16 weights in memory, of which a share changes by one unit in the last place; the server of the tests, which applies patches with
the plugin's own code. Prints medians: seconds until the version is served and until its copy is verified, and of CPU of the process, server
included. What came before: fetch the version, check every value, find the changes, stage, patch.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.rollout_service.engines.test_patched_loads import PatchedEngine
from tests.rollout_service.weights.test_copy_behind import Plain

from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights import bucket_codec
from penstock.protocol.weights.layout import TensorSpec, bucket_digests, build_layout, shard_header, weights_digest
from penstock.protocol.weights.manifest import Ancestor, AnchorRef, BucketState, StoredRange, VersionManifest
from penstock.rollout_service.checks.check_weights import WeightsCheck
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.weight_changes import WeightChanges
from penstock.rollout_service.weights.mirror import Mirror

_SHAPE = (4096, 8192)  # 64 MiB


class Store:
    """An object store in memory, which verifies what it gives."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> BlobRef:
        self._objects[key] = data
        return BlobRef(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def get(self, ref: BlobRef) -> bytes:
        return self.get_range(ref, 0, ref.size_bytes, ref.sha256)

    def get_range(self, ref: BlobRef, offset: int, size: int, sha256: str) -> bytes:
        data = self._objects[ref.key][offset : offset + size]
        assert hashlib.sha256(data).hexdigest() == sha256
        return data


class Versions:
    def __init__(self, num_mb: int, changed: float) -> None:
        self.store, self._changed, self._random = Store(), changed, np.random.default_rng(0)
        self.layout = build_layout(TensorSpec(f"w{n:03d}", "bfloat16", _SHAPE) for n in range(num_mb // 64))
        draw = torch.Generator().manual_seed(0)
        self.raw = [
            (0.02 * torch.randn(_SHAPE, generator=draw)).bfloat16().view(torch.uint8).numpy().reshape(-1)
            for _ in self.layout.buckets
        ]
        self.refs: list[BlobRef] = []
        self._last: VersionManifest | None = None
        self._anchor: AnchorRef | None = None

    def publish(self) -> tuple[PolicyVersion, BlobRef]:
        version, objects, states = len(self.refs), [], []
        for number, (bucket, raw) in enumerate(zip(self.layout.buckets, self.raw, strict=True)):
            base, before = bucket_codec.bucket_xxh3(raw), raw.copy()
            if self._last is not None:
                words = raw.view(np.uint16)
                words[self._random.integers(0, len(words), int(self._changed * len(words)))] += 1
            encoded = bucket_codec.encode(before, raw, 2, bucket=number)
            whole = self._last is None
            blob = self.store.put(
                f"{version}.{number}", shard_header(bucket) + raw.tobytes() if whole else encoded.data
            )
            objects.append(blob)
            states.append(
                BucketState(
                    codec="safetensors" if whole else encoded.codec,
                    stored=StoredRange(object=number, offset=0, size_bytes=blob.size_bytes, sha256=blob.sha256),
                    num_words=bucket.num_words,
                    num_changed=bucket.num_words if whole else encoded.num_changed,
                    base_xxh3=None if whole else base,
                    new_xxh3=bucket_codec.bucket_xxh3(raw),
                )
            )
        digests = [bucket_digests(b, raw.data) for b, raw in zip(self.layout.buckets, self.raw, strict=True)]
        root = weights_digest(one for of_bucket in digests for one in of_bucket)
        last = self._last
        manifest = VersionManifest(
            kind="anchor" if last is None else "patch", run_id="r", version=version, step=version, epoch=0,
            parent=None if last is None else Ancestor(version=last.version, manifest=self.refs[-1], state_root=last.state_root),
            anchor=self._anchor, layout=self.store.put("layout", self.layout.to_json()), objects=tuple(objects),
            buckets=tuple(states), state_root=root,
        )  # fmt: skip
        self.refs.append(self.store.put(f"manifest.{version}", manifest.to_json()))
        self._anchor = self._anchor or AnchorRef(
            version=0, manifest=self.refs[0], state_root=root, num_bytes=manifest.num_bytes
        )
        self._last = manifest
        return PolicyVersion(version), self.refs[-1]


async def follow(versions: Versions, folder: Path, num: int) -> dict[str, dict[str, list[float]]]:
    mirror, check = Mirror(versions.store, folder, "r"), WeightsCheck()  # type: ignore[arg-type]
    tensors = {f"w{n:03d}": torch.empty(_SHAPE, dtype=torch.bfloat16) for n in range(len(versions.raw))}
    times: dict[str, dict[str, list[float]]] = {way: {} for way in ("before", "behind")}

    def fetch(version: PolicyVersion, ref: BlobRef, keep: int) -> Path:
        mirrored = mirror.fetch(version, ref, keep=[PolicyVersion(keep)], newest=True)
        check.check(mirrored.folder, version)
        return mirrored.folder

    with PatchedEngine(Plain(tensors)) as engine:
        engine.info = {"internal_states": [{"penstock_weight_patch": {"protocol": 1, "tp_size": 1, "device": "cuda"}}]}
        client = SglangClient(engine.url)
        await client.load_weights(fetch(*versions.publish(), 0), PolicyVersion(0))
        for number in range(num):
            version, ref = versions.publish()
            served, way = PolicyVersion(version - 1), ("before", "behind")[number % 2]
            started, cpu = time.perf_counter(), time.process_time()
            if way == "before":
                await asyncio.to_thread(fetch, version, ref, served)
            changes = await asyncio.to_thread(mirror.changes, served, version, ref, 0.05)
            assert isinstance(changes, WeightChanges)
            assert check.passes(changes)
            await client.stage(changes)
            assert await client.patch(version, "retract")
            row = {"served_s": time.perf_counter() - started, "served_cpu_s": time.process_time() - cpu}
            await asyncio.to_thread(fetch, version, ref, served)
            row |= {"copied_s": time.perf_counter() - started, "copied_cpu_s": time.process_time() - cpu}
            for name, seconds in row.items():
                if number > 1:  # the second folder is new
                    times[way].setdefault(name, []).append(seconds)
        await client.close()
    mirror.close()
    return times


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the copies are")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        times = asyncio.run(follow(Versions(options.mb, options.changed), Path(folder) / "w", options.versions))
    medians: dict[str, Any] = {
        way: {n: statistics.median(all_of) for n, all_of in of.items()} for way, of in times.items()
    }
    ratios = {name: round(medians["behind"][name] / medians["before"][name], 2) for name in medians["before"]}
    shown = {way: {name: round(seconds, 3) for name, seconds in of.items()} for way, of in medians.items()}
    print(json.dumps({"mb": options.mb, **shown, "ratios": ratios, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()

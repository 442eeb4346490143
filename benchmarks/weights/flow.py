"""Measure bytes, diff, upload and mirroring of each weight version, and a late joiner, on real NATS and S3.

    python -m benchmarks.weights.flow [--mb 64] [--versions 41] [--density 0.009]

A synthetic bfloat16 model of which a share of the values changes with every version, published by the trainer's
publisher and mirrored by two mirrors: one that follows every version, one that joins after the last. memcpy of
the same bytes is measured in the same run. CPU seconds are those of this process, without the servers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.local import LocalStack
from penstock.deploy.quickstart_task import write_model
from penstock.protocol import logs
from penstock.protocol.facts import WeightsPublished
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.weights.mirror import Mirror
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.publication import Publication
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.weight_buckets import ModelWeights, Snapshot, copy_to_buckets
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy

RUN = "flow"
_TENSORS = 32


def memcpy_s(num_bytes: int) -> float:
    """Return the CPU seconds to copy ``num_bytes`` bytes; the median of nine."""
    source, target = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
    times = []
    for _ in range(9):
        started = time.process_time()
        np.copyto(target, source)
        times.append(time.process_time() - started)
    return statistics.median(times)


def states(mb: int, density: float, seed: int = 0):
    """Yield the weights of version 0, 1, …: bfloat16, of which a share changes by one unit in the last place."""
    random = torch.Generator().manual_seed(seed)
    numel = mb * 1024 * 1024 // 2 // _TENSORS
    state = {f"layers.{n}.w": (torch.randn(numel, generator=random) * 0.02).bfloat16() for n in range(_TENSORS)}
    while True:
        yield state
        state = {name: tensor.clone() for name, tensor in state.items()}
        for tensor in state.values():
            hit = torch.randint(numel, (int(density * numel),), generator=random)
            tensor.view(torch.int16)[hit] += 1


def run(mb: int, versions: int, density: float, folder: Path) -> dict[str, object]:
    with LocalStack(folder / "store") as stack, Bus.connect(stack.nats, name="flow") as bus:
        blobs = Blobs(stack.s3)
        bootstrap(bus, blobs, RUN)
        return _flow(bus, blobs, mb, versions, density, folder)


def _flow(bus: Bus, blobs: Blobs, mb: int, versions: int, density: float, folder: Path) -> dict[str, object]:
    model = folder / "model"
    write_model(model, seed=0)
    publications: list[Publication] = []
    facts: dict[int, WeightsPublished] = {}
    subject = f"penstock.{RUN}.weights.published"
    bus.tail(f"{RUN}-weights", subject, WeightsPublished, lambda f: facts.__setitem__(f.version, f)).wait()
    never = FullSnapshotPolicy(max_ratio=1e9, max_versions=10**6)
    publisher = Publisher(
        Connections(RUN, bus, blobs), model_folder=model, policy=never, on_published=publications.append
    )
    mirror = Mirror(blobs, folder / "w0", RUN)
    mirror_s, mirror_cpu_s, submit_s = [], [], []
    source = states(mb, density)
    for version in range(versions):
        weights = ModelWeights(copy_to_buckets(next(source), copy_id=version))
        snapshot = Snapshot(PolicyVersion(version), version, weights, "bfloat16", must_publish=True)
        started = time.monotonic()
        publisher.submit(snapshot)
        submit_s.append(time.monotonic() - started)
        publisher.wait_until_published(PolicyVersion(version), 120.0)
        while version not in facts:
            time.sleep(0.001)
        started, cpu = time.monotonic(), time.process_time()
        mirror.fetch(PolicyVersion(version), facts[version].manifest, keep=[PolicyVersion(version - 1)], newest=True)
        mirror_s.append(time.monotonic() - started)
        mirror_cpu_s.append(time.process_time() - cpu)
    publisher.close()
    mirrored = {"mirror_s": statistics.median(mirror_s[2:]), "mirror_cpu_s": statistics.median(mirror_cpu_s[2:])}
    late = Mirror(blobs, folder / "w1", RUN)
    cpu = time.process_time()
    joined = late.fetch(PolicyVersion(versions - 1), facts[versions - 1].manifest, newest=True)
    late_cpu_s = time.process_time() - cpu
    mirror.close(), late.close()
    return _published(publications) | {
        "submit_max_s": max(submit_s),
        **mirrored,
        "memcpy_s": memcpy_s(publications[0].raw_bytes),
        "late_versions_behind": versions - 1,
        "late_bytes": joined.num_bytes,
        "late_bytes_share": joined.num_bytes / publications[0].raw_bytes,
        "late_s": joined.fetch_s,
        "late_cpu_s": late_cpu_s,
    }


def _published(publications: Sequence[Publication]) -> dict[str, object]:
    """Return the medians of the patches, and the seconds of the full snapshot."""
    patches, middle = [p for p in publications if p.kind == "patch"], statistics.median
    return {
        "raw_bytes": publications[0].raw_bytes,
        "density": middle(p.density for p in patches),
        "patch_bytes": middle(p.sent_bytes for p in patches),
        "patch_share": middle(p.sent_bytes / p.raw_bytes for p in patches),
        "diff_s": middle(p.diff_s for p in patches),
        "upload_s": middle(p.upload_s for p in patches),
        "publish_s": middle(p.publish_s for p in patches),
        "anchor_publish_s": publications[0].publish_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--versions", type=int, default=41)
    parser.add_argument("--density", type=float, default=0.009)
    options = parser.parse_args()
    logs.configure("benchmark", level="warning")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(options.mb, options.versions, options.density, Path(folder)), indent=1))


if __name__ == "__main__":
    main()

"""Measure publishing shards from several ranks: blocking time of training, time per version, memory of each rank.

    python -m benchmarks.weights.shares [--mb 256] [--ranks 1 2] [--stages 2 3] [--versions 8]

A random bfloat16 Qwen3 under DeepSpeed, one process for each rank, real NATS and S3. 0.9 % of the values change with each
version, by one unit in the last place, instead of an optimizer step. Baselines: memcpy of each
rank's part for its copy, and for publishing shards the earlier method, where rank 0 gathers the whole model and
publishes it alone (``gathered``). CPU seconds are of the
training thread (``wait``) or of a whole rank; figures are medians; all in one run, the ranks in parallel.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.weights.flow import memcpy_s

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.deploy.quickstart_task import write_model
from penstock.protocol import logs
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.build_objective import build_objective
from penstock.trainer.connections import Connections
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing.publication import Publication
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.publish_coordinator import PublishCoordinator
from penstock.trainer.publishing.rank_publisher import RankPublisher
from penstock.trainer.publishing.snapshot import ModelWeights, Snapshot
from penstock.trainer.publishing.weight_buckets import copy_to_buckets
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy
from penstock.trainer.ranks import Ranks

_BUCKET_BYTES = 16 * 1024**2
_DENSITY = 0.009
_NEVER = FullSnapshotPolicy(max_ratio=1e9, max_versions=10**6)


def write_random_model(folder: Path, mb: int) -> None:
    """Write a Qwen3 of about ``mb`` MiB in bfloat16, with a tokenizer's small files."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    write_model(folder, seed=0)
    config = Qwen3Config.from_pretrained(folder)
    config.hidden_size, config.intermediate_size, config.head_dim = 1024, 3072, 64
    config.num_attention_heads = config.num_key_value_heads = 16
    per_layer = 4 * 1024 * 1024 + 3 * 1024 * 3072
    config.num_hidden_layers = max(1, mb * 1024**2 // 2 // per_layer)
    config.layer_types = None
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{**config.to_dict(), "layer_types": None})).bfloat16().save_pretrained(folder)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1024**2


class _Watch:
    """Measures the largest memory of this process since `restart`, above the memory at that time, in MiB."""

    def restart(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        self._start = _resident_mb()

    def peak(self) -> float:
        status = Path("/proc/self/status").read_text()
        high = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(high.split()[1]) / 1024 - self._start


def _policy(model: Path, stage: int, dims: ParallelDims) -> Policy:
    how = Optimisation(
        num_steps=10, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, warmup_steps=0, schedule="constant", min_lr_ratio=0.1,
        max_grad_norm=1.0, zero_stage=stage, dtype="bfloat16", keep_whole_below=0,
    )  # fmt: skip
    return load_policy(model, how, dims, temperature=1.0)


def _move(policy: Policy, version: int) -> None:
    """Change 0.9 % of the values that this rank holds by one unit in the last place, the same ones on every rank."""
    random = torch.Generator().manual_seed(version)
    for parameter in policy._scorer.parameters():
        held = getattr(parameter, "ds_tensor", parameter).data.reshape(-1)
        hit = torch.randint(held.numel(), (int(_DENSITY * held.numel()),), generator=random)
        held.view(torch.int16)[hit] += 1


def rank(options: dict[str, Any]) -> None:
    """Run one rank's part of a measurement; rank 0 prints the results."""
    logs.configure("benchmark", level="warning")
    torch.set_num_threads(1)
    ranks = Ranks()
    blobs = Blobs(S3Settings.model_validate(options["s3"]))
    dims = ParallelDims(ranks)
    policy = _policy(Path(options["model"]), options["stage"], dims)
    learner = Learner(policy, dims, blobs, build_objective(AlgorithmSettings(name="grpo")))
    learner.bucket_bytes = _BUCKET_BYTES
    own = RankPublisher(blobs, options["run_id"], dims.buckets)
    coordinator = PublishCoordinator(own, ranks)
    watch, peaks = _Watch(), []
    leader = _Leader(options, learner, coordinator, blobs) if ranks.is_leader else None
    for way in ("shares", "gathered"):
        ranks.barrier()
        watch.restart()
        cpu = 0.0
        for version in range(options["versions"]):
            _move(policy, version)
            ranks.barrier()
            before = time.process_time()
            if leader is not None:
                leader.publish(way, version)
                learner.dismiss()
            else:
                learner.follow(own)
            cpu += time.process_time() - before if version else 0.0  # the first version is a whole model
        ranks.barrier()
        peaks.append((watch.peak(), cpu / (options["versions"] - 1)))
    found = ranks.gather(json.dumps(peaks).encode())
    if leader is not None:
        figures = {way: leader.figures(way) for way in ("shares", "gathered")}
        for number, way in enumerate(figures):
            of_ranks = [json.loads(data)[number] for data in found]
            figures[way]["peak_mb_by_rank"] = [round(peak) for peak, _ in of_ranks]
            figures[way]["cpu_s_by_rank"] = [cpu for _, cpu in of_ranks]
        print(json.dumps({"num_ranks": ranks.num_ranks, "zero_stage": options["stage"], **figures}), flush=True)
    ranks.leave(0)


class _Leader:
    def __init__(
        self, options: dict[str, Any], learner: Learner, coordinator: PublishCoordinator, blobs: Blobs
    ) -> None:
        bus = Bus.connect(NatsSettings.model_validate(options["nats"]), name="benchmark")
        self._learner = learner
        self._publishers: dict[str, Publisher] = {}
        self._publications: dict[str, list[Publication]] = {"shares": [], "gathered": []}
        self._waits: dict[str, list[float]] = {"shares": [], "gathered": []}
        self._wait_cpu: dict[str, list[float]] = {"shares": [], "gathered": []}
        self._part_bytes = 0
        for way, run_id, of in (
            ("shares", options["run_id"], coordinator),
            ("gathered", f"{options['run_id']}-gathered", None),
        ):
            bootstrap(bus, blobs, run_id)
            self._publishers[way] = Publisher(
                Connections(run_id, bus, blobs), model_folder=Path(options["model"]), policy=_NEVER,
                on_published=self._publications[way].append, coordinator=of,
            )  # fmt: skip

    def publish(self, way: str, version: int) -> None:
        """Publish a version with one of the two methods; record the time of the training thread as the wait."""
        publisher = self._publishers[way]
        started, cpu = time.monotonic(), time.thread_time()
        weights = self._copy(way, version)
        publisher.submit(Snapshot(PolicyVersion(version), version, weights, "bfloat16", must_publish=True))
        self._waits[way].append(time.monotonic() - started)
        self._wait_cpu[way].append(time.thread_time() - cpu)
        del weights
        publisher.wait_until_published(PolicyVersion(version), 300.0)

    def _copy(self, way: str, version: int) -> ModelWeights:
        if way == "shares":
            weights = self._learner.weights(wanted=self._publishers[way].drop_overtaken())
            assert isinstance(weights, ModelWeights)
            self._part_bytes = sum(raw.size for raw in weights.buckets.raw.values())
            return weights
        return ModelWeights(copy_to_buckets(self._learner.snapshot(), copy_id=version, bucket_bytes=_BUCKET_BYTES))

    def figures(self, way: str) -> dict[str, Any]:
        """Return the medians over the patches."""
        middle = statistics.median
        whole, *patches = self._publications[way]
        num_bytes = self._part_bytes if way == "shares" else whole.raw_bytes
        return {
            "raw_mb": round(whole.raw_bytes / 1024**2),
            "part_mb": round(num_bytes / 1024**2),
            "wait_s": middle(self._waits[way][1:]),
            "wait_cpu_s": middle(self._wait_cpu[way][1:]),
            "memcpy_cpu_s": memcpy_s(num_bytes),
            "diff_s": middle(p.diff_s for p in patches),
            "upload_s": middle(p.upload_s for p in patches),
            "publish_s": middle(p.publish_s for p in patches),
            "whole_s": whole.publish_s,
            "sent_share": middle(p.sent_bytes / p.raw_bytes for p in patches),
        }


def _measure(
    folder: Path, model: Path, servers: tuple[NatsServer, S3Server], options: dict[str, Any]
) -> dict[str, Any]:
    nats, s3 = servers
    rank_options = {
        **options,
        "model": str(model),
        "run_id": f"shares-{options['num_ranks']}-{options['stage']}",
        "nats": {**nats.settings.model_dump(mode="json"), "password": nats.settings.password},
        "s3": {**s3.settings.model_dump(mode="json"), "secret_key": s3.settings.secret_key},
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weights.shares", "--rank"],
            env=os.environ | {
                "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(options["num_ranks"]),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
        )
        for number in range(options["num_ranks"])
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(rank_options))
            process.stdin.close()
        assert processes[0].stdout is not None
        return json.loads(processes[0].stdout.read().splitlines()[-1])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Measure every combination and print one JSON object for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(json.loads(sys.stdin.read()))
        return
    logs.configure("benchmark", level="warning")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nats = NatsServer(folder / "nats", log=folder / "nats.log", max_store_gb=40)
        s3 = S3Server(folder / "s3", log=folder / "s3.log")
        write_random_model(folder / "model", options.mb)
        nats.start(), s3.start()
        Blobs(s3.settings).ensure_bucket()
        try:
            for stage in options.stages:
                for num_ranks in options.ranks:
                    wanted = {"stage": stage, "num_ranks": num_ranks, "versions": options.versions}
                    print(json.dumps(_measure(folder, folder / "model", (nats, s3), wanted)), flush=True)
        finally:
            nats.stop(), s3.stop()


if __name__ == "__main__":
    main()

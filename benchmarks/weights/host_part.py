"""What one version costs the trainer's host, by stage: synthetic bfloat16 weights, of which a share changes by one unit in the last place.

    python -m benchmarks.weights.host_part --mb 512 --changed 0.01 --versions 7

Prints medians over the patches: seconds that the training thread waits (submit), until the version is stored, and of CPU time of the process,
beside a memcpy of the weights in the same run; and the peak of the process's memory in sizes of the model. Objects are hashed and kept
nowhere, so the object store is not in the figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.learner.policy_weights import PolicyWeights, WeightCopies
from penstock.trainer.parallel_dims import Share
from penstock.trainer.publishing.rank_publisher import PublishCoordinator, RankPublisher

BUCKET_BYTES = 64 * 1024**2
_WIDTH = 4096


class Nowhere:
    """An object store that hashes what it is given, and keeps nothing."""

    def put(self, key: str, data: bytes) -> BlobRef:
        return BlobRef(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


class Model(nn.Module):
    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        rows = [_WIDTH] * (num_bytes // (2 * _WIDTH * _WIDTH)) or [num_bytes // (2 * _WIDTH)]
        self.language_model: Any = nn.Module()
        self.language_model.weights = nn.ParameterList(torch.randn(n, _WIDTH).bfloat16() for n in rows)
        self.language_model.base_model = None
        self.language_model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="qwen3"))


class Whole:
    """A `Trainable` of one process, whose parameters are whole."""

    is_partitioned = is_gathered = False
    device = torch.device("cpu")

    def whole(self, *parameters: torch.Tensor) -> Any:
        return _Block(parameters)

    def whole_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        return tuple(parameter.shape)


class _Block(tuple):
    def __new__(cls, parameters: tuple[torch.Tensor, ...]) -> _Block:
        return tuple.__new__(cls, parameters)

    def __enter__(self) -> _Block:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def step(model: Model, changed: float, random: torch.Generator) -> None:
    """Change a share of the words by one unit in the last place, as an optimizer step at a small learning rate does."""
    for weight in model.parameters():
        words = weight.data.view(torch.int16).view(-1)
        words[torch.randint(words.numel(), (int(changed * words.numel()),), generator=random)] += 1


def measure(num_bytes: int, changed: float, num_versions: int) -> dict[str, float]:
    model, random = Model(num_bytes), torch.Generator().manual_seed(0)
    dims: Any = SimpleNamespace(buckets=Share(), writes_files=True, ranks=None)
    policy: Any = SimpleNamespace(weights=PolicyWeights(Whole(), model, dims), steps_done=1, device=Whole.device)  # type: ignore[arg-type]
    copies = WeightCopies(policy, dims, str)
    publisher = RankPublisher(Nowhere(), "run")  # type: ignore[arg-type]
    coordinator = PublishCoordinator(publisher)
    rows: list[dict[str, float]] = []
    for version in range(num_versions + 1):
        step(model, changed if version else 0.0, random)
        started, cpu = time.perf_counter(), time.process_time()
        weights = copies.copy(None, publisher, as_adapter=False, wanted=(), bucket_bytes=BUCKET_BYTES)
        submitted = time.perf_counter()
        number, copy_id = PolicyVersion(version), weights.buckets.copy_id
        if version:
            patch = coordinator.compare(copy_id)
            coordinator.state_root(copy_id)
            coordinator.store_patch(copy_id, number)
            seconds = {"submit": submitted - started, "stored": time.perf_counter() - started}
            rows.append({**seconds, "cpu": time.process_time() - cpu, "density": patch.num_changed / (num_bytes / 2)})
        else:
            weights.root()
        coordinator.commit(copy_id, retain=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    target, source = (torch.empty(num_bytes, dtype=torch.uint8).fill_(1) for _ in range(2))
    started = time.process_time()
    target.copy_(source)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {**medians, "peak": peak / num_bytes, "memcpy_cpu": time.process_time() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--versions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures = measure(arguments.mb * 1024**2, arguments.changed, arguments.versions)
    print(json.dumps({name: round(value, 5) for name, value in figures.items()}))


if __name__ == "__main__":
    main()

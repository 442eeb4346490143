"""Measure what keeping the log-probabilities of a step costs: CPU of a step with and without, taken in turns.

python -m benchmarks.step_logprobs [PAIRS]

The quickstart's model and batch (16 groups of 8, about 1000 sampled tokens), every object stored on a real S3 server in this
machine; CPU is that of the whole process, the writer's thread included. Then the writer alone on an object of the largest size.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tests.servers import start_s3
from tests.trainer.groups.stored_groups import invent_group, ready, store_scored
from tests.trainer.learner.rank_check import how

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.run_file import load
from penstock.protocol.packs import step_logprobs
from penstock.protocol.packs.step_logprobs import MAX_TOKENS, KeptGroup, LogprobsHeader, StepLogprobs
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer.algorithm.build_objective import build_objective
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.planning import Planner, learn
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings
from penstock.trainer.telemetry.logprob_writer import LogprobWriter, StepNumbers

NUM_GROUPS, GROUP_SIZE = 16, 8
_PAUSE_S = 0.05  # for the writer to end, so that its CPU is counted for its own step


def measure(folder: Path, blobs: Blobs, pairs: int) -> None:
    write_model(folder / "model", seed=0)
    given = [f"model.path={folder / 'model'}", "data.max_prompt_tokens=100", "rollout.max_new_tokens=10"]
    settings = load(TrainerSettings, overrides=[*given, f"rollout.group_size={GROUP_SIZE}"]).settings
    policy = load_policy(folder / "model", how(1, "float32"), dims := ParallelDims(Ranks()), temperature=1.0)
    learner = Learner(policy, dims, blobs, build_objective(settings.algorithm))
    planner = Planner(settings, learner, {})
    groups = [invent_group(f"e0.p{n}.a0", seed=n, size=GROUP_SIZE) for n in range(NUM_GROUPS)]
    message = store_scored(blobs, "bench", "p0", groups)
    batch = ready(message, groups)
    tokens = sum(group.num_tokens for group in batch)
    costs: dict[bool, list[float]] = {False: [], True: []}
    with LogprobWriter(blobs, "bench", epoch=1, on_first_loss=print) as writer:
        for number in range(2 * pairs + 4):
            keeps = number % 2 == (number // 2) % 2  # in turns, each first in half of the pairs
            before = time.process_time()
            step(planner, learner, batch, writer, number, keeps=keeps)
            time.sleep(_PAUSE_S)
            if number >= 4:  # the first ones warm up
                costs[keeps].append(time.process_time() - before)
    gains = [1e3 * (on - off) for on, off in zip(costs[True], costs[False], strict=True)]
    off = 1e3 * statistics.median(costs[False])
    error = statistics.stdev(gains) / len(gains) ** 0.5
    print(
        f"a step of {tokens} tokens: {off:.1f} ms of CPU without, {statistics.fmean(gains):+.2f} ± {error:.2f} ms with"
    )
    print(f"lost: {writer.num_lost}")


def step(
    planner: Planner, learner: Learner, batch: list[ReadyGroup], writer: LogprobWriter, number: int, *, keeps: bool
) -> None:
    learned = learn(planner, learner, batch, 0, keep_groups="all" if keeps else 0)
    writer.submit(StepNumbers(number, number, number + 1), batch, learned)


def measure_large(blobs: Blobs) -> None:
    """An object of as many tokens as one may have, in rows of a thousand."""
    header = LogprobsHeader(
        run_id="bench", step=1, trained_version=0, made_version=1,
        groups=tuple(KeptGroup(group_id=f"e0.p{n}.a0", pack="a" * 64, row_group=n) for n in range(375)),
    )  # fmt: skip
    rows = np.array([(n // 8, n % 8, 1000) for n in range(MAX_TOKENS // 1000)], np.int32)
    found = StepLogprobs(header, rows, np.full(MAX_TOKENS, -0.5, np.float32), np.zeros(MAX_TOKENS, np.uint8))
    before, started = time.process_time(), time.monotonic()
    data = step_logprobs.encode(found)
    encoded = time.process_time()
    blobs.put("large", data)
    print(
        f"an object of {len(data) / 1e6:.1f} MB: {1e3 * (encoded - before):.0f} ms of CPU to encode, "
        f"{1e3 * (time.process_time() - encoded):.0f} to store, {time.monotonic() - started:.2f} s in all"
    )


def main() -> None:
    torch.set_num_threads(1)
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory() as folder:
        server = start_s3(Path(folder) / "s3")
        try:
            blobs = Blobs(server.settings)
            blobs.ensure_bucket()
            measure(Path(folder), blobs, pairs)
            measure_large(blobs)
        finally:
            server.stop()


if __name__ == "__main__":
    main()

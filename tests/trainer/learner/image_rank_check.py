"""Trains rows with images, and rows without, at every ZeRO stage, and prints losses, norms and weights.

Arguments: MODEL FOLDER. With two ranks one has all images in one micro-batch, and the other has none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.pictures import picture, picture_bytes

from penstock.protocol.images.admission import AdmittedImage, admit
from penstock.protocol.images.processor import ImageProcessor, expanded, read_processor
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import MicroBatch, PlacedImages, Row, StoredImage, build
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.parallel_dims import ParallelDims, ParallelLayout
from penstock.trainer.ranks import Ranks

HOW = Optimisation(
    num_steps=10, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, warmup_steps=0, schedule="constant", min_lr_ratio=1.0,
    max_grad_norm=1.0, zero_stage=1, dtype="float32", keep_whole_below=0,
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "2": {"zero_stage": 2, "train_vision_tower": True, "gradient_checkpointing": True},
    "3-frozen": {"zero_stage": 3},
    "3": {"zero_stage": 3, "train_vision_tower": True},
}
IMAGES = [admit(picture_bytes(picture(*size, seed=n))) for n, size in enumerate(((40, 24), (24, 24)))]
NUM_STEPS = 2


def _row(processor: ImageProcessor, shown: Sequence[AdmittedImage], answer: Sequence[int]) -> Row:
    ids, images = expanded([5, *[processor.image_token_id] * len(shown), 6, 7], shown, processor)
    tokens = np.array([*ids, *answer], dtype=np.int32)
    sampled = np.arange(len(tokens)) >= len(ids)
    placed = None if images is None else PlacedImages("r", images)
    return Row(tokens, sampled, np.full(len(tokens), -4.0, np.float32), 0.7 - 0.1 * len(answer), 0.1, images=placed)


def micro_batches(processor: ImageProcessor, dims: ParallelDims) -> list[MicroBatch]:
    """Return this rank's micro-batches: of two ranks, the second one has text alone."""
    data = {image.sha256: image.data for image in IMAGES}

    def read(image: StoredImage) -> Any:
        return processor.process(data[image.ref.sha256]).pixel_values

    of_images = [_row(processor, IMAGES, [10, 11, 12 + n]) for n in range(2)] + [_row(processor, IMAGES[:1], [13])]
    of_text = [[_row(processor, [], [20, 21])], [_row(processor, [], [22])], [_row(processor, [], [23, 24, 25])]]
    shares = [[of_images, of_text[0]], of_text[1:]]
    own = [piece for share in shares for piece in share] if dims.rows.count == 1 else shares[dims.rows.index]
    found = [build(piece) for piece in own]
    return [b if b.images is None else replace(b, images=replace(b.images, read=read)) for b in found]


def main(arguments: Sequence[str]) -> int:
    """Train every case, and print what came of it as JSON on rank 0."""
    model, folder = map(Path, arguments)
    dims = ParallelDims(Ranks(), ParallelLayout(1, 1))
    processor = read_processor(model)
    assert processor is not None
    results = {}
    for name, changes in CASES.items():
        policy = load_policy(model, replace(HOW, **changes), dims, temperature=1.0)
        objective = build_objective(AlgorithmSettings())
        batches = micro_batches(processor, dims)
        steps = [policy.train_step(batches, objective) for _ in range(NUM_STEPS)]
        tensors = policy.weights.snapshot()
        results[name] = {
            "loss": [step.loss for step in steps],
            "norm": [step.grad_norm for step in steps],
            "weights": {key: float(tensor.double().norm()) for key, tensor in tensors.items()},
        }
    if dims.ranks.is_leader:
        (folder / f"{dims.ranks.num_ranks}.json").write_text(json.dumps(results))
    dims.ranks.barrier()
    return 0

"""Exports the trained model as a Hugging Face folder: each rank writes its own files, tensor by tensor, and rank 0 compares.

No rank holds more than one tensor of the model besides its own part, however the parameters are sharded. The folder gets its
name when it is complete, and, where it is verified, after `transformers` has loaded it and computed the trainer's log-probabilities.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from penstock.protocol.errors import UnsupportedModel
from penstock.trainer.algorithm.batch import MicroBatch, Row, build
from penstock.trainer.errors import ExportFailed
from penstock.trainer.learner.load_model import from_folder
from penstock.trainer.learner.policy import Policy
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing.model_folder import MAX_SHARD_BYTES, ModelFiles, write_small_files
from penstock.trainer.publishing.weight_buckets import assign_buckets

log = structlog.get_logger("trainer.export")

_ROWS, _TOKENS = 4, 24  # of the texts whose log-probabilities are compared
# Mean difference of a log-probability that rounding explains: of kernels, and of adapters that are merged in the model's dtype.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def export_model(
    policy: Policy,
    dims: ParallelDims,
    folder: Path,
    *,
    like: Path,
    changed: Mapping[str, Any] | None = None,
    verify: bool = True,
    max_file_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model folder, adapters merged, that `transformers` loads; an older one is replaced. Collective.

    Args:
        policy: The trained model.
        dims: Who writes which files.
        folder: The folder to write, the same on every rank, on storage that all ranks share.
        like: The folder that training started from, with config and tokenizer.
        changed: Fields of ``config.json`` that differ.
        verify: Load the folder on the rank that writes small files, and compare log-probabilities with the trainer's.
        max_file_bytes: Bytes of a file of weights; a larger tensor has a file of its own.

    Raises:
        ExportFailed: The folder cannot be loaded, or gives other log-probabilities; an older folder is unchanged.
    """
    partial = folder.with_name(folder.name + ".partial")
    layout = policy.layout(bucket_bytes=max_file_bytes)
    if dims.writes_files:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_small_files(partial, layout, like=like, dtype=policy.dtype, changed=changed)
    dims.ranks.barrier()
    share = dims.buckets
    with ModelFiles(partial, layout, assign_buckets(layout, share.count)[share.index]) as files:
        policy.copy_to(files)
    dims.ranks.barrier()
    if verify:
        _compare(policy, dims, partial, folder)
    if dims.writes_files:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def _compare(policy: Policy, dims: ParallelDims, written: Path, folder: Path) -> None:
    batch = _texts(policy.vocab_size)
    with policy.without_dropout():
        trained = policy.logprobs(batch, replays=False).cpu()  # no engine chose experts for these texts
    if not dims.writes_files:
        return
    try:
        model, report = from_folder(policy.model_class, "the exported model", written, policy.dtype)
    except UnsupportedModel as err:
        raise ExportFailed(
            f"the model exported to {written} cannot be loaded ({err}); {folder} is as it was before. Report this internal error"
        ) from None
    if missing := sorted(map(str, report["missing_keys"])):  # of parts that texts alone do not use
        raise ExportFailed(
            f"the model exported to {written} has no {missing[0]} ({len(missing)} tensors); {folder} is as it was before. Report this "
            "internal error; the newest checkpoint has the weights"
        )
    gap = float((trained - _score(policy.scorer_around(model.eval()), batch)).abs().mean())
    if not gap <= _TOLERANCE[policy.dtype]:
        raise ExportFailed(
            f"the model exported to {written} gives other log-probabilities than the trainer: {gap:.2g} apart on average, "
            f"expected at most {_TOLERANCE[policy.dtype]:g}; {folder} is as it was before. Report this internal error; the "
            "newest checkpoint has the weights"
        )
    log.info("export verified", folder=str(folder), mean_logprob_difference=gap)


def _score(scorer: nn.Module, batch: MicroBatch) -> Tensor:
    with torch.no_grad():
        return scorer(
            batch.input_ids, batch.predictors, batch.targets, position_ids=batch.position_ids, layout=batch.layout
        )


def _texts(vocab_size: int) -> MicroBatch:
    """Return texts of random tokens, the same on every rank."""
    rng = np.random.default_rng(0)
    return build(
        [
            Row(
                token_ids=rng.integers(0, vocab_size, _TOKENS).astype(np.int32),
                loss_mask=np.arange(_TOKENS) > 0,
                behaviour_logprobs=np.zeros(_TOKENS, dtype=np.float32),
                advantage=0.0,
                weight=0.0,
            )
            for _ in range(_ROWS)
        ]
    )

"""Exports the trained model as a Hugging Face folder: each rank writes its files, and rank 0 compares.

No rank holds more than one tensor of the model besides its part, however the parameters are sharded. The folder gets
its name when it is complete, and, where it is verified, after `transformers` has computed the trainer's
log-probabilities.

In bfloat16 two computations of the same tokens differ, by how much depends on the model: a text that it finds unlikely
has large logits, of which 8 bits are kept. So they are compared beside that noise, measured on the same texts: the
exported model in its dtype and in float32.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import structlog
import torch
from torch import Tensor

from penstock.protocol import files
from penstock.protocol.errors import UnsupportedModel
from penstock.protocol.weights.layout import WeightLayout, shard_header, shard_index, shard_name
from penstock.trainer.algorithm.batch import Row, build
from penstock.trainer.errors import ExportFailed
from penstock.trainer.learner import adapter
from penstock.trainer.learner.load_model import from_folder
from penstock.trainer.learner.logprobs import read_batch
from penstock.trainer.learner.policy import Policy
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing.version_writer import small_files
from penstock.trainer.publishing.weight_buckets import assign_buckets

log = structlog.get_logger("trainer.export")

MAX_SHARD_BYTES = 1024**3

_ROWS, _TOKENS = 4, 24  # of the texts whose log-probabilities are compared
_TOLERANCE = 1e-3  # mean difference of a log-probability that other kernels explain
# The same in bfloat16, in units of the dtype's noise, of whose root of 2 two exact computations are rounded apart.
_NOISES = 3.0
_KEPT_AT_LEAST = 0.9  # of what adapters change, else the merged model is another than the trained one


def export_model(
    policy: Policy,
    dims: ParallelDims,
    folder: Path,
    *,
    like: Path,
    changed: Mapping[str, Any] | None = None,
    verify: bool = True,
) -> None:
    """Write a model folder, adapters merged, that `transformers` loads; an older one is replaced. Collective.

    Config and tokenizer are those of the folder ``like``, but for the fields ``changed``. A tensor larger than
    `MAX_SHARD_BYTES` has a separate file. Raises ExportFailed if the folder cannot be loaded, or gives other
    log-probabilities; an older one is unchanged.
    """
    partial = folder.with_name(folder.name + ".partial")
    layout = policy.weights.layout(bucket_bytes=MAX_SHARD_BYTES)
    if dims.writes_files:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_small_files(partial, layout, like=like, dtype=policy.dtype, changed=changed)
    dims.ranks.barrier()
    share = dims.buckets
    rounding = adapter.Rounding()
    with ModelFiles(partial, layout, assign_buckets(layout, share.count)[share.index]) as sink:
        policy.weights.copy_to(sink, rounding=rounding)
    kept, changed_by_adapters = dims.ranks.sum(rounding.sums)
    if verify:
        _compare(policy, dims, partial, folder)
    if dims.writes_files:
        shutil.rmtree(folder, ignore_errors=True)
        files.fsync(partial)
        files.replace(partial, folder, sync_folder=True)
        if changed_by_adapters:
            _report_merge(kept / changed_by_adapters, policy.dtype, folder)


def _compare(policy: Policy, dims: ParallelDims, written: Path, folder: Path) -> None:
    rng = np.random.default_rng(0)
    batch = build(
        [
            Row(
                token_ids=rng.integers(0, policy.vocab_size, _TOKENS).astype(np.int32),
                loss_mask=np.arange(_TOKENS) > 0,
                behaviour_logprobs=np.zeros(_TOKENS, dtype=np.float32),
                advantage=0.0,
                weight=0.0,
            )
            for _ in range(_ROWS)
        ]
    )
    with policy.without_dropout():
        trained = policy.logprobs(batch, replays=False).cpu()  # no engine chose experts for these texts
    if not dims.writes_files:
        return
    try:
        model, report = from_folder(policy.model_class, "the exported model", written, policy.dtype)
    except UnsupportedModel as err:
        raise ExportFailed(
            f"the model exported to {written} cannot be loaded ({err}); "
            f"{folder} is as it was before. Report this internal error"
        ) from None
    if missing := sorted(map(str, report["missing_keys"])):  # of parts that texts alone do not use
        raise ExportFailed(
            f"the model exported to {written} has no {missing[0]} ({len(missing)} tensors); {folder} is as it was "
            "before. Report this internal error; the newest checkpoint has the weights"
        )
    scorer = policy.scorer_around(model.eval())
    with torch.no_grad():
        exported = read_batch(scorer, batch)
        noise = 0.0 if policy.dtype == "float32" else _mean_gap(exported, read_batch(scorer.float(), batch))
    gap, most = _mean_gap(trained, exported), max(_TOLERANCE, _NOISES * noise)
    if not gap <= most:
        raise ExportFailed(
            f"the model exported to {written} gives other log-probabilities than the trainer: {gap:.2g} apart on "
            f"average, expected at most {most:.2g}; {folder} is as it was before. Report this internal error; the "
            "newest checkpoint has the weights"
        )
    log.info("export verified", folder=str(folder), mean_logprob_difference=gap, noise_of_dtype=noise)


def _mean_gap(some: Tensor, others: Tensor) -> float:
    return float((some - others).abs().mean())


def _report_merge(kept: float, dtype: str, folder: Path) -> None:
    if kept >= _KEPT_AT_LEAST:
        log.info("adapters merged", folder=str(folder), kept=round(kept, 4))
        return
    text = (
        f"the merged model has {kept:.0%} of what its adapters change in the weights; the rest was rounded away: a "
        f"weight of {dtype} that is changed by less than half of its last digit stays as it was. The adapters on "
        "their base have all of it: FOLDER-adapter of penstock sft, dpo and rm, penstock weights export --adapter of "
        'a run. Or train with model.dtype = "float32"'
    )
    log.warning(text, folder=str(folder), kept=round(kept, 4))


class ModelFiles:
    """Some of a folder's files of weights, a bucket each, written tensor by tensor; a context manager."""

    def __init__(self, folder: Path, layout: WeightLayout, numbers: Iterable[int]) -> None:
        self._folder, self._layout = folder, layout
        self._places = {t.name: (n, t) for n in numbers for t in layout.buckets[n].tensors}
        self._files: dict[int, tuple[BinaryIO, int]] = {}  # with the length of its header
        self._opened = ExitStack()

    def __enter__(self) -> ModelFiles:
        for number in sorted({number for number, _ in self._places.values()}):
            file = self._opened.enter_context((self._folder / _file_name(self._layout, number)).open("wb"))
            header = shard_header(self._layout.buckets[number])
            file.write(header)
            self._files[number] = file, len(header)
        return self

    def __exit__(self, *_: object) -> None:
        with self._opened:
            for file, _header_bytes in self._files.values():
                file.flush()
                os.fsync(file.fileno())

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def put(self, name: str, tensor: Tensor) -> None:
        number, placed = self._places[name]
        file, header_bytes = self._files[number]
        dtype = getattr(torch, self._layout.buckets[number].dtype)
        whole = tensor.detach().to(dtype).to("cpu").contiguous().reshape(-1).view(torch.uint8)
        file.seek(header_bytes + placed.byte_offset)
        file.write(whole.numpy().data)


def _file_name(layout: WeightLayout, number: int) -> str:
    count = len(layout.buckets)
    return "model.safetensors" if count == 1 else shard_name(number, count)


def write_small_files(
    folder: Path, layout: WeightLayout, *, like: Path, dtype: str, changed: Mapping[str, Any] | None = None
) -> None:
    index = {"model.safetensors.index.json": shard_index(layout)} if len(layout.buckets) > 1 else {}
    for name, data in {**small_files(like, dtype, changed), **index}.items():
        files.atomic_write(folder / name, data, sync=True)

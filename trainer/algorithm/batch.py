"""Micro-batches of tensors from trajectories with advantages, distributed over the ranks; pure.

Rank 0 plans which rows go into which micro-batch of which rank (`plan_micro_batches`), every rank builds its micro-batches
(`build`). A micro-batch is one stream of tokens without padding; a prefix that several of its rows have in common is in
the stream once (`packed_rows`). The log-probabilities and gradients are those of every row alone.

The tokens of all images have the same id, so a prefix with another picture would look the same. For packing, every token of an image
therefore gets a separate number below 0, which says which part of which image of the micro-batch it is. So rows share an
image of a common prefix, an image is computed once however often it occurs, and a token is found by its place, never by its id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.protocol.groups import ImageRef, RowImages
from penstock.protocol.images.processor import rope_positions
from penstock.protocol.token_annotations import TeacherRow
from penstock.trainer.algorithm.device_copy import copied_together
from penstock.trainer.algorithm.losses.tokens import Sequences
from penstock.trainer.algorithm.packed_rows import (
    NO_PAIR_COST,
    Experts,
    Layout,
    PackedRows,
    PairCost,
    Prefixes,
    Tokens,
    balanced,
    common_prefixes,
    pack,
    padded_bins,
    units_of,
)
from penstock.trainer.errors import BatchDoesNotFit


class PlacedImages(NamedTuple):
    run_id: str
    images: RowImages


class StoredImage(NamedTuple):
    run_id: str
    ref: ImageRef


@dataclass(frozen=True, slots=True, eq=False)
class ImageParts:
    images: tuple[StoredImage, ...]
    rows: list[Tokens]  # of each row, its tokens with ``-1 - part`` for each token of an image


@dataclass(frozen=True, slots=True, eq=False)
class StreamImages:
    """The images of a micro-batch: P patches of all, M tokens of the stream that show one of their parts."""

    images: tuple[StoredImage, ...]  # each once
    grid_thw: Tensor  # [images, 3] int64
    places: Tensor  # [M] int64, in the stream
    parts: Tensor  # [M] int64, which of all parts of all images, in their order
    read: Callable[[StoredImage], npt.NDArray[np.float32]] | None = None  # the patches of one

    def pixel_values(self) -> Tensor:
        if self.read is None:
            raise ValueError("internal error, please report: images of a micro-batch without their pixel values")
        return torch.from_numpy(np.concatenate([self.read(image) for image in self.images]))


def number_parts(rows: Sequence[Tokens], images: Sequence[PlacedImages | None]) -> ImageParts:
    first: dict[tuple[str, tuple[int, int, int], int], int] = {}
    stored_images: list[StoredImage] = []
    size = 0
    numbered = []
    for tokens, placed in zip(rows, images, strict=True):
        if placed is None:
            numbered.append(tokens)
            continue
        copied = tokens.copy()
        for ref in placed.images.refs:
            key = ref.sha256, ref.grid_thw, ref.num_tokens
            if key not in first:
                first[key] = size
                stored_images.append(StoredImage(placed.run_id, ref))
                size += ref.num_tokens
            copied[ref.position : ref.end] = -1 - first[key] - np.arange(ref.num_tokens)
        numbered.append(copied)
    return ImageParts(tuple(stored_images), numbered)


def restored(packed: PackedRows, rows: Sequence[Tokens]) -> PackedRows:
    token_ids = packed.token_ids.copy()
    for tokens, where in zip(rows, packed.positions, strict=True):
        token_ids[where] = tokens[: len(where)]
    return replace(packed, token_ids=token_ids)


def in_stream(parts: ImageParts, packed: PackedRows) -> StreamImages | None:
    if not parts.images:
        return None
    places = np.flatnonzero(packed.token_ids < 0)
    return StreamImages(
        parts.images,
        torch.tensor([image.ref.grid_thw for image in parts.images], dtype=torch.int64),
        torch.from_numpy(places),
        torch.from_numpy(-1 - packed.token_ids[places]),
    )


def stream_positions(packed: PackedRows, images: Sequence[PlacedImages | None]) -> npt.NDArray[np.int64]:
    """Return the positions of a stream's tokens for rotary embeddings, [3, T]: for every row those that it has alone."""
    positions = np.zeros((3, len(packed.token_ids)), dtype=np.int64)
    for where, placed in zip(packed.positions, images, strict=True):
        row = None if placed is None else placed.images
        positions[:, where] = rope_positions(len(where), row, 1 if row is None else merge_size(row.refs[0]))
    return positions


def merge_size(ref: ImageRef) -> int:
    return math.isqrt(ref.num_patches // ref.num_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    token_ids: npt.NDArray[np.int32]  # [T] prompt then completion
    loss_mask: npt.NDArray[np.bool_]  # [T] True where the policy sampled the token; never at position 0
    behaviour_logprobs: npt.NDArray[np.float32]  # [T]; all 0.0 for supervised rows
    advantage: float
    weight: float  # of each sampled token in the loss (`trainer/algorithm/aggregation.py`)
    ages: npt.NDArray[np.int32] | None = None  # [T] versions between sampling and training; None: all 0
    sft_weight: float = 0.0  # of each sampled token in the added cross-entropy
    turns: Sequence[tuple[int, int]] = ()  # start and end of each: together all sampled tokens; none: one turn
    turn_advantages: Sequence[float] = ()  # of each turn, instead of ``advantage``
    teacher: TeacherRow | None = None  # about its sampled tokens
    experts: Experts | None = None  # [T - 1, layers, k] that computed its tokens but the last in the engine
    images: PlacedImages | None = None  # whose tokens are among ``token_ids``

    def by_turn(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        return np.repeat(np.asarray(values, dtype=np.float64), [end - start for start, end in self.turns])


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Tensors of one forward and backward pass; T tokens of all rows, N sampled tokens."""

    input_ids: Tensor  # [1, T] int64, each trajectory without its last token
    predictors: Tensor  # [N] int64, position in the stream whose output predicts the sampled token
    targets: Tensor  # [N] int64
    behaviour_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, which trajectory the token belongs to
    ages: Tensor  # [N] float32, versions between sampling and training
    sft_weights: Tensor  # [N] float32, of the added cross-entropy
    num_sequences: int  # trajectories, those without a sampled token included
    position_ids: Tensor | None = None  # [1, T] int64, place in its row; [3, 1, T] with images; None: 0, 1, 2, …
    layout: Layout | None = None  # which token attends to which; None: one row
    proximal_logprobs: Tensor | None = None  # [N] float32, recomputed before the first update on the batch
    reference_logprobs: Tensor | None = None  # [N] float32, of the frozen reference
    teacher_logprobs: Tensor | None = None  # [N] float32, of the sampled tokens, as the pack stores them
    teacher_top_ids: Tensor | None = None  # [N, k] int64, the teacher's likeliest tokens
    teacher_top_logprobs: Tensor | None = None  # [N, k] float32
    experts: Tensor | None = None  # [T, layers, k] uint8 or int32, which computed each token in the engine
    images: StreamImages | None = None
    reference_kl: Tensor | None = None  # [N] float32, exact KL to it over the vocabulary, for rewards by token
    turn: Tensor | None = None  # [N] int64, which turn the token belongs to; None: every trajectory is one turn
    num_turns: int = 0
    drift_limit: float | None = None  # largest (log current / behaviour)² that M2PO keeps, or clips at, in this batch

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.sequence, self.num_sequences)

    @property
    def turns(self) -> Sequences:
        return self.sequences if self.turn is None else Sequences(self.turn, self.num_turns)

    def to(self, device: torch.device) -> Self:
        """Move to a device in one copy; the patches of images follow when they are asked for."""
        own, of_images = _tensors_of(self), _tensors_of(self.images)
        moved = copied_together([*own.values(), *of_images.values()], device)
        changes: dict[str, Any] = dict(zip(own, moved, strict=False))
        if self.images is not None:
            changes["images"] = replace(self.images, **dict(zip(of_images, moved[len(own) :], strict=True)))
        return replace(self, **changes)


def _tensors_of(holder: MicroBatch | StreamImages | None) -> dict[str, Tensor]:
    held = () if holder is None else ((field.name, getattr(holder, field.name)) for field in fields(holder))
    return {name: value for name, value in held if isinstance(value, Tensor)}


def first_sampled(loss_mask: npt.NDArray[np.bool_]) -> int:
    """Return the position of a row's first sampled token, which is where its prompt ends."""
    where = np.flatnonzero(loss_mask)
    return int(where[0]) if len(where) else len(loss_mask)


def prefixes_of(
    token_ids: Sequence[npt.NDArray[np.int32]],
    loss_masks: Sequence[npt.NDArray[np.bool_]],
    experts: Sequence[Experts | None] = (),
    images: Sequence[PlacedImages | None] | None = None,
) -> Prefixes:
    starts = [first_sampled(mask) for mask in loss_masks]
    rows = token_ids if images is None else number_parts(token_ids, images).rows
    return common_prefixes([tokens[:-1] for tokens in rows], starts, of_all_rows(experts))


def of_all_rows(experts: Sequence[Experts | None]) -> list[Experts] | None:
    """Return the experts of rows; None unless they are known of each, for the same layers."""
    known = [expert for expert in experts if expert is not None]
    return (
        known
        if known and len(known) == len(experts) and len({row_experts.shape[1:] for row_experts in known}) == 1
        else None
    )


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    budget_tokens: int,
    num_ranks: int = 1,
    prefixes: Prefixes | None = None,
    pair_cost: PairCost = NO_PAIR_COST,
    padded: bool = False,
) -> list[list[list[int]]]:
    """Distribute rows over ranks and micro-batches.

    Rows that share a prefix stay together, unless they are over the budget or a rank would wait for the one that has
    them. Every rank gets the same number of micro-batches (their gradients are exchanged together) and about the same
    cost. A rank may get an empty micro-batch when there are fewer rows than micro-batches.

    Args:
        lengths: Tokens of each row.
        budget_tokens: Most tokens of a micro-batch; a shared prefix counts once.
        num_ranks: Number of ranks.
        prefixes: What rows share; None: nothing.
        pair_cost: Of one token that attends to one.
        padded: Share nothing, and count every row as long as its micro-batch's longest: for a model whose rows are padded.

    Returns:
        ``plan[rank][micro_batch]`` = row numbers.

    Raises:
        BatchDoesNotFit: A row alone is longer than the budget.
    """
    longest = max(lengths, default=0)
    if longest > budget_tokens:
        raise BatchDoesNotFit(
            f"a trajectory of {longest} tokens does not fit into trainer.micro_batch_tokens = "
            f"{budget_tokens}; raise it, or lower rollout.max_new_tokens or data.max_prompt_tokens"
        )
    if padded:
        plan = padded_bins(lengths, budget_tokens, num_ranks, pair_cost)
    else:
        known = prefixes or Prefixes(list(range(len(lengths))), [0] * len(lengths))
        plan = balanced(units_of(lengths, known, pair_cost), budget_tokens, num_ranks)
    return [[held.rows for held in bins] for bins in plan]


def build(rows: Sequence[Row], prompts: Sequence[int] | None = None) -> MicroBatch:
    """Build a micro-batch; ``prompts`` are tokens that rows share whole, None: those before the first sampled token."""
    sampled = [np.flatnonzero(row.loss_mask) for row in rows]
    experts = of_all_rows([row.experts for row in rows])
    starts = [first_sampled(row.loss_mask) for row in rows] if prompts is None else prompts
    images = [row.images for row in rows]
    parts = number_parts([row.token_ids for row in rows], images)
    packed = pack([tokens[:-1] for tokens in parts.rows], starts, experts)
    pictures = in_stream(parts, packed)
    position_ids = torch.from_numpy(packed.layout.depths)[None]
    if pictures is not None:
        packed = restored(packed, [row.token_ids for row in rows])
        position_ids = torch.from_numpy(stream_positions(packed, images))[:, None]
    predictors = [at[where - 1] for at, where in zip(packed.positions, sampled, strict=True)]
    counts = [len(where) for where in sampled]

    def each(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float64), counts)).to(dtype)

    def taken(values: Callable[[Row], npt.NDArray[Any]], dtype: torch.dtype = torch.float32) -> Tensor:
        return _flat([values(row)[where] for row, where in zip(rows, sampled, strict=True)], dtype)

    num_turns = [max(1, len(row.turns)) for row in rows]
    firsts = np.cumsum([0, *num_turns])
    turn = None
    if max(num_turns, default=1) > 1:
        numbers = [
            first + (row.by_turn(range(len(row.turns))) if row.turns else np.zeros(count))
            for row, first, count in zip(rows, firsts, counts, strict=False)
        ]
        turn = _flat(numbers, torch.int64)
    advantages = each([row.advantage for row in rows])
    if any(len(row.turn_advantages) for row in rows):
        advantages = _flat(
            [
                row.by_turn(row.turn_advantages) if len(row.turn_advantages) else np.full(count, row.advantage)
                for row, count in zip(rows, counts, strict=True)
            ],
            torch.float32,
        )
    logprobs, top_ids, top_logprobs = _of_teachers([row.teacher for row in rows])
    return MicroBatch(
        input_ids=torch.from_numpy(packed.token_ids)[None],
        predictors=_flat(predictors, torch.int64),
        targets=taken(lambda row: row.token_ids, torch.int64),
        behaviour_logprobs=taken(lambda row: row.behaviour_logprobs),
        advantages=advantages,
        weights=each([row.weight for row in rows]),
        sequence=each(range(len(rows)), torch.int64),
        ages=taken(lambda row: np.zeros(len(row.token_ids)) if row.ages is None else row.ages),
        sft_weights=each([row.sft_weight for row in rows]),
        num_sequences=max(1, len(rows)),
        position_ids=position_ids,
        layout=packed.layout,
        turn=turn,
        num_turns=int(firsts[-1]),
        teacher_logprobs=logprobs,
        teacher_top_ids=top_ids,
        teacher_top_logprobs=top_logprobs,
        experts=None if experts is None else _of_stream(experts, packed),
        images=pictures,
    )


def _of_stream(experts: Sequence[Experts], packed: PackedRows) -> Tensor:
    stream_experts = np.zeros((len(packed.token_ids), *experts[0].shape[1:]), experts[0].dtype)
    for row_experts, where in zip(experts, packed.positions, strict=True):
        stream_experts[where] = row_experts
    return torch.from_numpy(stream_experts if stream_experts.dtype == np.uint8 else stream_experts.astype(np.int32))


def _of_teachers(teacher_rows: Sequence[TeacherRow | None]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows = [row for row in teacher_rows if row is not None]
    if not rows or len(rows) < len(teacher_rows) or len({row.top_ids.shape[1] for row in rows}) > 1:
        return None, None, None
    return (
        _flat([row.logprobs for row in rows], torch.float32),
        _flat([row.top_ids for row in rows], torch.int64),
        _flat([row.top_logprobs for row in rows], torch.float32),
    )


def _flat(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)

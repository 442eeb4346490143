"""The metrics of an optimizer step, of a pass over a batch, and of all steps of a batch; and the rows whose log-probabilities are kept.

`StepWatch` measures an optimizer step by groups of layers while DeepSpeed makes it, and leaves it out when it is told to.
AdamW calls `StepWatch` right before and right after it changes the master weights of this rank: once for a step, or once for each
part of the weights that DeepSpeed steps at a time. Its gradients are then reduced over the ranks and clipped, at every ZeRO stage, so
that a group's norm is the whole norm times the root of its share in the squares.

The update is read from AdamW's moments after the step instead of from a copy of the weights before it, which would add a third to
the memory of the step: ``w_before - w_after = lr m̂ / (√v̂ + ε) + lr λ w_before``.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.protocol.packs.step_logprobs import CLIPPED, DUAL_CLIPPED, REJECTED
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.mismatch import FRESH_MAXIMA, FRESH_SUMS
from penstock.trainer.algorithm.objective import Outcome, TokenOutcomes
from penstock.trainer.learner.flops import NO_WORK, Work
from penstock.trainer.learner.optimizer_state import MOMENTS, Place, part_of
from penstock.trainer.parallel_dims import ParallelDims

ALL = "all"  # everything that is trained, in figures by group
KINDS = ("embedding", "attention", "mlp", "norm", "head", "other")
MAX_RANGES = 4

_BLOCK = re.compile(r"(?:^|\.)(\d+)(?=\.)")
_NORM = re.compile(r"norm|(?:^|\.)ln_?\d*(?:_\w+)?\.")
_ATTENTION = re.compile(r"attn|attention")
_MLP = re.compile(r"mlp|feed_forward|ffn|expert|moe|router|(?:^|\.)fc\d?\.")
_HEAD = re.compile(r"head|embed_out|score")
_EMBEDDING = re.compile(r"emb|(?:^|\.)w[tp]e\.")

WINDOW = 64  # optimizer steps
# Why optimizer steps were not made, and trajectories not trained on, beside the reasons of filters.
OUTLIER_STEP, ALL_REJECTED = "outlier_step", "all_rejected"
_KEPT_DTYPES: tuple[Any, ...] = (np.int64, np.int64, np.float32, np.uint8)  # of the fields of `KeptRows`
_PIECE = 2**22  # elements that are computed at a time
Sum = Callable[[Sequence[float]], list[float]]  # over the ranks


def layer_groups(names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the groups of each parameter: its kind, and the range of blocks that it is in, if any.

    A tied output head is in ``embedding``. A parameter that no rule knows is in ``other``.
    """
    matches = {name: _BLOCK.search(name) for name in names}
    blocks = {name: int(block[1]) if block else None for name, block in matches.items()}
    num_blocks = max((number for number in blocks.values() if number is not None), default=-1) + 1
    return {
        name: (_kind(name, in_block=number is not None), *([] if number is None else [_range(number, num_blocks)]))
        for name, number in blocks.items()
    }


def _kind(name: str, *, in_block: bool) -> str:
    if _NORM.search(name):
        return "norm"
    rules = ((_ATTENTION, "attention"), (_MLP, "mlp")) if in_block else ((_HEAD, "head"), (_EMBEDDING, "embedding"))
    return next((kind for rule, kind in rules if rule.search(name)), "other")


def _range(number: int, num_blocks: int) -> str:
    count = min(MAX_RANGES, num_blocks)
    index = (number * count) // num_blocks
    first = -(-index * num_blocks // count)
    last = -(-(index + 1) * num_blocks // count) - 1
    return f"block {first}" if first == last else f"blocks {first}-{last}"


@dataclass(slots=True)
class Outliers:
    above: float  # multiple of the median
    after: int  # optimizer steps before the first one that may be left out
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def limit(self) -> float | None:
        """The largest norm of a step that is made; None while too few are known."""
        return self.above * median(self.norms) if len(self.norms) >= min(self.after, WINDOW) else None

    def is_outlier(self, norm: float) -> bool:
        limit = self.limit
        self.norms.append(norm)
        return limit is not None and norm > limit

    def restore(self, norms: Iterable[float]) -> None:
        self.norms = deque(norms, maxlen=WINDOW)


@dataclass(frozen=True, slots=True)
class LayerMetrics:
    grad_norm: float  # before clipping
    # Norm of the change over that of the weights before; None: these are 0, or the step was left out.
    update_ratio: float | None


class StepWatch:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        places: Callable[[], Iterable[Place]],
        groups: Mapping[str, Sequence[str]],
        is_left_out: Callable[[], bool],
    ) -> None:
        """Watch AdamW; ``is_left_out`` is asked once for each step that is about to be made."""
        self._optimizer, self._places, self._groups = optimizer, places, groups
        self._is_left_out = is_left_out
        self._names = sorted({group for assigned in groups.values() for group in assigned})
        self._squares: dict[str, list[float]] = {}  # of gradient, update and weights, by group
        self._leaves_out: bool | None = None
        self._taken: list[list[Any]] = []
        optimizer.register_step_pre_hook(lambda *_: self._before())
        optimizer.register_step_post_hook(lambda *_: self._after())

    def begin(self) -> None:
        self._squares = {name: [0.0, 0.0, 0.0] for name in self._names}
        self._leaves_out = None

    @property
    def left_out(self) -> bool:
        return bool(self._leaves_out)

    def figures(self, norm: float, add_up: Sum) -> dict[str, LayerMetrics]:
        """Return what the step since `begin` did, over all ranks; ``norm`` is that of the whole gradient, before clipping."""
        flat = add_up([value for name in self._names for value in self._squares[name]])
        by_name = {name: flat[3 * number : 3 * number + 3] for number, name in enumerate(self._names)}
        kinds = {assigned[0] for assigned in self._groups.values()}  # every parameter is in exactly one of these
        by_name[ALL] = [sum(by_name[kind][number] for kind in kinds) for number in range(3)]
        total = by_name[ALL][0]
        return {
            name: LayerMetrics(
                grad_norm=norm * math.sqrt(gradient / total) if total > 0.0 else 0.0,
                update_ratio=math.sqrt(update / weights) if weights > 0.0 else None,
            )
            for name, (gradient, update, weights) in by_name.items()
        }

    def _before(self) -> None:
        if self._leaves_out is None:
            self._leaves_out = self._is_left_out()
        places = [place for place, _ in self._stepped()]
        self._add(
            places, 0, [_square(part_of(grad, place)) for place in places if (grad := place.stepped.grad) is not None]
        )
        if self._leaves_out:  # AdamW then changes neither weights nor moments, nor counts a step
            self._taken = [group["params"] for group in self._optimizer.param_groups]
            for group in self._optimizer.param_groups:
                group["params"] = []

    def _after(self) -> None:
        if self._leaves_out:
            for group, taken in zip(self._optimizer.param_groups, self._taken, strict=True):
                group["params"] = taken
            return
        stepped = list(self._stepped())
        steps = [self._optimizer.state[place.stepped]["step"] for place, _ in stepped]
        counts = torch.stack(steps).tolist() if steps else []  # one transfer, where the device keeps them
        measured = [self._moved(place, group, count) for (place, group), count in zip(stepped, counts, strict=True)]
        places = [place for place, _ in stepped]
        self._add(places, 1, [update for update, _ in measured])
        self._add(places, 2, [weights for _, weights in measured])

    def _stepped(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Yield what AdamW steps in this call, as far as this rank accounts for it, each with its settings."""
        groups = {id(tensor): group for group in self._optimizer.param_groups for tensor in group["params"]}
        for place in self._places():
            if place.is_written and place.stepped.grad is not None and id(place.stepped) in groups:
                yield place, groups[id(place.stepped)]

    def _moved(self, place: Place, group: Mapping[str, Any], count: float) -> tuple[Tensor, Tensor]:
        """Return the squared norms of the change of a part by step number ``count``, and of the part before it."""
        state, lr, decay = self._optimizer.state[place.stepped], group["lr"], group["lr"] * group["weight_decay"]
        beta1, beta2 = group["betas"]
        rate, root = lr / (1 - beta1**count), math.sqrt(1 - beta2**count)
        weights = part_of(place.stepped, place)
        first, second = (part_of(state[moment], place) for moment in MOMENTS)
        updates, befores = [], []
        for start in range(0, place.num, _PIECE):
            mean, square, after = (tensor[start : start + _PIECE] for tensor in (first, second, weights))
            move = mean.div(square.sqrt().div_(root).add_(group["eps"])).mul_(rate)
            before = (after + move).div_(1 - decay)
            befores.append(_square(before))
            updates.append(_square(move.add_(before, alpha=decay) if decay else move))
        return torch.stack(updates).sum(), torch.stack(befores).sum()

    def _add(self, places: Sequence[Place], kind: int, squares: Sequence[Tensor]) -> None:
        if not places:
            return
        for place, square in zip(places, torch.stack(list(squares)).tolist(), strict=True):
            for group in self._groups[place.name]:
                self._squares[group][kind] += square


def _square(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float32).double().square()


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Rows of a plan, in any order, and the values of their sampled tokens one row after another."""

    rows: npt.NDArray[np.int64]  # [R] numbers in the plan
    counts: npt.NDArray[np.int64]  # [R] sampled tokens of each
    logprobs: npt.NDArray[np.float32]  # [N]
    outcomes: npt.NDArray[np.uint8]  # [N] as in `StepLogprobs`

    def to_bytes(self) -> bytes:
        arrays = self.rows, self.counts, self.logprobs, self.outcomes
        packed = msgpack.packb([array.tobytes() for array in arrays])
        assert packed is not None
        return packed

    @classmethod
    def from_bytes(cls, packed: bytes) -> KeptRows:
        arrays: list[Any] = list(map(np.frombuffer, msgpack.unpackb(packed), _KEPT_DTYPES))
        return cls(*arrays)

    @classmethod
    def joined(cls, parts: Sequence[KeptRows]) -> KeptRows:
        empty = [np.empty(0, dtype) for dtype in _KEPT_DTYPES]
        columns = zip(empty, *((part.rows, part.counts, part.logprobs, part.outcomes) for part in parts), strict=True)
        arrays: list[Any] = list(map(np.concatenate, columns))
        return cls(*arrays)


class RowRecorder:
    """Takes the rows below ``num_rows`` of one rank's micro-batches; an `Observer` of a policy."""

    def __init__(self, micro_batches: Sequence[Sequence[int]], num_rows: int) -> None:
        self._micro_batches = iter(micro_batches)
        self._num_rows = num_rows
        self._parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Tensor, Tensor]] = []

    def __call__(self, tokens: TokenOutcomes | None, batch: MicroBatch) -> None:
        if tokens is None:
            return
        rows = np.array(next(self._micro_batches), np.int64)
        if not (rows < self._num_rows).any():
            return
        counts = torch.bincount(batch.sequence, minlength=len(rows)).numpy()
        outcomes = tokens.clipped.byte() * CLIPPED + tokens.dual_clipped.byte() * DUAL_CLIPPED
        self._parts.append((rows, counts, tokens.logprobs.float(), outcomes + (~tokens.kept).byte() * REJECTED))

    def gather(self, dims: ParallelDims) -> KeptRows:
        """Return the rows of all ranks, on rank 0; those of this rank come from the device in two copies."""
        own = KeptRows.joined([])
        if self._parts:
            of_rows, of_counts, of_logprobs, of_outcomes = zip(*self._parts, strict=True)
            rows, counts = np.concatenate(of_rows), np.concatenate(of_counts)
            wanted = rows < self._num_rows
            of_tokens = np.repeat(wanted, counts)
            logprobs, outcomes = (torch.cat(some).cpu().numpy()[of_tokens] for some in (of_logprobs, of_outcomes))
            own = KeptRows(rows[wanted], counts[wanted], logprobs, outcomes)
        return KeptRows.joined([KeptRows.from_bytes(part) for part in dims.gather(own.to_bytes())])


@dataclass(frozen=True, slots=True)
class PassMetrics:
    num_updates: int  # optimizer steps
    clip_fraction: float
    kl_proximal: float  # per token, from the policy before the batch to the one before each optimizer step


@dataclass(frozen=True, slots=True)
class StepMetrics:
    loss: float
    grad_norm: float  # before clipping
    lr: float
    sums: dict[str, float]
    maxima: dict[str, float]
    critic: Mapping[str, float] = field(default_factory=dict)  # its metrics, in a run with a critic
    lr_factor: float = 1.0  # of the schedule's learning rate, contained in ``lr``
    passes: tuple[PassMetrics, ...] = ()  # in a run with several optimizer steps on a batch
    layers: Mapping[str, LayerMetrics] = field(default_factory=dict)  # by group of layers
    left_out: tuple[str, ...] = ()  # of each optimizer step, in order: why it was not made; "" for one that was
    work: Work = NO_WORK  # of all passes of the policy for the batch, over all ranks
    kept: KeptRows | None = field(default=None, compare=False)  # the log-probabilities that were asked for; on rank 0

    @property
    def moved_weights(self) -> bool:
        return self.lr > 0.0 and self.grad_norm > 0.0 and not (self.left_out and all(self.left_out))


class StepSums:
    """The loss, sums and maxima of micro-batches; the host waits for the device once, in `over`."""

    def __init__(self) -> None:
        self._added: list[
            tuple[list[str], list[str], Tensor]
        ] = []  # names of sums and maxima; all figures, the loss first

    def add(self, outcome: Outcome) -> None:
        loss = outcome.loss.detach().double()
        figures = [*outcome.sums.values(), *outcome.maxima.values()]
        held = [value if isinstance(value, Tensor) else loss.new_full((), value) for value in figures]
        self._added.append((list(outcome.sums), list(outcome.maxima), torch.stack([loss, *held])))

    def over(self, dims: ParallelDims) -> tuple[float, dict[str, float], dict[str, float]]:
        loss, sums, maxima = 0.0, dict[str, float](), dict[str, float]()
        figures = iter(torch.cat([added for *_, added in self._added]).tolist() if self._added else [])
        for names, of_maxima, _ in self._added:
            loss += next(figures)
            for name in names:
                sums[name] = sums.get(name, 0.0) + next(figures)
            for name in of_maxima:
                maxima[name] = max(maxima.get(name, float("-inf")), next(figures))
        loss, *summed = dims.sum([loss, *sums.values()])
        top = dims.maximum(list(maxima.values()))
        return loss, dict(zip(sums, summed, strict=True)), dict(zip(maxima, top, strict=True))


def pass_metrics(steps: Sequence[StepMetrics]) -> PassMetrics:
    tokens = max(1.0, sum(step.sums["tokens"] for step in steps))
    return PassMetrics(
        num_updates=len(steps),
        clip_fraction=sum(step.sums["clipped"] for step in steps) / tokens,
        kl_proximal=sum(step.sums["kl_proximal"] for step in steps) / tokens,
    )


def batch_metrics(passes: Sequence[Sequence[StepMetrics]]) -> StepMetrics:
    """Return the metrics of a batch: means over its optimizer steps, and largest values.

    Sums are means over the passes, so that they count every token once. Engine and trainer are compared on the tokens of the
    first optimizer step: the trainer scored only those with the weights under which the engine sampled.
    """
    steps = [step for some in passes for step in some]
    first = steps[0]
    sums = {name: sum(step.sums[name] for step in steps) / len(passes) for name in first.sums}
    maxima = {name: max(step.maxima[name] for step in steps) for name in first.maxima}
    return replace(
        first,
        loss=fmean(step.loss for step in steps),
        grad_norm=fmean(step.grad_norm for step in steps),
        lr=fmean(step.lr for step in steps),
        lr_factor=fmean(step.lr_factor for step in steps),
        sums={**sums, **{name: first.sums[name] for name in FRESH_SUMS}},
        maxima={**maxima, **{name: first.maxima[name] for name in FRESH_MAXIMA}},
        layers=_mean_layers([step.layers for step in steps]),
        left_out=tuple(reason for step in steps for reason in step.left_out),
        passes=tuple(pass_metrics(some) for some in passes),
    )


def _mean_layers(steps: Sequence[Mapping[str, LayerMetrics]]) -> dict[str, LayerMetrics]:
    means = {}
    for name in steps[0]:
        ratios = [ratio for step in steps if (ratio := step[name].update_ratio) is not None]
        means[name] = LayerMetrics(fmean(step[name].grad_norm for step in steps), fmean(ratios) if ratios else None)
    return means

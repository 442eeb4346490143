"""Decide which GPUs of one machine engines and trainer use, by memory; pure.

| case                        | decision                                                                                          |
|-----------------------------|---------------------------------------------------------------------------------------------------|
| both roles, several GPUs    | the trainer gets the fewest ranks that fit (at most half before ZeRO 3, before more), engines the rest; engines first |
| both roles, one GPU         | beside each other, each with a part of the memory, where both fit; else in turns, where each fits alone |
| one role                    | its GPUs: those of ``[placement]``, else all                                                       |
| memory cannot be estimated  | half for each                                                                                     |

What the run file says counts before all of it. A GPU that other processes use is left out unless ``[placement]`` lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.deploy.placement.placement import DoesNotFit, Placement, gb, numbers
from penstock.protocol.config.shared_sections import SHARED, PlacementSettings
from penstock.protocol.metrics.gpu import Gpu

_PLANNED = 0.92  # of a GPU's free memory: the rest is CUDA's context, and room between allocations that none fits into
_IN_USE = 0.1  # of a GPU's memory: with more, other processes use it; a driver alone and a desktop hold less
_BESIDE = 3_000_000_000  # bytes of an engine besides weights, keys and values: its CUDA context, graphs and activations
_LEFT = 1_000_000_000  # bytes of a rank whose states are in host memory: its CUDA context, and small blocks
_MOST_ENGINES = 64  # of one worker
_MIG = "parts of a divided GPU (MIG) do not work together, and a process sees one of them"
Role = Literal["both", "trainer", "engines"]


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """What the engines of a run need; sizes in bytes, of one engine on all of its GPUs together."""

    section: str  # of its settings in the run file
    sizes: tuple[int, ...]  # GPUs of one engine: as set, or those that the model's heads allow, least first
    engines: int | None  # of each worker; None: not set
    workers: int | None
    weights: int | None  # None: not known
    cache: int  # keys and values that it must hold at least
    fraction: float | None  # of the GPU's memory, as set
    takes_fraction: bool = True
    one_of_worker: bool = False  # each worker has one engine
    may_release: bool = False  # its memory, so that it can have the GPU in turns with the trainer


@dataclass(frozen=True, slots=True)
class TrainerNeed:
    ranks: int | None  # on this machine; None: not set
    stages: tuple[int, ...]  # of ZeRO: as set, or the default and those after it
    peak: Callable[[int, int], int | None]  # bytes of a rank by ranks and stage; None: not known
    advice: Callable[[int, int, int], Sequence[str]]  # settings that fit, by ranks, stage, and bytes of a GPU
    multiple: int = 1  # ranks come in multiples of it
    most: int = 2**30  # ranks that have work
    takes_all: bool = False  # GPUs that it has for itself


def place(
    gpus: Sequence[Gpu],
    wishes: PlacementSettings,
    engine: EngineNeed | None,
    trainer: TrainerNeed | None,
    role: Role = "both",
) -> Placement:
    """Return which GPUs the roles get that need some; raises DoesNotFit with what is missing, and the setting to change.

    ``role`` is the one whose processes this command starts. With ``[placement]`` the other one has its part of the GPUs on this machine,
    and may run already; without, ``engine`` or ``trainer`` is None.
    """
    is_wished = wishes.engines is not None or wishes.trainer is not None
    if not gpus:
        if is_wished:
            raise DoesNotFit(
                "[placement] gives out GPUs, and this command sees none; take the section out, or set CUDA_VISIBLE_DEVICES"
            )
        return Placement()
    if engine is None and trainer is None:
        return Placement()
    listed = [number for wish in (wishes.engines, wishes.trainer) if isinstance(wish, tuple) for number in wish]
    if listed and max(listed) >= len(gpus):
        raise DoesNotFit(
            f"[placement] names GPU {max(listed)}, and this command sees {len(gpus)}: numbers go from 0 to {len(gpus) - 1}"
        )
    may_run = role != "both" and (is_wished or wishes.shared in SHARED)  # the other role, already
    given = [replace(gpu, used=0, is_given=False) for gpu in gpus] if may_run else list(gpus)
    in_use = [] if is_wished else [gpu for gpu in given if _is_in_use(gpu)]
    usable = [gpu for gpu in given if gpu not in in_use]
    notes = tuple(f"{_in_use_text([gpu])}: left out" for gpu in in_use)
    if not usable:
        raise DoesNotFit(
            "; ".join(notes)
            + "; end them, set CUDA_VISIBLE_DEVICES to GPUs that are free, or divide them in [placement]"
        )
    case = _Case(tuple(given), usable, wishes, engine, trainer, notes)
    alone = wishes.shared == "auto" and len(usable) == 1
    both_need = engine is not None and trainer is not None
    placement = (_shared if both_need and (alone or wishes.shared in SHARED) else _separate)(case)
    return _of_role(placement, gpus, role)


def _of_role(placement: Placement, gpus: Sequence[Gpu], role: Role) -> Placement:
    """Return the part of one role; raises DoesNotFit if other processes use its GPUs and it does not share them."""
    if role == "both":
        return placement
    own = placement.trainer if role == "trainer" else [gpu for engine in placement.engines for gpu in engine]
    taken = [gpus[gpu.number] for gpu in own if _is_in_use(gpus[gpu.number])]
    if taken and not placement.is_shared:
        raise DoesNotFit(
            f"{_in_use_text(taken)}, and [placement] gives them to this command; end them, or change placement.{role}"
        )
    if role == "trainer":
        return replace(placement, gpus=tuple(gpus), engines=(), num_workers=None)
    return replace(placement, gpus=tuple(gpus), trainer=(), zero_stage=None)


def _is_in_use(gpu: Gpu) -> bool:
    return gpu.is_given or gpu.used > _IN_USE * gpu.total


def _in_use_text(gpus: Sequence[Gpu]) -> str:
    given = "another command has given it to its processes"
    return "; ".join(
        f"GPU {gpu.number}: {given if gpu.is_given else f'{gb(gpu.used)} of {gb(gpu.total)} are used by other processes'}"
        for gpu in gpus
    )


@dataclass(frozen=True, slots=True)
class _Case:
    gpus: tuple[Gpu, ...]
    usable: Sequence[Gpu]
    wishes: PlacementSettings
    engine: EngineNeed | None
    trainer: TrainerNeed | None
    notes: tuple[str, ...]

    def listed(self, role: str) -> list[Gpu] | None:
        wish = getattr(self.wishes, role)
        return [self.gpus[number] for number in wish] if isinstance(wish, tuple) else None

    def count(self, role: str) -> int | None:
        wish = getattr(self.wishes, role)
        return len(wish) if isinstance(wish, tuple) else wish

    def pool(self, role: str, other: str, taken: Sequence[Gpu] = ()) -> list[Gpu]:
        """Return the GPUs that a role may have: those listed, else what is not the other's. Engines count from the first GPU on."""
        if (listed := self.listed(role)) is not None:
            return listed
        not_free = [*taken, *(self.listed(other) or ())]
        free = [gpu for gpu in self.usable if gpu not in not_free]
        wish, own = (None if taken else getattr(self.wishes, other)), getattr(self.wishes, role)
        if isinstance(wish, int):
            free = free[: max(0, len(free) - wish)] if role == "engines" else free[wish:]
        if isinstance(own, int):
            free = free[:own] if role == "engines" else free[max(0, len(free) - own) :]
        return free


def _separate(case: _Case) -> Placement:
    engine, trainer = case.engine, case.trainer
    if trainer is None:
        engines, workers = _engines(case, case.pool("engines", "trainer")) if engine else ((), None)
        return Placement(case.gpus, engines, (), workers, reason=_engine_reason(engine, engines), notes=case.notes)
    free = case.pool("trainer", "engines")
    reserved = engine.sizes[0] if engine and case.wishes.engines is None and case.listed("trainer") is None else 0
    refusals: list[DoesNotFit] = []
    available = min(len(free), len(case.usable) - reserved) if reserved else len(free)
    for ranks, stage in _layouts(case, trainer, available):
        own = free[-ranks:] if engine else free[:ranks]
        peak, limit = trainer.peak(ranks, stage), min(map(planned, own))
        if peak is not None and peak > limit:
            refusals.append(_too_large(trainer, own, stage, peak, limit))
            continue
        try:
            engines, workers = _engines(case, case.pool("engines", "trainer", own)) if engine else ((), None)
        except DoesNotFit as err:
            refusals.insert(0, err)
            continue
        reason = _trainer_reason(trainer, ranks, peak, limit, _engine_reason(engine, engines))
        return Placement(case.gpus, engines, tuple(own), workers, stage, reason=reason, notes=case.notes)
    of_engines = [refusal for refusal in refusals if not refusal.of_trainer]
    raise (of_engines or refusals)[-1]


def _shared(case: _Case) -> Placement:
    engine, trainer, wished = case.engine, case.trainer, case.wishes.shared
    assert engine is not None
    assert trainer is not None
    both = case.listed("trainer") or case.listed("engines") or list(case.usable)
    may_turn = wished == "turns" or (wished == "auto" and engine.may_release)
    ways = [beside for beside in (True, False) if (beside and wished != "turns") or (not beside and may_turn)]
    refusals: list[DoesNotFit] = []
    for beside in ways:
        for ranks, stage in _layouts(case, trainer, len(both), takes_all=True):
            try:
                return _shared_so(case, both[:ranks], stage, beside=beside)
            except DoesNotFit as err:
                refusals.append(err)
    raise refusals[-1]


def _shared_so(case: _Case, own: Sequence[Gpu], stage: int, *, beside: bool) -> Placement:
    """Share GPUs beside each other, or in turns; raises DoesNotFit."""
    engine, trainer = case.engine, case.trainer
    assert engine is not None
    assert trainer is not None
    engines, workers = _engines(case, own)
    peak, limit, total = trainer.peak(len(own), stage), min(map(planned, own)), min(gpu.total for gpu in own)
    if peak is None and engine.fraction is None and case.wishes.shared != "turns":
        raise DoesNotFit(
            "engines and trainer share a GPU, and the trainer's memory cannot be estimated for this model: set the engine's part in "
            f"[{engine.section}], or placement.shared = turns, or use a GPU for each"
        )
    need = ((engine.weights or 0) + engine.cache) / len(engines[0])
    # An engine's part is a share of what is free when it starts, and the trainer may hold its memory by then.
    held = (peak or 0) if beside else _LEFT
    part = max(0, limit - held - _BESIDE) / total
    engine_fits = engine.fraction is not None or part * max(0, total - held) >= need
    if not engine_fits or (not beside and (peak or 0) + _BESIDE > limit):
        most = limit - _BESIDE
        fits = trainer.advice(len(own), stage, int(_most_of_rank(most, total, need) if beside else most))
        raise DoesNotFit(
            f"engines and trainer do not fit on {numbers(own)} {'at once' if beside else 'in turns'}: a rank needs {gb(peak or 0)}, an engine "
            f"{gb(need)} for weights, keys and values and {gb(_BESIDE)} besides, and {gb(limit)} can be used; {_with(fits)}",
            fits,
        )
    fraction = int(part * 100) / 100 if engine.fraction is None and engine.takes_fraction else engine.fraction
    how = "shared" if beside else "shared in turns"
    reason = (
        f"{how}; {_trainer_reason(trainer, len(own), peak, limit, _engine_reason(engine, engines), is_shared=True)}"
    )
    return Placement(case.gpus, engines, tuple(own), workers, stage, True, not beside, fraction, reason, case.notes)


def _most_of_rank(limit: float, total: float, need: float) -> float:
    """Return the largest peak p of a rank for which an engine fits beside it: (limit - p) / total * (total - p) = need."""
    both, difference = limit + total, limit - total
    return max(0.0, (both - (difference * difference + 4 * total * need) ** 0.5) / 2)


def _layouts(
    case: _Case, trainer: TrainerNeed, available: int, *, takes_all: bool = False
) -> Iterator[tuple[int, int]]:
    """Yield numbers of ranks and stages of ZeRO, the preferred first."""
    wished = case.count("trainer")
    if None not in (wished, trainer.ranks) and wished != trainer.ranks:
        raise DoesNotFit(
            f"placement.trainer has {wished} GPUs and trainer.num_ranks = {trainer.ranks} on this machine; make them equal"
        )
    fixed = wished or trainer.ranks
    most = min(available, trainer.most)
    if any(gpu.is_mig for gpu in case.usable):
        if (fixed or trainer.multiple) > 1:
            raise DoesNotFit(f"{_MIG}: set trainer.num_ranks = 1")
        most = min(most, 1)
    if fixed is not None:
        counts = [fixed]
    elif takes_all or trainer.takes_all:
        counts = [most - most % trainer.multiple]
    else:
        half = max(1, len(case.usable) // 2)
        doubled = {trainer.multiple * 2**power for power in range(half.bit_length())}
        counts = [n for n in range(trainer.multiple, most + 1, trainer.multiple) if n > half or n in doubled]
        if counts and trainer.peak(counts[0], trainer.stages[0]) is None:
            counts = [max((ranks for ranks in counts if ranks <= half), default=counts[0])]
    if not counts or not 0 < max(counts) <= available:
        raise DoesNotFit(
            f"the trainer needs {fixed or trainer.multiple} GPUs, and {max(0, available)} of {len(case.gpus)} are left for it; set "
            "trainer.num_ranks or placement.engines"
        )
    pairs = [(ranks, stage) for ranks in counts for stage in trainer.stages if ranks > 1 or stage == trainer.stages[0]]
    yield from sorted(pairs, key=lambda pair: (2 * pair[0] > max(2, len(case.usable)), pair[1] == 3, *pair))


def _engines(case: _Case, pool: Sequence[Gpu]) -> tuple[tuple[tuple[Gpu, ...], ...], int]:
    """Return the GPUs of each engine, and the number of workers; raises DoesNotFit."""
    engine = case.engine
    assert engine is not None
    limit = min((planned(gpu) for gpu in pool), default=0) - _BESIDE
    held = (engine.weights or 0) + engine.cache
    fitting = [size for size in engine.sizes if held / size <= limit]
    # Where weights are most of what it holds, few sequences have room.
    roomy = (size for size in fitting if size <= len(pool) and 2 * (engine.weights or 0) / size <= limit)
    size = next(roomy, next(iter(fitting), None))
    if size is None:
        raise DoesNotFit(
            f"an engine needs {gb(held / engine.sizes[-1])} for weights, keys and values on each of {engine.sizes[-1]} GPU(s), and "
            f"{gb(max(0, limit))} of each of the {len(pool)} left for engines can be used; let more GPUs share it, set "
            f"{engine.section}.quantization, or give the trainer fewer"
        )
    have = len(pool) // size
    is_divided = any(
        gpu.is_mig for gpu in pool
    )  # a process sees one part of a divided GPU, and so do all servers of a worker
    workers = engine.workers or (have if is_divided or engine.one_of_worker else 1)
    each = engine.engines or (1 if engine.one_of_worker else min(have // max(1, workers), _MOST_ENGINES))
    if is_divided and (size > 1 or each > 1):
        raise DoesNotFit(f"{_MIG}: set one GPU for an engine, and one engine for a worker")
    if not workers or not each or workers * each * size > len(pool):
        workers, each = max(1, workers), max(1, each)
        raise DoesNotFit(
            f"{workers} worker(s) with {each} engine(s) of {size} GPU(s) need {workers * each * size} GPUs, and {len(pool)} of "
            f"{len(case.gpus)} are left for engines; start fewer workers, or lower {engine.section}.engines, the GPUs of an engine, or "
            "the trainer's"
        )
    return tuple(tuple(pool[first : first + size]) for first in range(0, workers * each * size, size)), workers


def planned(gpu: Gpu) -> int:
    """Return the bytes of a GPU that a rank may use."""
    return int(_PLANNED * gpu.free)


def _too_large(trainer: TrainerNeed, own: Sequence[Gpu], stage: int, peak: int, limit: int) -> DoesNotFit:
    fits = trainer.advice(len(own), stage, limit)
    used = [gpu for gpu in own if _is_in_use(gpu)]
    return DoesNotFit(
        f"a rank of the trainer needs {gb(peak)} on {len(own)} GPU(s) with ZeRO {stage}, and {gb(limit)} of each can be used"
        f"{f' ({_in_use_text(used)})' if used else ''}; {_with(fits)}",
        fits,
        of_trainer=True,
    )


def _with(settings: Sequence[str]) -> str:
    return (
        f"it fits with {' '.join(settings)}"
        if settings
        else "no setting is known that makes it fit: use a smaller model, or more GPUs"
    )


def _trainer_reason(
    trainer: TrainerNeed, ranks: int, peak: int | None, limit: int, engines: str, *, is_shared: bool = False
) -> str:
    if peak is None:
        halves = "" if trainer.ranks or is_shared else ", so that each role gets half"
        return f"its memory is not estimated for this model{halves}"
    fewest = ", the fewest ranks that fit" if trainer.ranks is None and ranks > 1 and not trainer.takes_all else ""
    return f"a rank needs {gb(peak)} of {gb(limit)}{fewest}{f'; {engines}' if engines else ''}"


def _engine_reason(engine: EngineNeed | None, engines: Sequence[Sequence[Gpu]]) -> str:
    if engine is None or not engines or engine.weights is None:
        return ""
    return f"an engine has {gb(engine.weights / len(engines[0]))} of weights on each GPU"

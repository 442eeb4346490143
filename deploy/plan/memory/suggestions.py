"""Settings that make a run fit into a given memory; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.deploy.plan.memory.memory_plan import MemoryPlan
from penstock.deploy.plan.memory.plan_inputs import PlanInputs
from penstock.trainer.parallel_dims import ParallelLayout

_LORA_RANK = 16
_MOST_RANKS = 64


@dataclass(frozen=True)
class Suggestion:
    """Settings, and the most memory that the run then needs."""

    settings: tuple[str, ...]  # as SECTION.KEY=VALUE
    peak: int


@dataclass(frozen=True)
class _Change:
    settings: tuple[str, ...]
    inputs: PlanInputs

    def then(self, step: _Change) -> _Change:
        """Return both; of a setting of both, the later value counts."""
        values = {setting.partition("=")[0]: setting for setting in (*self.settings, *step.settings)}
        return _Change(tuple(values.values()), step.inputs)


def suggestions(inputs: PlanInputs, limit: int, *, on_gpu: bool) -> list[Suggestion]:
    """Return what makes a run fit: every single setting that does, else the shortest combination; none: nothing known does.

    Args:
        inputs: The run.
        limit: Bytes that it may need.
        on_gpu: Count the memory of the device that trains only.
    """

    def tried(change: _Change) -> Suggestion:
        return Suggestion(change.settings, MemoryPlan(change.inputs).peak(on_gpu=on_gpu))

    kinds = list(_changes(inputs, on_gpu=on_gpu))
    alone = [found for changes in kinds if (found := _first(map(tried, changes), limit))]
    if alone:
        return alone
    combined = _Change((), inputs)
    for number in range(len(kinds)):
        steps = [combined.then(step) for step in list(_changes(combined.inputs, on_gpu=on_gpu))[number]]
        if found := _first(map(tried, steps), limit):
            return [found]
        combined = min([combined, *steps], key=lambda change: tried(change).peak)
    return []


def _first(tried: Iterator[Suggestion], limit: int) -> Suggestion | None:
    return next((one for one in tried if one.peak <= limit), None)


def _changes(inputs: PlanInputs, *, on_gpu: bool) -> Iterator[list[_Change]]:
    """Yield the forms of each setting, the mildest first; empty where it is set already, or cannot help."""
    method = inputs.method
    budgets = []
    budget = inputs.budget_tokens
    while budget > inputs.row_tokens:
        budget = max(inputs.row_tokens, budget // 2)
        budgets.append(_Change((f"trainer.micro_batch_tokens={budget}",), replace(inputs, budget_tokens=budget)))
    yield budgets
    yield list(_with_shared_tokens(inputs))
    yield list(_with_shared_weights(inputs))
    yield list(_with_checkpointing(inputs, on_gpu=on_gpu))
    yield [
        _Change((f"trainer.zero_stage={stage}",), replace(inputs, method=replace(method, zero_stage=stage)))
        for stage in range(method.zero_stage + 1, 4)
        if method.num_ranks > 1
    ]
    yield list(_with_offload(inputs)) if on_gpu else []
    yield [_with_bfloat16(inputs)] if method.dtype == "float32" else []
    yield list(_more_ranks(inputs))
    yield list(_with_adapters(inputs))
    yield [_with_rounded_sums(inputs)] if method.sums_apart else []


def _with_shared_tokens(inputs: PlanInputs) -> Iterator[_Change]:
    """Yield more ranks for each micro-batch, of those that the run has."""
    method = inputs.method
    for ranks in range(method.sequence_parallel + 1, method.zero_ranks + 1):
        layout = ParallelLayout(ranks, method.tensor_parallel)
        repeats = inputs.rank_shape.kv_heads % ranks  # key heads: allowed, and seldom worth it
        if method.zero_ranks % ranks or repeats or not layout.allows(inputs.shape.config):
            continue
        shared = replace(method, sequence_parallel=ranks)
        yield _Change((f"trainer.sequence_parallel={ranks}",), replace(inputs, method=shared))


def _with_shared_weights(inputs: PlanInputs) -> Iterator[_Change]:
    """Yield more ranks for each weight, of those that the run has, where the models allow it."""
    method = inputs.method
    if method.lora_rank:
        return
    for ranks in range(method.tensor_parallel + 1, method.num_ranks // method.sequence_parallel + 1):
        layout = ParallelLayout(method.sequence_parallel, ranks)
        shapes = [shape for shape in (inputs.shape, inputs.reference, inputs.critic) if shape is not None]
        if method.num_ranks % layout.ranks_of_rows == 0 and all(layout.allows(shape.config) for shape in shapes):
            shared = replace(method, tensor_parallel=ranks)
            yield _Change((f"trainer.tensor_parallel={ranks}",), replace(inputs, method=shared))


def _with_checkpointing(inputs: PlanInputs, *, on_gpu: bool) -> Iterator[_Change]:
    if inputs.method.activation_offload:
        return
    settings: tuple[str, ...] = ()
    if not inputs.method.checkpointing:
        settings = ("model.gradient_checkpointing=true",)
        yield _Change(settings, replace(inputs, method=replace(inputs.method, checkpointing=True)))
    if on_gpu:
        method = replace(inputs.method, checkpointing=True, activation_offload=True)
        yield _Change((*settings, "model.activation_offload=true"), replace(inputs, method=method))


def _with_offload(inputs: PlanInputs) -> Iterator[_Change]:
    """Yield what moves states to the host, with the lowest ZeRO stage that does."""
    method = inputs.method
    if method.offload == "none":
        stage = max(1, method.zero_stage)
        settings = ("trainer.offload=optimizer", *((f"trainer.zero_stage={stage}",) if not method.zero_stage else ()))
        yield _Change(settings, replace(inputs, method=replace(method, offload="optimizer", zero_stage=stage)))
    if method.offload != "parameters":
        settings = ("trainer.offload=parameters", *(("trainer.zero_stage=3",) if method.zero_stage < 3 else ()))
        yield _Change(settings, replace(inputs, method=replace(method, offload="parameters", zero_stage=3)))


def _with_rounded_sums(inputs: PlanInputs) -> _Change:
    method = replace(inputs.method, gradient_dtype="as-trained")
    return _Change(("trainer.gradient_dtype=as-trained",), replace(inputs, method=method))


def _with_bfloat16(inputs: PlanInputs) -> _Change:
    stage = max(1, inputs.method.zero_stage)
    method = replace(inputs.method, dtype="bfloat16", zero_stage=stage)
    settings = ("model.dtype=bfloat16", *((f"trainer.zero_stage={stage}",) if not inputs.method.zero_stage else ()))
    return _Change(settings, replace(inputs, method=method))


def _with_adapters(inputs: PlanInputs) -> Iterator[_Change]:
    if inputs.method.lora_rank or inputs.method.tensor_parallel > 1:
        return
    method, settings = replace(inputs.method, lora_rank=_LORA_RANK), [f"model.lora.rank={_LORA_RANK}"]
    changed = replace(inputs, method=method, publishes_adapter=True)
    if inputs.reference is not None and inputs.reference_is_initial:
        changed = replace(changed, reference=None, reference_on_host=False)
        if inputs.reference_on_host:  # which is refused beside adapters, whose reference needs no memory
            settings.append("algorithm.reference_device=same")
    yield _Change(tuple(settings), changed)


def _more_ranks(inputs: PlanInputs) -> Iterator[_Change]:
    ranks = inputs.method.num_ranks * 2
    while ranks <= min(_MOST_RANKS, inputs.batch.num_groups * inputs.batch.group_size):
        method = replace(inputs.method, num_ranks=ranks, zero_stage=3)
        yield _Change((f"trainer.num_ranks={ranks}", "trainer.zero_stage=3"), replace(inputs, method=method))
        ranks *= 2

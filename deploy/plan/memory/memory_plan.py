"""Combine the estimates of a run: what a rank holds all the time, its phases, and settings that make it fit into a limit; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from penstock.deploy.plan.memory.estimate import LOSS, MAX_LOGITS, Network, Pass, checkpoint_copy, loading, network
from penstock.deploy.plan.memory.model_shape import FLOAT32, Method, ModelShape, Needs, Sizes
from penstock.deploy.plan.memory.plan_inputs import PlanInputs
from penstock.protocol.weights.layout import BUCKET_BYTES
from penstock.trainer.parallel_dims import ParallelLayout

# Of the weights: the newest words, and at most as many that versions on their way replaced. Where few words change it is little more than one.
_COPIES = 2
# What libraries hold on a CPU besides tensors, measured: half of it is code that oneDNN compiles for each shape of a product. Experts have
# as many shapes in the smallest model as the trainer keeps code of (`process_memory`), which is measured as part of the libraries.
_FLOAT32_KERNELS, _BFLOAT16_KERNELS, _BFLOAT16_KERNELS_OF_ADAPTERS = 10_000_000, 35_000_000, 55_000_000
_KERNELS_OF_EXPERTS = 10_000_000
COPY = "copy of the weights"
LOADING = "loading of the model"
LAST_RANK = f"{LOSS} on the last rank"  # which samples the most of shared tokens, and copies no weights where there are few buckets
_HELD_COPIES = "copies of the weights"
READ_LAST = "words that were published last"
PARKED = "log-probabilities of the parked reference"
CHECKPOINT = "copy for a checkpoint"  # of weights and optimizer states, until a thread has written it
_LORA_RANK = 16
_MOST_RANKS = 64


@dataclass(frozen=True)
class Phase:
    """What a rank holds at the largest moment of a phase, in bytes."""

    name: str
    needs: Needs  # besides what is held all the time
    held: Needs

    @property
    def on_device(self) -> int:
        return sum(self.held.device.values()) + sum(self.needs.device.values())

    @property
    def total(self) -> int:
        """Bytes of the process where the CPU trains, which is device and host."""
        elsewhere = (self.held.host, self.held.cpu, self.needs.host, self.needs.cpu)
        return self.on_device + sum(sum(sizes.values()) for sizes in elsewhere)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of the rank that needs the most."""

    inputs: PlanInputs

    @cached_property
    def _policy(self) -> Network:
        return network(self.inputs.rank_shape, self.inputs.method, self._largest)

    @property
    def _largest(self) -> Pass:
        return self.inputs.largest if self._all_ranks_copy else self.inputs.largest_of_first_rank

    @cached_property
    def _critic(self) -> Network | None:
        if self.inputs.critic is None:
            return None
        return network(*self._critics, replace(self.inputs.largest, predictors=0))

    @property
    def _critics(self) -> tuple[ModelShape, Method]:
        """The critic's body, and how it is trained: whole. Its head is one number for each token."""
        assert self.inputs.critic is not None
        method = replace(self.inputs.method, lora_rank=0, lora_targets=(), with_entropy=False)
        return replace(self.inputs.critic.of_rank(method.tensor_parallel), tied=True), method

    @cached_property
    def held(self) -> Needs:
        device, host = dict(self._policy.held.device), dict(self._policy.held.host)
        if self._critic:
            for held, sizes in ((device, self._critic.held.device), (host, self._critic.held.host)):
                held.update({f"{name} of the critic": size for name, size in sizes.items()})
        (host if self.inputs.reference_on_host else device)["reference"] = self._reference
        copies = 1 if self.inputs.publishes_adapter else _COPIES  # of the adapters' base, which is never copied again
        host[_HELD_COPIES] = copies * self._copy
        (device if self.inputs.words_on_device else host)[READ_LAST] = self._read_last
        host[CHECKPOINT] = checkpoint_copy(self.inputs.rank_shape, self.inputs.method)
        if self.inputs.critic is not None:
            host[CHECKPOINT] += checkpoint_copy(*self._critics)
        return Needs(_present(device), _present(host), {"compiled kernels": self._kernels})

    @cached_property
    def phases(self) -> list[Phase]:
        return list(self._phases())

    @property
    def largest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    def peak(self, *, on_gpu: bool) -> int:
        """Return the most bytes that are needed at once: of the device, or of the process where the CPU trains."""
        return max(phase.on_device if on_gpu else phase.total for phase in self.phases)

    @cached_property
    def loading_host(self) -> int:
        """Bytes that a rank which trains on a GPU holds in host memory while the models are read, one after the other."""
        models = [model for model in (self.inputs.shape, self.inputs.reference, self.inputs.critic) if model]
        return max(loading(model, self.inputs.method)[1] for model in models)

    def _phases(self) -> Iterator[Phase]:
        yield Phase(LOADING, Needs({"parameters": loading(self.inputs.shape, self.inputs.method)[0]}), Needs())
        yield from (Phase(name, needs, self.held) for name, needs in self._policy.phases.items())
        if self._largest != self.inputs.largest:
            others = network(self.inputs.rank_shape, self.inputs.method, self.inputs.largest)
            host = {name: size for name, size in self.held.host.items() if name != _HELD_COPIES}
            yield Phase(LAST_RANK, others.phases[LOSS], replace(self.held, host=host))
        if self._critic is not None:
            yield from (Phase(f"critic: {name}", needs, self.held) for name, needs in self._critic.phases.items())
        if self.inputs.reference is not None and self.inputs.reference_on_host:
            yield Phase(PARKED, Needs(self._parked(self.inputs.reference)), self.held)
        if not self.inputs.publishes_adapter:
            yield Phase(COPY, Needs(host={"newest copy": self._copy}), self.held)

    def _parked(self, reference: ModelShape) -> Sizes:
        """Return what a parked reference needs of the device: its largest layer, and a chunk of logits twice."""
        largest, method = self.inputs.largest, self.inputs.method
        layer = max(reference.table, *(inputs * outputs for inputs, outputs in reference.linears.values()))
        positions = min(max(1, MAX_LOGITS // reference.vocabulary), largest.predictors)
        return {
            "layer of the reference": layer * method.width,
            "activations": largest.tokens * method.width * (2 * reference.hidden + 3 * reference.intermediate),
            "logits": 2 * FLOAT32 * positions * reference.vocabulary,
        }

    @property
    def _kernels(self) -> int:
        method = self.inputs.method
        if method.dtype == "float32":
            return _FLOAT32_KERNELS
        if self.inputs.shape.mixture is not None:
            return _KERNELS_OF_EXPERTS
        return _BFLOAT16_KERNELS_OF_ADAPTERS if method.lora_rank else _BFLOAT16_KERNELS

    @property
    def _copy(self) -> int:
        """Bytes of a rank's share of a copy: whole buckets, the embedding in a separate one if it is larger."""
        shape, width = self.inputs.shape, self.inputs.published_width
        whole = shape.parameters * width
        of_rank = -(-self._buckets // self.inputs.method.num_ranks)
        return max(whole * of_rank // self._buckets, shape.table * width)

    @property
    def _read_last(self) -> int:
        """Bytes that the next version is compared with, besides the copies: a rank's part under ZeRO-3, and what the device keeps."""
        inputs, method = self.inputs, self.inputs.method
        if inputs.publishes_adapter:
            return 0
        if method.zero_stage == 3 and method.num_ranks > 1 and not method.lora_rank and method.tensor_parallel == 1:
            return inputs.shape.parameters * inputs.published_width // method.num_ranks
        return self._copy if inputs.words_on_device else 0

    @property
    def _buckets(self) -> int:
        return -(-self.inputs.shape.parameters * self.inputs.published_width // BUCKET_BYTES)

    @property
    def _all_ranks_copy(self) -> bool:
        return self._buckets >= self.inputs.method.num_ranks

    @property
    def _reference(self) -> int:
        if self.inputs.reference is None:
            return 0
        shares = self.inputs.method.zero_ranks if self.inputs.method.is_read_in_parts else 1
        return self.inputs.reference.parameters * self.inputs.method.width // shares


def _present(sizes: Mapping[str, int]) -> Sizes:
    return {name: size for name, size in sizes.items() if size}


@dataclass(frozen=True)
class Suggestion:
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


_SETTINGS = {  # of the fields of a method
    "sequence_parallel": "trainer.sequence_parallel",
    "tensor_parallel": "trainer.tensor_parallel",
    "checkpointing": "model.gradient_checkpointing",
    "activation_offload": "model.activation_offload",
    "num_ranks": "trainer.num_ranks",
    "offload": "trainer.offload",
    "dtype": "model.dtype",
    "zero_stage": "trainer.zero_stage",
    "gradient_dtype": "trainer.gradient_dtype",
    "lora_rank": "model.lora.rank",
}


def _change(inputs: PlanInputs, **fields: Any) -> _Change:
    """Return a change of the method, with a setting for each field that gets another value than it has."""
    settings = (
        f"{_SETTINGS[name]}={str(value).lower()}"
        for name, value in fields.items()
        if getattr(inputs.method, name) != value
    )
    return _Change(tuple(settings), replace(inputs, method=replace(inputs.method, **fields)))


def suggestions(inputs: PlanInputs, limit: int, *, on_gpu: bool, may_add_ranks: bool = True) -> list[Suggestion]:
    """Return what makes a run fit: every single setting that does, else the shortest combination; none: nothing known does.

    Args:
        inputs: The run.
        limit: Bytes that it may need.
        on_gpu: Count the memory of the device that trains only.
        may_add_ranks: Try more ranks too, which need more GPUs.
    """

    def tried(change: _Change) -> Suggestion:
        return Suggestion(change.settings, MemoryPlan(change.inputs).peak(on_gpu=on_gpu))

    most_ranks = _MOST_RANKS if may_add_ranks else 0
    kinds = list(_changes(inputs, most_ranks, on_gpu=on_gpu))
    alone = [suggestion for changes in kinds if (suggestion := _first(map(tried, changes), limit))]
    if alone:
        return alone
    combined = _Change((), inputs)
    for number in range(len(kinds)):
        steps = [combined.then(step) for step in list(_changes(combined.inputs, most_ranks, on_gpu=on_gpu))[number]]
        if suggestion := _first(map(tried, steps), limit):
            return [suggestion]
        combined = min([combined, *steps], key=lambda change: tried(change).peak)
    return []


def _first(tried: Iterator[Suggestion], limit: int) -> Suggestion | None:
    return next((suggestion for suggestion in tried if suggestion.peak <= limit), None)


def _changes(inputs: PlanInputs, most_ranks: int, *, on_gpu: bool) -> Iterator[list[_Change]]:
    """Yield the forms of each setting, the mildest first; empty where it is set already, or cannot help."""
    method = inputs.method
    budgets = []
    budget = inputs.budget_tokens
    while budget > inputs.row_tokens:
        budget = max(inputs.row_tokens, budget // 2)
        budgets.append(_Change((f"trainer.micro_batch_tokens={budget}",), replace(inputs, budget_tokens=budget)))
    yield budgets
    yield [_change(inputs, sequence_parallel=ranks) for ranks in _shares_of_tokens(inputs)]
    yield [_change(inputs, tensor_parallel=ranks) for ranks in _shares_of_weights(inputs)]
    checkpointing = [] if method.checkpointing else [_change(inputs, checkpointing=True)]
    if on_gpu:
        checkpointing.append(_change(inputs, checkpointing=True, activation_offload=True))
    yield [] if method.activation_offload else checkpointing
    yield [_change(inputs, zero_stage=stage) for stage in range(method.zero_stage + 1, 4) if method.num_ranks > 1]
    stage = max(1, method.zero_stage)
    offloads = [] if method.offload != "none" else [_change(inputs, offload="optimizer", zero_stage=stage)]
    if method.offload != "parameters":
        offloads.append(_change(inputs, offload="parameters", zero_stage=3))
    yield offloads if on_gpu else []
    yield [_change(inputs, dtype="bfloat16", zero_stage=stage)] if method.dtype == "float32" else []
    doubled = (method.num_ranks * 2**power for power in range(1, _MOST_RANKS.bit_length()))
    most = min(most_ranks, inputs.batch.num_groups * inputs.batch.group_size)
    yield [_change(inputs, num_ranks=ranks, zero_stage=3) for ranks in doubled if ranks <= most]
    yield [] if method.lora_rank or method.tensor_parallel > 1 else [_with_adapters(inputs)]
    yield [_change(inputs, gradient_dtype="as-trained")] if method.sums_apart else []


def _shares_of_tokens(inputs: PlanInputs) -> Iterator[int]:
    """Yield numbers of ranks that can share the tokens of a micro-batch, more than now."""
    method = inputs.method
    for ranks in range(method.sequence_parallel + 1, method.zero_ranks + 1):
        repeats = inputs.rank_shape.kv_heads % ranks  # key heads: allowed, and seldom worth it
        layout = ParallelLayout(ranks, method.tensor_parallel)
        if not method.zero_ranks % ranks and not repeats and layout.allows(inputs.shape.config):
            yield ranks


def _shares_of_weights(inputs: PlanInputs) -> Iterator[int]:
    """Yield numbers of ranks that can share the weights, more than now."""
    method = inputs.method
    shapes = [shape for shape in (inputs.shape, inputs.reference, inputs.critic) if shape is not None]
    most = 0 if method.lora_rank else method.num_ranks // method.sequence_parallel
    for ranks in range(method.tensor_parallel + 1, most + 1):
        layout = ParallelLayout(method.sequence_parallel, ranks)
        if method.num_ranks % layout.ranks_of_rows == 0 and all(layout.allows(shape.config) for shape in shapes):
            yield ranks


def _with_adapters(inputs: PlanInputs) -> _Change:
    change = _change(replace(inputs, publishes_adapter=True), lora_rank=_LORA_RANK)
    if inputs.reference is None or not inputs.reference_is_initial:
        return change
    # Beside adapters the initial policy needs no memory, and no other place for it is accepted.
    settings = ("algorithm.reference_device=same",) if inputs.reference_on_host else ()
    without = replace(change.inputs, reference=None, reference_on_host=False)
    return _Change((*change.settings, *settings), without)

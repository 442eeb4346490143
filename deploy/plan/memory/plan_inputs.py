"""What a plan is made of: the settings that change memory, and the largest micro-batch that they lead to; pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from penstock.deploy.plan.memory.estimate import Pass
from penstock.deploy.plan.memory.model_shape import BFLOAT16, FLOAT32, Method, ModelShape
from penstock.trainer.algorithm.packed_rows import PairCost, Prefixes, balanced, num_pairs, units_of
from penstock.trainer.attention_choice import Attention, expected_backend
from penstock.trainer.errors import NotEstimated
from penstock.trainer.settings import TrainerSettings


@dataclass(frozen=True)
class Batch:
    prompt_tokens: int
    completion_tokens: int
    group_size: int
    num_groups: int  # of one optimizer step


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of one rank in an optimizer step."""

    layers: float  # forward and backward
    recomputed: float  # of them, by gradient checkpointing
    head: float
    predictors: float  # sampled tokens, for which the head is computed

    @property
    def operations(self) -> float:
        return self.layers + self.recomputed + self.head

    def of_sequence_rank(self, ranks: int) -> Work:
        return Work(self.layers / ranks, self.recomputed / ranks, self.head / ranks, self.predictors / ranks)


@cache
def _passes_of(batch: Batch, pair_cost: PairCost, budget_tokens: int, num_ranks: int) -> list[list[tuple[int, int]]]:
    """Return the tokens and the sampled ones of each micro-batch of each rank; most changes that a plan tries keep them."""
    num_rows = batch.num_groups * batch.group_size
    shared = [0 if row % batch.group_size == 0 else batch.prompt_tokens for row in range(num_rows)]
    lengths = [batch.prompt_tokens + batch.completion_tokens] * num_rows
    plan = balanced(units_of(lengths, Prefixes(list(range(num_rows)), shared), pair_cost), budget_tokens, num_ranks)
    return [[(held.num_tokens, len(held.rows) * batch.completion_tokens) for held in bins] for bins in plan]


@dataclass(frozen=True)
class PlanInputs:
    shape: ModelShape
    method: Method
    batch: Batch
    budget_tokens: int  # of a micro-batch
    attention: Attention = "auto"
    publish_dtype: Literal["as-trained", "float32", "bfloat16"] = "as-trained"
    publishes_adapter: bool = False
    words_on_device: bool = False  # those that were published last, with which a version is compared
    reference: ModelShape | None = None  # a whole model besides the policy, from which a KL is measured
    reference_on_host: bool = False
    reference_is_initial: bool = False  # the policy before its first step, which adapters keep without a copy
    critic: ModelShape | None = None

    @property
    def published_width(self) -> int:
        dtype = self.method.dtype if self.publish_dtype == "as-trained" else self.publish_dtype
        return FLOAT32 if dtype == "float32" else BFLOAT16

    @property
    def published_bytes(self) -> int:
        return self.shape.parameters * self.published_width

    @property
    def rank_shape(self) -> ModelShape:
        return self.shape.of_rank(self.method.tensor_parallel)

    def backend(self, *, on_gpu: bool) -> str | None:
        """Return what will compute attention; None: the one that is set cannot run there."""
        head, dtype = self.shape.head_dim, self.method.dtype
        return expected_backend(self.attention, device="cuda" if on_gpu else "cpu", dtype=dtype, head_size=head)

    @property
    def row_tokens(self) -> int:
        return self.batch.prompt_tokens + self.batch.completion_tokens

    @cached_property
    def _passes(self) -> list[list[tuple[int, int]]]:
        # As in `attention/models.py`.
        whole, windowed = (
            2 * layers * self.shape.query / self.shape.active_body
            for layers in (self.shape.layers - self.shape.windowed_layers, self.shape.windowed_layers)
        )
        pair_cost = PairCost(whole, windowed, self.shape.window)
        return _passes_of(
            self.batch, pair_cost, self.budget_tokens, self.method.zero_ranks // self.method.sequence_parallel
        )

    @property
    def largest(self) -> Pass:
        """The largest part of a micro-batch of any rank; one of several may have the most sampled tokens."""
        tokens, predictors = max((tokens_of_bin for bins in self._passes for tokens_of_bin in bins), default=(0, 0))
        tokens = -(-tokens // self.method.sequence_parallel)
        return Pass(tokens, min(predictors, tokens), max(map(len, self._passes)))

    @property
    def largest_of_first_rank(self) -> Pass:
        """The same of the first rank, whose tokens begin with a prompt: it samples fewer where ranks share tokens."""
        largest = self.largest
        if self.method.sequence_parallel == 1:
            return largest
        return replace(largest, predictors=min(largest.predictors, max(0, largest.tokens - self.batch.prompt_tokens)))

    @cached_property
    def work(self) -> Work:
        """The operations of an optimizer step on the rank that has the most, without the critic's.

        For each parameter of a block that computes a token (of experts, those of the token) 2 in the forward pass, 4 in the backward pass (2 where it is frozen) and 2 where
        layers are recomputed; for each pair of a query and a key 4 · width in the forward pass and twice that in the backward.
        """
        method, shape = self.method, self.rank_shape
        passes = 4 if method.lora_rank else 6
        found = []
        for bins in self._passes:
            tokens, predictors = sum(num_tokens for num_tokens, _ in bins), sum(sampled for _, sampled in bins)
            whole = (shape.layers - shape.windowed_layers) * self.row_tokens / 2
            windowed = shape.windowed_layers * num_pairs(self.row_tokens, shape.window) / self.row_tokens
            pairs = 4 * shape.query * (whole + windowed) * tokens
            of_tokens = shape.active_body * tokens
            found.append(
                Work(
                    layers=passes * of_tokens + 3 * pairs,
                    recomputed=2 * of_tokens + pairs if method.checkpointing else 0.0,
                    head=passes * shape.table * predictors,
                    predictors=predictors,
                )
            )
        return max(found, key=lambda work: work.operations).of_sequence_rank(method.sequence_parallel)

    @property
    def operations(self) -> float:
        return self.work.operations


def plan_inputs(
    settings: TrainerSettings,
    shape: ModelShape,
    *,
    reference: ModelShape | None = None,
    critic: ModelShape | None = None,
) -> PlanInputs:
    """Return the inputs of a run; ``reference`` and ``critic`` are the shapes of other folders, where the settings name some.

    Raises NotEstimated for a KL over whole distributions, whose memory was not measured, and ConfigError for a layout of the ranks
    that a model does not allow.
    """
    lora, algorithm = settings.model.lora, settings.algorithm
    for model_shape, where in ((shape, "model.path"), (reference, "algorithm.reference_path"), (critic, "critic.path")):
        if model_shape is not None:
            settings.trainer.layout.check(model_shape.config, where)
    for key in ("kl_form", "reward_kl_form"):
        if algorithm.needs_reference and getattr(algorithm, key) == "full":
            raise NotEstimated(
                f"algorithm.{key} = full: the memory of whole distributions was not measured; plan with k3"
            )
    is_loaded = settings.needs_reference and algorithm.reference_device != "remote"
    copied = is_loaded and (not lora.rank or algorithm.reference_path is not None)
    return PlanInputs(
        shape=shape,
        method=_method(settings),
        batch=Batch(
            settings.data.max_prompt_tokens,
            settings.rollout.max_new_tokens,
            settings.rollout.largest_group,
            -(-settings.rollout.groups_per_step // algorithm.minibatches),
        ),
        budget_tokens=settings.trainer.micro_batch_tokens,
        attention=settings.trainer.attention,
        publish_dtype=settings.trainer.publish_dtype,
        publishes_adapter=settings.publishes_adapters,
        words_on_device=settings.trainer.published_words == "device",
        reference=(reference or shape) if copied else None,
        reference_on_host=algorithm.reference_device == "parked",
        reference_is_initial=algorithm.reference_path is None,
        critic=(critic or shape) if algorithm.has_critic else None,
    )


def _method(settings: TrainerSettings) -> Method:
    lora, algorithm = settings.model.lora, settings.algorithm
    return Method(
        dtype=settings.model.dtype,
        zero_stage=settings.trainer.zero_stage,
        num_ranks=settings.trainer.num_ranks,
        sequence_parallel=settings.trainer.sequence_parallel,
        tensor_parallel=settings.trainer.tensor_parallel,
        checkpointing=settings.model.gradient_checkpointing,
        activation_offload=settings.model.activation_offload,
        gradient_dtype=settings.trainer.gradient_dtype,
        offload=settings.trainer.offload,
        overlap_comm=bool(settings.trainer.overlap_comm),
        reduce_bucket_size=settings.trainer.reduce_bucket_size,
        max_live_parameters=settings.trainer.max_live_parameters,
        hpz_partition_size=settings.trainer.hpz_partition_size,
        lora_rank=lora.rank,
        lora_targets=tuple(lora.targets),
        max_logits=settings.trainer.max_logits,
        dense_attention=settings.trainer.attention == "dense",
        with_entropy=algorithm.entropy_coefficient > 0.0
        or (algorithm.distill_coefficient > 0.0 and algorithm.distill_form == "forward"),
        by_gradient=algorithm.parts.estimator.value.by_gradient,
    )

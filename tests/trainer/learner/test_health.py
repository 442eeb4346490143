"""Groups of layers, outliers, operations of a pass, peaks of devices, and the end of a policy without randomness."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.learner.tiny import HOW, OneProcess, PlainTrainable, row_of
from torch.utils.flop_counter import FlopCounterMode

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import build
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.algorithm.stop_checks import STEPS_BEFORE_STOP, CollapseCheck
from penstock.trainer.errors import PolicyCollapsed, TrainingDiverged
from penstock.trainer.learner.adapter import Lora, attach
from penstock.trainer.learner.flops import Load, Work, load_of, pass_cost, peak_of
from penstock.trainer.learner.load_model import load_language_model
from penstock.trainer.learner.logprobs import CompletionScorer, read_batch
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.step_metrics import KINDS, WINDOW, Outliers, layer_groups
from penstock.trainer.learner.trainable import Update
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.telemetry.metrics import speed_fields

ALONE = ParallelDims(SimpleNamespace(rank=0, num_ranks=1))  # type: ignore[arg-type]


def test_every_parameter_is_in_one_kind_and_one_range() -> None:
    """Names of Qwen, GPT-2, a mixture of experts and adapters; ranges are at most four, as equal as possible."""
    names = {
        "language_model.model.embed_tokens.weight": "embedding",
        "language_model.model.norm.weight": "norm",
        "language_model.lm_head.weight": "head",
        "transformer.wte.weight": "embedding",
        "transformer.ln_f.weight": "norm",
        "transformer.something.weight": "other",
        **{f"language_model.model.layers.{n}.self_attn.q_proj.weight": "attention" for n in range(10)},
        "language_model.model.layers.0.self_attn.q_norm.weight": "norm",
        "language_model.model.layers.3.self_attn.o_proj.lora_A.default.weight": "attention",
        "language_model.model.layers.9.mlp.experts.7.down_proj.weight": "mlp",
        "language_model.model.layers.9.post_attention_layernorm.weight": "norm",
        "transformer.h.2.attn.c_attn.weight": "attention",
        "transformer.h.2.ln_1.bias": "norm",
        "transformer.h.2.mlp.c_fc.weight": "mlp",
    }
    found = layer_groups(names)
    assert {name: groups[0] for name, groups in found.items()} == names
    assert set(names.values()) == set(KINDS)
    ranges = [found[f"language_model.model.layers.{n}.self_attn.q_proj.weight"][1] for n in range(10)]
    assert ranges == [*["blocks 0-2"] * 3, *["blocks 3-4"] * 2, *["blocks 5-7"] * 3, *["blocks 8-9"] * 2]
    assert [groups[1:] for name, groups in layer_groups(["h.0.attn.w", "h.1.attn.w"]).items()] == [
        ("block 0",),
        ("block 1",),
    ]


def test_the_limit_follows_the_median_of_the_recent_norms() -> None:
    """None is left out before enough are known; when norms have risen for good, steps are made again."""
    rule = Outliers(above=3.0, after=4)
    assert [rule.is_outlier(norm) for norm in (1.0, 50.0, 1.0, 1.2)] == [False] * 4
    assert [rule.is_outlier(norm) for norm in (3.4, 2.0, 100.0, 1.0)] == [True, False, True, False]
    again = Outliers(above=3.0, after=4)
    again.restore(list(rule.norms))
    assert again.limit == rule.limit
    risen = [rule.is_outlier(100.0) for _ in range(WINDOW)]
    assert risen[0]
    assert not risen[-1]
    assert not any(risen[WINDOW // 2 + 1 :])


def test_operations_are_those_of_the_matrix_products(model_folder: Path) -> None:
    """Forward and backward, a shared prompt once: as torch counts, and by parameters, vocabulary and pairs."""
    model = load_language_model(model_folder, HOW, ALONE)
    scorer = CompletionScorer(model, 1.0)
    rng = np.random.default_rng(0)
    batch = build([row_of(range(3, 20), rng.integers(3, 50, length), 1.0) for length in (3, 5, 8)])
    load = load_of(batch.layout, batch.input_ids.shape[1], len(batch.targets), padded=False, windows=(None, 9, 9))
    answers = (2, 4, 7)  # the last token of each row is not computed
    assert (load.tokens, load.predicted) == (17 + sum(answers), 16)
    whole = 17 * 18 // 2 + sum(n * (n + 1) // 2 + 17 * n for n in answers)
    assert load.pairs == whole + 2 * 9 * (load.tokens - 4)  # windows are full from the ninth token on
    assert load_of(batch.layout, 1, 16, padded=True, windows=(None,)) == Load(3 * 24, 3 * 24 * 25 // 2, 16)
    assert load_of(None, 6, 2, padded=False, windows=(None, 2)) == Load(6, 21 + 11, 2)
    cost, shape = pass_cost(model), model.config
    body = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name)
    table, query = shape.vocab_size * shape.hidden_size, shape.num_attention_heads * shape.head_dim
    expected = 6 * body * load.tokens + 6 * table * 16 + 12 * query * load.pairs
    assert cost.forward(load) + cost.backward(load) == expected
    with FlopCounterMode(display=False) as counter:
        read_batch(scorer, batch).sum().backward()
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert counted == 6 * body * load.tokens + 6 * table * 16


def test_frozen_weights_need_no_gradient_of_their_own(model_folder: Path) -> None:
    """With adapters the base takes two thirds of the operations, and the adapters all."""
    model = load_language_model(model_folder, HOW, ALONE)
    whole = pass_cost(model)
    attach(model, Lora(4, 8.0))
    cost, load = pass_cost(model), Load(100, 0, 0)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (cost.layers, cost.learning, cost.head_learns) == (whole.layers + adapters, adapters, False)
    assert cost.forward(load) + cost.backward(load) == 100 * (4 * whole.layers + 6 * adapters)


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12), ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12), ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA L40S", "bfloat16", 362e12), ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("NVIDIA H100 80GB HBM3", "float32", None), ("cpu", "bfloat16", None), ("NVIDIA X9000", "bfloat16", None),
        ("NVIDIA A1000", "bfloat16", None), ("", "bfloat16", None),
    ],
)  # fmt: skip
def test_a_peak_is_that_of_the_table_or_none(device: str, dtype: str, peak: float | None) -> None:
    """By the name that CUDA reports; nothing is assumed for a CPU, an unknown device or float32."""
    assert peak_of(device, dtype) == peak


def test_speed_is_of_the_step_without_its_wait() -> None:
    """Tokens and operations per second, and their share of a peak that is known."""
    fields = speed_fields(Work(6e9, 300.0), num_tokens=100, step_s=2.0, peak=6e9)
    assert fields == {"computed_tokens": 300, "train_tokens_per_s": 50.0, "flops_per_s": 3e9, "mfu": 0.5}
    assert "mfu" not in speed_fields(Work(6e9, 300.0), num_tokens=100, step_s=2.0, peak=None)


class _Steps(PlainTrainable):
    """A trainable whose passes and steps are only noted."""

    def __init__(self, scorer: CompletionScorer) -> None:
        super().__init__(scorer)
        self.events = list[str]()

    def backward(self, loss: torch.Tensor) -> None:
        self.events.append("backward")

    def update(self, *_: object, **__: object) -> Update:
        self.events.append("update")
        return Update(1.0, 1e-3)


def policy_of(model_folder: Path) -> tuple[Policy, list[str]]:
    scorer = CompletionScorer(load_language_model(model_folder, HOW, ALONE), 1.0)
    steps: Any = _Steps(scorer)
    return Policy(steps, scorer, OneProcess()), steps.events  # type: ignore[arg-type]


def test_a_loss_that_is_not_finite_makes_no_step(model_folder: Path) -> None:
    policy, events = policy_of(model_folder)
    row = row_of([3, 4, 5], [6, 7, 8], float("nan"))
    with pytest.raises(TrainingDiverged, match=r"the loss of step 1 is nan, not a finite number"):
        policy.train_step([build([row])], build_objective(AlgorithmSettings()))
    assert (policy.steps_done, events) == (0, ["backward"])


def test_weights_that_a_thread_reads_change_when_they_are_read(model_folder: Path) -> None:
    """The passes of a step go on meanwhile; its update waits."""
    policy, events = policy_of(model_folder)
    policy.weights.read_in(SimpleNamespace(result=lambda: events.append("read")))  # type: ignore[arg-type]
    row = row_of([3, 4, 5], [6, 7, 8], 1.0)
    for _ in range(2):
        policy.train_step([build([row])], build_objective(AlgorithmSettings()))
    assert events == ["backward", "read", "update", "backward", "update"]


def test_an_entropy_below_the_limit_ends_the_run_after_three_steps() -> None:
    """Three in a row; a step above it starts the count again, and without a limit nothing ends."""
    check = CollapseCheck(0.1)
    for entropy in (0.05, 0.05, 0.2, 0.01, float("nan")):
        check.check(entropy, 7)
    with pytest.raises(
        PolicyCollapsed, match=r"step 8: the entropy .* is 0\.01 nats per token, below trainer\.min_entropy = 0\.1"
    ):
        check.check(0.01, 8)
    for _ in range(2 * STEPS_BEFORE_STOP):
        CollapseCheck(None).check(0.0, 1)

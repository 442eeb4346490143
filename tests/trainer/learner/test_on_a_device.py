"""The learner on another device than the CPU: a micro-batch is sent in one copy and never waited for.

What copies, or makes the host wait, is listed here by its function: a change that adds one fails with the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from tests import tagged_device
from tests.tagged_device import DEVICE, Tagged, assert_waits, copies, plain
from tests.trainer.algorithm.test_every_preset import ALGORITHMS
from tests.trainer.learner import test_image_rows
from tests.trainer.learner.tiny import OneProcess, PlainTrainable
from tests.vision_model import build_vision_model
from torch import Tensor

from penstock.protocol.images.processor import read_processor
from penstock.protocol.token_annotations import TeacherRow
from penstock.trainer.algorithm import mismatch
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings, DistillForm
from penstock.trainer.algorithm.batch import MicroBatch, Row, build
from penstock.trainer.algorithm.chosen_parts import LOSSES
from penstock.trainer.algorithm.corrections.ratios import Level
from penstock.trainer.algorithm.corrections.rejection import Statistic
from penstock.trainer.algorithm.device_copy import copied_together
from penstock.trainer.algorithm.kl import AnyKlForm
from penstock.trainer.algorithm.objective import CrossEntropy, build_objective
from penstock.trainer.algorithm.preferences.interface import PREFERENCE_LOSSES
from penstock.trainer.data.pairs import Pair
from penstock.trainer.dpo_settings import DpoSettings
from penstock.trainer.errors import CheckpointError
from penstock.trainer.learner import adapter
from penstock.trainer.learner.critic import Critic, TokenCredit, ValueScorer
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.logprobs import CompletionScorer
from penstock.trainer.learner.pair_planner import PairPlanner
from penstock.trainer.learner.parallel_shares import TokenShares
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.reference import Reference
from penstock.trainer.learner.shard_files import Shard
from penstock.trainer.learner.step_metrics import RowRecorder
from penstock.trainer.learner.vision import ImageReader
from penstock.trainer.optimizer_settings import CriticSettings

TOTALS = {"to host: trainer/learner/step_metrics.py StepSums.over": 1}  # of a step: all its figures
SENT = {
    "to device: trainer/algorithm/device_copy.py copied_together": 2
}  # of a micro-batch: its tensors; attention's tables
QWEN = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 2_000, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip


@pytest.fixture
def device() -> Iterator[None]:
    with tagged_device.tagged_device():
        yield


class OneRank:
    """A group of one: what it exchanges or adds up is its own."""

    index, size = 0, 1

    def exchange(self, parts: Tensor) -> Tensor:
        return parts.clone()

    def sum(self, values: Tensor) -> Tensor:
        return values


def policy_of(
    model: Any, *, on_device: bool = True, shares: TokenShares | None = None, replays: bool = False
) -> Policy:
    scorer = CompletionScorer(
        model, 0.7, max_logits=24 * model.config.get_text_config().vocab_size, shares=shares or TokenShares()
    )
    if replays:
        scorer.replay_routers()
    if on_device:
        tagged_device.put(scorer)
    return Policy(PlainTrainable(scorer), scorer, OneProcess(), router_replay=replays)  # type: ignore[arg-type]


def rows_of(vocabulary: int, seed: int = 0) -> list[Row]:
    """Three prompts with three answers each, of two turns, of other ages, and with a teacher's likeliest tokens."""
    random, made = np.random.default_rng(seed), list[Row]()
    for _ in range(3):
        prompt = random.integers(3, vocabulary, int(random.integers(5, 20)))
        for number in range(3):
            num = int(random.integers(4, 12))
            tokens = np.concatenate([prompt, random.integers(3, vocabulary, num)]).astype(np.int32)
            mask, half = np.arange(len(tokens)) >= len(prompt), len(prompt) + num // 2
            top = np.sort(random.integers(3, vocabulary, (num, 5)), -1).astype(np.int32) + np.arange(5, dtype=np.int32)
            taught = TeacherRow(
                -random.random(num, dtype=np.float32), top, -2 - random.random((num, 5), dtype=np.float32)
            )
            logprobs = np.where(mask, -12 * random.random(len(tokens)), 0).astype(np.float32)
            made.append(
                Row(
                    tokens, mask, logprobs, float(random.normal()), 1e-2, ages=np.full(len(tokens), number, np.int32),
                    sft_weight=0.01, teacher=taught, turns=((len(prompt), half), (half, len(tokens))),
                )
            )  # fmt: skip
    return made


def dense(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN | changes))


def adapted() -> Any:
    """LoRA on a frozen model, and gradient checkpointing."""
    model = dense()
    adapter.attach(model, adapter.Lora(8, 16.0))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def padded() -> Any:
    """A model with attention scores that change with the distance, which no kernel here computes."""
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**QWEN, alibi=True))


def windowed() -> Any:
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**QWEN, sliding_window=64))


def routed() -> Any:
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN, **experts))


def with_experts(rows: list[Row]) -> list[Row]:
    random = np.random.default_rng(0)
    chosen = [np.sort(random.random((len(row.token_ids) - 1, 2, 8)).argsort(-1)[..., :2], -1) for row in rows]
    return [replace(row, experts=some.astype(np.uint8)) for row, some in zip(rows, chosen, strict=True)]


# What a model makes the host wait for in each micro-batch, most of it inside of transformers.
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, int]]] = {
    "dense": (dense, {}, {}),
    "adapters": (adapted, {}, {}),
    "padded": (padded, {}, {"sync: trainer/learner/attention/models.py _read_padded": 1}),
    "windowed": (windowed, {}, {"sync: trainer/learner/attention/models.py read_rows": 1}),
    "routed": (routed, {"replays": True}, {}),
    "tokens shared": (
        dense,
        {"shares": TokenShares(OneRank())},  # type: ignore[arg-type]
        {"sync: trainer/learner/parallel_shares.py TokenShares.own_predictors": 1},
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_a_step_waits_for_the_device_once(name: str, device: None) -> None:
    """Of any number of micro-batches, besides the optimizer. Loss and gradients are those of the CPU."""
    build_model, options, waits = MODELS[name]
    objective = build_objective(AlgorithmSettings(name="async_grpo"))
    rows = [rows_of(QWEN["vocab_size"], seed) for seed in range(3)]
    first, *batches = [build(with_experts(some) if name == "routed" else some) for some in rows]
    on_cpu, policy = (policy_of(build_model(), on_device=on_device, **options) for on_device in (False, True))
    for trained in (on_cpu, policy):
        trained._pass([first], objective, None, None, learns=False)  # chooses the attention
    recorder = RowRecorder([list(range(9)), list(range(9, 18))], 12)
    tagged_device.events.clear()
    found = policy._pass(batches, objective, None, recorder, learns=True)
    assert copies() == {place: 2 * number for place, number in SENT.items()} | TOTALS
    assert_waits({place: 2 * number for place, number in waits.items()} | TOTALS)
    kept = recorder.gather(OneProcess())  # type: ignore[arg-type]
    assert copies()["to host: trainer/learner/step_metrics.py RowRecorder.gather"] == 2
    assert kept.logprobs.shape == (int(kept.counts.sum()),)
    loss, sums, maxima = on_cpu._pass(batches, objective, None, None, learns=True)
    exact = 1e-5 if name == "padded" else 0.0  # torch's own attention has another kernel on a CPU
    for ours, expected in zip(found, (loss, sums, maxima), strict=True):
        assert ours == pytest.approx(expected, rel=exact, abs=exact)
    for one, other in zip(policy._scorer.parameters(), on_cpu._scorer.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(plain(one.grad), other.grad, rtol=exact, atol=exact)
    assert policy._trainable.update().grad_norm == pytest.approx(on_cpu._trainable.update().grad_norm, rel=1e-5)


def test_images_are_sent_in_one_copy_more(tmp_path: Path) -> None:
    """Their patches. The vision tower of transformers copies and waits further."""
    build_vision_model(tmp_path)
    processor = read_processor(tmp_path)
    assert processor is not None
    reader = ImageReader(test_image_rows.Store([*test_image_rows.IMAGES, test_image_rows.TWIN]).get, processor)
    models = [test_image_rows.loaded(tmp_path) for _ in range(2)]  # transformers creates weights on torch's meta device
    losses = []
    with tagged_device.tagged_device():
        for on_device, model in zip((False, True), models, strict=True):
            batch = build(test_image_rows.some_rows(processor))
            assert batch.images is not None
            batch = replace(batch, images=replace(batch.images, read=reader.patches))
            losses.append(policy_of(model, on_device=on_device).train_step([batch], CrossEntropy()).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # the check of the attention has one
    assert copies()["to device: trainer/algorithm/device_copy.py copied_together"] == 3 + 1


# Each preset, and what no preset sets.
OBJECTIVES: dict[str, dict[str, Any]] = {
    **ALGORITHMS,
    **{f"{loss}, anchor": {"loss": loss, "ratio_anchor": "proximal"} for loss in LOSSES.names()},
    **{f"{loss}, behaviour": {"loss": loss, "ratio_anchor": "behaviour"} for loss in ("clip_cov", "gspo", "ppo_clip")},
    **{
        f"importance {level} {bound}": {"importance": level, "importance_bound": bound, "ratio_anchor": "proximal"}
        for level in get_args(Level)
        for bound in ("truncate", "clip", "mask")
    },
    **{f"rejection {statistic}": {"rejection": statistic} for statistic in get_args(Statistic)},
    **{f"kl {form}": {"kl_coefficient": 0.1, "kl_form": form} for form in get_args(AnyKlForm)},
    **{f"distill {form}": {"distill_coefficient": 0.5, "distill_form": form} for form in get_args(DistillForm)},
    **{f"ess {level}": {"ess_level": level} for level in ("token", "sequence", "root")},
    "entropy": {"entropy_coefficient": 0.01, "empty_batch": "skip"},
}
DRAWN_ON_THE_HOST = {
    "sync: trainer/algorithm/losses/covariance.py clip_cov": 1,
    "to device: trainer/algorithm/losses/covariance.py clip_cov": 1,
}
WAITING = {f"clip_cov, {anchor}": DRAWN_ON_THE_HOST for anchor in ("anchor", "behaviour")}


@pytest.mark.slow
def test_no_objective_waits_for_the_device(device: None) -> None:
    """Those that do are listed. Loss, gradients and figures are those of the CPU, to the last bit; of no row too."""
    batch = build(rows_of(1000))
    draw, num = torch.Generator().manual_seed(0), len(batch.targets)
    now, then, reference = (batch.behaviour_logprobs + 0.3 * torch.randn(num, generator=draw) for _ in range(3))
    batch = replace(batch, proximal_logprobs=then, reference_logprobs=reference, drift_limit=0.1)
    empty = replace(build([]), proximal_logprobs=torch.empty(0), reference_logprobs=torch.empty(0))
    mismatch._limits(DEVICE)  # sent once
    cases = [(batch, now), (batch.to(DEVICE), Tagged(now)), (empty.to(DEVICE), Tagged(torch.empty(0)))]
    for name, keys in OBJECTIVES.items():
        rule, results = build_objective(AlgorithmSettings(**keys)), []
        for given, logprobs in cases:
            leaf = logprobs.clone().requires_grad_()
            scores = {score: leaf.square() for score in ("entropies", "full_kl", "teacher_kl")}
            tagged_device.events.clear()
            outcome = rule(leaf, given, **scores)
            outcome.loss.backward()
            assert_waits({} if given is batch else WAITING.get(name, {}))
            figures = [outcome.loss.detach(), *outcome.sums.values(), *outcome.maxima.values()]
            results.append([float(plain(value)) for value in figures] + plain(leaf.grad).tolist())
        assert results[0] == results[1], name


class Numbers:
    """A policy whose log-probabilities are invented, on a device; the same ones for the same tokens."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def logprobs(self, batch: MicroBatch) -> Tensor:
        found = -0.1 - (batch.targets * 0.7).sin().square()
        return found if self._device.type == "cpu" else Tagged(found)

    def collisions(self, batch: MicroBatch) -> Tensor:
        return torch.stack([self.logprobs(batch), self.logprobs(batch) - 0.5])


def pairs_of() -> list[Pair]:
    random = np.random.default_rng(0)
    return [
        Pair(*(random.integers(3, 90, size, dtype=np.int32) for size in sizes))  # type: ignore[arg-type]
        for sizes in ((4, 5, 3), (6, 2, 7), (3, 4, 4))
    ]


@pytest.mark.parametrize("weighed", [{}, {"weighting": "wpo"}, {"length_alpha": 0.5}, {"divergence": "js_divergence"}])
def test_no_preference_loss_waits_for_the_device(weighed: dict[str, Any], device: None) -> None:
    """Loss, gradients and figures are those of the CPU, to the last bit."""
    for name in PREFERENCE_LOSSES.names():
        loss = PREFERENCE_LOSSES.find(name).value
        if ("weighting" in weighed and loss.couples_pairs) or ("divergence" in weighed and not loss.uses_divergence):
            continue  # settings refuse both
        chosen = DpoSettings.model_validate(
            {"loss": name, **weighed, **({"label_smoothing": 0.1} if name == "exo_pair" else {})}
        )
        results = []
        for place in (torch.device("cpu"), DEVICE):
            policy: Any = Numbers(place)
            planner = PairPlanner(policy, OneProcess(), chosen, budget_tokens=64)  # type: ignore[arg-type]
            planner.use_live(policy)
            batches, objective = planner.prepare(pairs_of())
            for batch in batches:
                leaf, moved = policy.logprobs(batch).requires_grad_(), batch.to(place)
                tagged_device.events.clear()
                outcome = objective(leaf, moved)
                outcome.loss.backward()
                assert_waits({})
                figures = [outcome.loss.detach(), *outcome.sums.values()]
                results.append([float(plain(value)) for value in figures] + plain(leaf.grad).tolist())
        assert results[: len(results) // 2] == results[len(results) // 2 :], name


def test_a_critic_reads_its_values_at_once(device: None) -> None:
    """A copy to the device for a micro-batch, one for what it learns from, and one to the host for a pass over all."""
    torch.manual_seed(0)
    figures = []
    for on_device in (False, True):
        scorer = ValueScorer(dense(vocab_size=1000))
        if on_device:
            tagged_device.put(scorer)
        trainable: Any = PlainTrainable(scorer)
        critic = Critic(trainable, CriticSettings(), TokenCredit(), OneProcess())  # type: ignore[arg-type]
        batches = [build(rows_of(1000, seed)) for seed in range(2)]
        with torch.no_grad():
            critic._values(build(rows_of(1000)))
        tagged_device.events.clear()
        credited = critic.credit(batches, 0.0)
        figures.append(critic.learn(credited))
    assert figures[0] == figures[1]
    found = copies()
    sent = found.pop("to device: trainer/algorithm/device_copy.py copied_together")
    assert sent == 2 * (2 + 2)
    assert found.pop("to host: trainer/learner/critic.py Critic.credit") == 1
    assert found.pop("to host: trainer/learner/critic.py Critic.learn") == 1
    assert set(found) == {"to host: trainer/learner/step_metrics.py StepWatch._add"}


@pytest.mark.parametrize("form", ["k3", "full"])
def test_a_reference_stays_on_the_device(form: str, device: None) -> None:
    """What it computes of a micro-batch does not pass through the host; the proximal policy's neither."""
    keys = {"kl_coefficient": 0.1, "kl_form": form, "ratio_anchor": "proximal"}
    objective, results = build_objective(AlgorithmSettings.model_validate(keys)), []
    for on_device in (False, True):
        policy, frozen = (policy_of(dense(vocab_size=1000), on_device=on_device) for _ in range(2))
        reference = Reference(frozen._scorer, policy.device)
        learner = Learner(policy, OneProcess(), None, objective, reference)  # type: ignore[arg-type]
        policy._pass([build(rows_of(1000))], CrossEntropy(), None, None, learns=False)
        mismatch._limits(DEVICE)
        tagged_device.events.clear()
        batch = learner._complete(build(rows_of(1000, 1)), objective, None)
        results.append(policy._pass([batch], objective, reference, None, learns=True))
    assert results[0] == results[1]
    assert_waits(TOTALS)
    passes = 3 if form == "k3" else 2  # of one micro-batch, whose tables of the attention are sent once
    assert copies()["to device: trainer/algorithm/device_copy.py copied_together"] == passes + 1


def test_tensors_of_every_kind_arrive_in_one_copy(device: None) -> None:
    """Empty ones, single numbers, other dtypes, one that is not contiguous, and one that is there already."""
    there = Tagged(torch.ones(3))
    sent = [
        torch.arange(5, dtype=torch.uint8), torch.arange(7.0).double(), torch.empty(0, 4),
        torch.tensor(3, dtype=torch.int32), torch.arange(12).view(3, 4).T, torch.randn(2, 3).bfloat16(),
        torch.tensor([True, False]),
    ]  # fmt: skip
    found = copied_together([*sent[:3], there, *sent[3:]], DEVICE)
    assert found.pop(3) is there
    assert sum(copies().values()) == 1
    assert_waits({})
    for one, other in zip(found, sent, strict=True):
        assert isinstance(one, Tagged)
        assert one.dtype == other.dtype
        assert torch.equal(plain(one), other)


def test_the_generator_of_a_gpu_is_in_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout there draws from it. One of a release that stored none leaves it as it is; on a CPU there is none."""
    generators = torch.Generator(), torch.Generator()  # in place of those of two GPUs
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    policy = policy_of(dense(vocab_size=1000), on_device=False)
    policy._trainable = SimpleNamespace(  # type: ignore[assignment]
        capture=lambda state: Shard(0, 1, {}, [], state), load=lambda folder: {"steps_done": 3}
    )  # type: ignore[assignment]
    policy.capture().write(tmp_path / "cpu")
    assert [path.name for path in (tmp_path / "cpu").glob("*.bin")] == ["random_state_0.bin"]
    policy.device = torch.device("cuda", 1)
    drawn = []
    policy.capture().write(tmp_path / "gpu")
    for _ in range(2):
        drawn.append([torch.rand(3).tolist(), torch.rand(3, generator=generators[1]).tolist()])
        policy.load(tmp_path / "gpu")
    assert drawn[0] == drawn[1]
    policy.load(tmp_path / "cpu")
    assert torch.rand(3, generator=generators[1]).tolist() == drawn[0][1]
    (tmp_path / "gpu" / "cuda_random_state_0.bin").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="gpu is not readable"):
        policy.load(tmp_path / "gpu")

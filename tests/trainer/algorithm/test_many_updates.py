"""Settings and objective of several optimizer steps on a batch."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from tests.trainer.algorithm.test_conformance import CASES, Given

from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.chosen_parts import LOSSES
from penstock.trainer.algorithm.corrections.ratios import interpolated
from penstock.trainer.algorithm.objective import PolicyGradient, build_objective
from penstock.trainer.algorithm.summary_line import summary_line
from penstock.trainer.settings import TrainerSettings

TWICE = {"epochs": 2}


def objective(**settings: object) -> PolicyGradient:
    return build_objective(AlgorithmSettings.model_validate({"name": "grpo", **settings}))


def micro_batch(given: Given, **logprobs: torch.Tensor | None) -> MicroBatch:
    """A micro-batch of a conformance case's tokens, of which only what the objective reads is real."""
    count = len(given.sequences.index)
    none = torch.zeros(count, dtype=torch.int64)
    return MicroBatch(
        input_ids=none, predictors=none, targets=none, behaviour_logprobs=logprobs["behaviour"],
        proximal_logprobs=logprobs["proximal"], advantages=given.advantages(), weights=given.weights("token-mean"),
        sequence=given.sequences.index, ages=torch.zeros(count), sft_weights=torch.zeros(count, dtype=torch.float64),
        num_sequences=given.sequences.count,
    )  # fmt: skip


def test_ratios_are_against_the_policy_before_a_batch_of_several_optimizer_steps() -> None:
    assert objective().anchor == "behaviour"
    assert not objective().needs_proximal
    for many in (TWICE, {"minibatches": 2}):
        assert objective(**many).anchor == "proximal"
        behaviour = objective(**many, ratio_anchor="behaviour")
        assert (behaviour.anchor, behaviour.needs_proximal) == ("behaviour", True)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("areal/ppo/decoupled-cap5-clamp-token/base", "truncate", 5.0), id="truncated"),
        pytest.param(("areal/ppo/decoupled-cap2-mask-token/base", "mask", 2.0), id="masked"),
        pytest.param(("areal/ppo/decoupled-cap5-clamp-sequence/base", "truncate", 5.0), id="sequence"),
    ],
)
def test_a_later_optimizer_step_is_areals_decoupled_one(case: tuple[str, str, float]) -> None:
    """Current against proximal is clipped, proximal against behaviour weighs: loss and gradient of AReaL's PPO."""
    name, bound, high = case
    given = Given(CASES[name])
    batch = micro_batch(given, behaviour=given.flat("rollout_log_prob"), proximal=given.flat("old_log_prob"))
    level = given.options["importance_sampling_level"]
    loss = "ppo_clip" if level == "token" else "gspo"
    chosen = objective(**TWICE, loss=loss, clip_low=0.2, clip_high=0.2, importance="token", importance_bound=bound, importance_high=high)  # fmt: skip
    found = chosen(given.flat("log_prob"), batch)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(CASES[name]["outputs"]["loss"], rel=2e-5)
    wanted = torch.tensor(CASES[name]["grads"]["log_prob"], dtype=torch.float64)
    torch.testing.assert_close(given.whole["log_prob"].grad, wanted, rtol=2e-5, atol=2e-6)
    log_ratio = (given.flat("log_prob") - given.flat("old_log_prob")).detach()
    assert found.sums["kl_proximal"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).sum()))


def test_a3po_is_its_papers_objective() -> None:
    """W min(r A, clip(r) A) with a proximal policy between sampler and current one by age; the same one as in AReaL from age 1 on."""
    given = Given(CASES["areal/ppo/decoupled-cap5-clamp-token/base"])
    sampler, current = given.flat("rollout_log_prob"), given.flat("log_prob")
    ages = [(0, 1, 2, 3, 7, 10**6)[place % 6] for place in range(len(sampler))]
    batch = replace(micro_batch(given, behaviour=sampler, proximal=None), ages=torch.tensor(ages))
    chosen = objective(name="A-3PO")
    found = chosen(current, batch)
    found.loss.backward()
    loss, slopes = 0.0, []
    values = zip(
        ages, sampler.tolist(), current.tolist(), batch.advantages.tolist(), batch.weights.tolist(), strict=True
    )
    for age, mu, pi, advantage, weight in values:
        share = 1.0 / age if age else 0.0
        proximal = share * mu + (1.0 - share) * pi
        ratio, factor = math.exp(pi - proximal), weight * math.exp(proximal - mu)
        is_clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
        loss -= factor * advantage * (min(max(ratio, 0.8), 1.2) if is_clipped else ratio)
        slopes.append(0.0 if is_clipped else -factor * advantage * ratio)
    assert found.loss.item() == pytest.approx(loss)
    assert 0 < found.sums["clipped"] == slopes.count(0.0)
    assert given.whole["log_prob"].grad[given.mask].tolist() == pytest.approx(slopes)
    assert not chosen.needs_proximal
    assert not objective(name="a3po", **TWICE).needs_proximal
    areal = Given(CASES["areal/prox_approx/base"])
    between = interpolated(areal.flat("old_logp"), areal.flat("logprobs"), 9 - areal.versions)
    torch.testing.assert_close(between, torch.tensor(areal.case["outputs"]["loglinear"]).double()[areal.mask])


@pytest.mark.parametrize("loss", sorted(LOSSES.built_in))
def test_every_loss_with_a_ratio_takes_it_against_the_proximal_policy(loss: str) -> None:
    """As against a sampler with those log-probabilities; MiniRL alone reads the sampler too, for its own weight."""
    given = Given(CASES["areal/ppo/decoupled-cap5-clamp-token/base"])
    proximal, sampler = given.flat("old_log_prob"), given.flat("rollout_log_prob")
    if loss == "reinforce":
        with pytest.raises(ValidationError, match=r"epochs = 2 with algorithm.loss = reinforce, which has no ratio"):
            objective(**TWICE, loss=loss)
        return
    many, single = objective(**TWICE, loss=loss), objective(loss=loss)
    current = given.flat("log_prob").detach()
    torch.manual_seed(0)
    found = many(current, micro_batch(given, behaviour=proximal if loss == "minirl" else sampler, proximal=proximal))
    torch.manual_seed(0)
    wanted = single(current, micro_batch(given, behaviour=proximal, proximal=proximal))
    assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-9)
    for name in ("ratio", "clipped", "dual_clipped"):
        assert float(found.sums[name]) == pytest.approx(float(wanted.sums[name]))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"loss": "reinforce", "minibatches": 4}, r"minibatches = 4 with algorithm.loss = reinforce.*set algorithm.loss = \"ppo_clip\""),
        ({"name": "a3po", **TWICE, "stop_kl": 0.1}, r"interpolated with algorithm.stop_kl = 0.1: it computes no policy before"),
        ({"ratio_anchor": "interpolated", "loss": "reinforce"}, r"interpolated with algorithm.loss = reinforce"),
        ({"name": "a3po", "max_staleness": 0}, r"interpolated with rollout.max_staleness = 0: for a token of the newest"),
        ({"name": "vcpo", "zero_stage": 3}, r"zero_stage = 3 with algorithm.advantage = opob: it needs the gradient of each"),
        ({"name": "vcpo", "minibatches": 2}, r"minibatches = 2 with algorithm.loss = reinforce"),
        ({"stop_kl": 0.1}, r"stop_kl = 0.1 does nothing with algorithm.epochs = 1"),
        ({"minibatches": 9}, r"minibatches = 9 is more than rollout.groups_per_step = 8, and a group is never split"),
        ({**TWICE, "ratio_anchor": "behaviour", "importance": "token"}, r"would weigh the ratio of ppo_clip twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused(settings: dict[str, object], text: str) -> None:
    tables = {"max_staleness": "rollout", "zero_stage": "trainer"}
    given = [f"{tables.get(key, 'algorithm')}.{key}={json.dumps(value)}" for key, value in settings.items()]
    with pytest.raises(ConfigError, match=text):
        load(TrainerSettings, overrides=["model.path=m", "rollout.groups_per_step=8", *given])


def test_old_samples_without_a_weight_are_pointed_out() -> None:
    """Ratios against the policy before the batch say nothing of the sampler: importance weights do."""
    text = 'set algorithm.importance = "token"'
    for settings, max_staleness, is_shown in (
        ({}, 2, False), (TWICE, 2, True), (TWICE, 0, False), ({**TWICE, "importance": "token"}, 2, False),
        ({**TWICE, "ratio_anchor": "behaviour"}, 2, False), ({"ratio_anchor": "interpolated"}, 2, True), ({"name": "a3po"}, 2, False),
    ):  # fmt: skip
        line = summary_line(AlgorithmSettings.model_validate(settings), max_staleness=max_staleness)
        assert (text in line) == is_shown, (settings, line)

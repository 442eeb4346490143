"""The output head in chunks: logits of every family, and gradients that do not depend on the number of chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.adapter import Lora, attach
from penstock.trainer.learner.logprobs import CompletionScorer, HiddenStates
from penstock.trainer.learner.output_head import MAX_LOGITS, logit_transform, logits_that_fit

TOKENS = 96
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 1.5},
    "gemma3_text": {"final_logit_softcapping": 1.5},
    "vaultgemma": {"final_logit_softcapping": 1.5},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 6.0},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.25},
    "qwen3": {},
}


def _model(family: str, *, vocabulary: int = 32_000, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=vocabulary, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        attn_implementation="eager", **settings,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def _tokens(vocabulary: int, count: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, vocabulary, (1, count + 1))
    return ids, torch.arange(count), ids[0, 1:], torch.randn(count) / count


def _gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_every_family_are_those_of_its_own_logits(family: str) -> None:
    """Log-probabilities, entropies and gradients in chunks of 20 tokens, at temperature 0.7, against transformers' logits."""
    vocabulary = 32_000 if family == "qwen3" else 4_096
    model = _model(family, vocabulary=vocabulary, **FAMILIES[family])
    ids, predictors, targets, weights = _tokens(vocabulary)
    tables = (model(ids).logits[0, :TOKENS] / 0.7).log_softmax(-1)
    dense = torch.stack([tables.gather(1, targets[:, None])[:, 0], -(tables.exp() * tables).sum(-1)])
    (dense * weights).sum().backward()
    expected = _gradients(model)
    scorer = CompletionScorer(model, 0.7, max_logits=20 * vocabulary)
    found = scorer(ids, predictors, targets, with_entropy=True)
    torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-4)
    (found * weights).sum().backward()
    for name, gradient in _gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=name)
    logprobs, _ = scorer.collisions(scorer(ids, predictors, targets, hidden_only=True), predictors, targets, TOKENS + 1)
    torch.testing.assert_close(logprobs, dense[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "logit_scale"), ("hyperclovax", "logits_scaling"), ("falcon_h1", "lm_head_multiplier")],
)
def test_another_transform_is_refused_by_name(family: str, name: str) -> None:
    """HyperCLOVA X multiplies by what Granite divides by; a value that changes nothing is not refused."""
    with pytest.raises(UnsupportedModel, match=f"a model of {family} has {name} = 0.5"):
        logit_transform(SimpleNamespace(model_type=family, **{name: 0.5}))
    assert logit_transform(SimpleNamespace(model_type=family, **{name: 1.0})) is None


def test_the_gradient_in_bfloat16_does_not_depend_on_the_number_of_chunks() -> None:
    """Within 0.1 % of float64; summed in bfloat16, as autograd does, it is 0.5 % off with 16 chunks and 0.8 % with 152."""
    count, vocabulary = 304, 4_096
    model = _model("qwen3", vocabulary=vocabulary, dtype=torch.bfloat16)
    _, _, targets, weights = _tokens(vocabulary, count)
    hidden, weight = torch.randn(count, 128).to(torch.bfloat16).requires_grad_(), model.lm_head.weight
    with torch.no_grad():
        weight.mul_(0.1)  # as large as those of models: rounded logits change probabilities little
    chances = (hidden.detach().double() @ weight.detach().double().T).softmax(-1)
    of_logits = weights.double()[:, None] * (torch.nn.functional.one_hot(targets, vocabulary) - chances)
    expected, of_hidden = of_logits.T @ hidden.detach().double(), of_logits @ weight.detach().double()
    for chunks in (1, 16, 38, 76, 152):
        scorer = CompletionScorer(model, 1.0, count // chunks * vocabulary)
        (scorer.scores(hidden, targets) * weights).sum().backward()
        assert (weight.grad.double() - expected).norm() < 1e-3 * expected.norm(), chunks
        assert (hidden.grad.double() - of_hidden).norm() < 4e-3 * of_hidden.norm(), chunks
        weight.grad = hidden.grad = None


def test_a_head_in_float32_agrees_with_an_engine_that_has_one() -> None:
    """Its logits are those of SGLang's --enable-fp32-lm-head, hidden states times weights in float32: the mismatch of rounded ones goes."""
    model = _model("qwen3", dtype=torch.bfloat16)
    ids, predictors, targets, _ = _tokens(32_000)
    with torch.no_grad():
        rounded, exact = (CompletionScorer(model, 1.0, head_in_float32=in_float32) for in_float32 in (False, True))
        hidden = exact(ids, predictors, targets, hidden_only=True)
        tables = (hidden.float() @ model.lm_head.weight.float().T).log_softmax(-1)
        engine = tables.gather(1, targets[:, None])[:, 0]
        mismatch = [float((scorer(ids, predictors, targets) - engine).abs().mean()) for scorer in (rounded, exact)]
    assert mismatch[0] > 1e-3
    assert mismatch[1] < 1e-5


@pytest.mark.parametrize("trains_layers", [True, False])
def test_a_head_with_an_adapter_learns_that_alone(trains_layers: bool) -> None:
    """Values and gradients are peft's; the weight below has no gradient, and without the adapter the reference is the model."""
    model = _model("qwen3", tie_word_embeddings=False)
    attach(model, Lora(4, 8.0, targets=("lm_head", "q_proj") if trains_layers else ("lm_head",)))
    torch.nn.init.normal_(model.lm_head.lora_B["default"].weight, std=0.1)
    ids, predictors, targets, weights = _tokens(32_000)
    dense = model(ids).logits[0, :TOKENS].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (dense * weights).sum().backward()
    expected = _gradients(model)
    scorer = CompletionScorer(model, 1.0, max_logits=20 * 32_000)
    base = HiddenStates(scorer(ids, predictors, targets, hidden_only=True).detach(), scorer)
    found, kl = scorer(ids, predictors, targets, kl_to=base)
    torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-4)
    (found * weights).sum().backward()
    gradients = _gradients(model)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=name)
    theirs = torch.nn.functional.linear(base.values, model.lm_head.base_layer.weight).log_softmax(-1)
    mine = model.lm_head(base.values).log_softmax(-1)
    torch.testing.assert_close(kl, (mine.exp() * (mine - theirs)).sum(-1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("free_gb", "times"), [(0, 1), (3, 1), (7, 2), (20, 4), (60, 16), (140, 16)])
def test_a_chunk_on_a_gpu_takes_a_quarter_of_its_free_memory(free_gb: int, times: int) -> None:
    """24 bytes a logit; as many as on a CPU at least, and 512 Mi at most."""
    assert logits_that_fit(free_gb * 10**9) == times * MAX_LOGITS

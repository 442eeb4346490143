"""Mixtures of experts in the trainer: what is refused and adapted, and the engine's experts in the forward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from penstock.deploy.plan.memory.model_shape import read_shape, shape_of
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.errors import ConfigError
from penstock.trainer.algorithm.batch import Row, build
from penstock.trainer.errors import NotEstimated, UnsupportedModel
from penstock.trainer.learner import adapter, experts
from penstock.trainer.learner.attention.models import pair_cost
from penstock.trainer.learner.flops import pass_cost
from penstock.trainer.learner.logprobs import CompletionScorer, read_batch
from penstock.trainer.learner.model_folder_check import check_routers
from penstock.trainer.settings import TrainerSettings

TINY = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 8, "num_local_experts": 4, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def tiny() -> Any:
    known = {name: value for name, value in TINY.items() if name in transformers.Qwen3MoeConfig().to_dict()}
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**known))


def test_a_family_whose_files_are_not_known_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"model_type mixtral has experts \(model\.layers\.0\.mlp\.experts"):
        experts.check_family(tiny(), "mixtral")
    experts.check_family(nn.Linear(2, 2), "llama")


def test_adapters_of_a_mixture_are_those_of_attention() -> None:
    """Without targets attention is adapted; targets that are experts or routers are refused by name."""
    model = tiny()
    adapter.attach(model, adapter.Lora(rank=2, alpha=4.0))
    adapted = adapter.config(model)
    assert adapted is not None
    assert adapted.target_modules == ("k_proj", "o_proj", "q_proj", "v_proj")
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".mlp." in name)
    for target in ("up_proj", "mlp.gate", "experts"):
        lora = adapter.Lora(rank=2, alpha=4.0, targets=("q_proj", target))
        with pytest.raises(UnsupportedModel, match=rf"{target} is of a layer's experts or its router"):
            adapter.attach(tiny(), lora)


def written(folder: Path) -> Path:
    """Write a tiny Qwen3-MoE whose middle layer is dense."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, mlp_only_layers=[1], initializer_range=0.3, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("mixture") / "model")


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def own_choices(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the experts [T, 2, 2] that a model's routers choose for a row, rising."""
    with torch.no_grad():
        logits = model.model(torch.from_numpy(tokens).long()[None], output_router_logits=True).router_logits
    return np.stack([logit.topk(2).indices.sort(-1).values.numpy() for logit in logits], axis=1).astype(np.uint8)


def rows_of(model: Any, *, random_after: int | None = None) -> list[Row]:
    """Two prompts with their answers, two of which begin alike; experts are the model's, or random at the end."""
    random = np.random.default_rng(0)
    made = []
    for prompt in (random.integers(3, 48, 20), random.integers(3, 48, 9)):
        start = random.integers(3, 48, 40)
        for answer in (start, np.concatenate([start[:35], random.integers(3, 48, 5)]), random.integers(3, 48, 12)):
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            experts = own_choices(model, tokens[:-1])
            if random_after is not None:
                other = random.random((len(experts), 2, 8)).argsort(-1)[..., :2]
                experts[random_after:] = np.sort(other, -1).astype(np.uint8)[random_after:]
            mask = np.arange(len(tokens)) >= len(prompt)
            made.append(Row(tokens, mask, np.zeros(len(tokens), np.float32), 1.0, 0.1, experts=experts))
    return made


def one_by_one(model: Any, rows: list[Row]) -> torch.Tensor:
    """Return log-probabilities by a plain pass of each row, with experts from a replaced top-k: the reference."""
    found = []
    for row in rows:
        places = iter(range(2))
        for layer in (model.model.layers[0], model.model.layers[2]):
            layer.mlp.gate.forward = _gate(layer.mlp.gate, torch.from_numpy(row.experts).long()[:, next(places)])
        ids = torch.from_numpy(row.token_ids).long()
        logprobs = torch.log_softmax(model(ids[None, :-1]).logits[0], dim=-1)
        sampled = np.flatnonzero(row.loss_mask)
        found.append(logprobs[sampled - 1, ids[sampled]])
        for layer in (model.model.layers[0], model.model.layers[2]):
            del layer.mlp.gate.forward
    return torch.cat(found)


def _gate(router: Any, chosen: torch.Tensor) -> Any:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
        among = torch.stack([logits[:, e] for e in range(8)], dim=1).gather(1, chosen)
        return logits, among.softmax(-1), chosen  # softmax over all, divided by the sum of the chosen

    return forward


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("random_after", [None, 0, 25])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_replayed_experts_compute_what_each_row_alone_would(
    folder: Path, random_after: int | None, checkpointing: bool
) -> None:
    """Log-probabilities and gradients, of routers too, equal a plain pass with these experts; prefixes are shared."""
    reference, model = loaded(folder), loaded(folder)
    rows = rows_of(reference, random_after=random_after)
    scorer = CompletionScorer(model, 1.0)
    scorer.replay_routers()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    batch = build(rows)
    shared = sum(len(row.token_ids) - 1 for row in rows) - batch.input_ids.shape[1]
    # prompts and 32 tokens of equal starts; nothing where each row has its experts; what is equal before token 25
    assert shared == {None: 2 * 20 + 2 * 9 + 2 * 32, 0: 0, 25: 2 * 20 + 9 + 25}[random_after]
    assert batch.experts is not None
    found = read_batch(scorer, batch, experts=batch.experts)
    expected = one_by_one(reference, rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1.0, 1.0, len(found))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(
            one.grad, other.grad, rtol=1e-4, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert not name.endswith("gate.weight") or one.grad.abs().max() > 0
    changed, total = scorer.routing_figures().tolist()
    assert total == 2 * batch.input_ids.shape[1]
    assert changed == 0 if random_after is None else changed > 0.3 * total


def test_without_experts_the_routers_choose_again(folder: Path) -> None:
    model = loaded(folder)
    rows = rows_of(model, random_after=0)
    scorer = CompletionScorer(model, 1.0)
    scorer.replay_routers()
    batch = build(rows)
    with torch.no_grad():
        replayed, plain = read_batch(scorer, batch, experts=batch.experts), read_batch(scorer, batch)
    own = [replace(row, experts=own_choices(model, row.token_ids[:-1])) for row in rows]
    torch.testing.assert_close(plain, one_by_one(model, own).detach(), rtol=1e-5, atol=1e-5)
    assert (plain - replayed).abs().max() > 0.1
    assert scorer.routing_figures().tolist() == [0.0, 0.0]


def test_what_cannot_be_replayed_is_refused(folder: Path, tmp_path: Path) -> None:
    """Before a model is read where its config.json says so; a batch without experts is refused by the policy."""
    assert check_routers(folder, router_replay=False) is None
    found = check_routers(folder, router_replay=True)
    assert found is not None
    assert (found.layers, str(found.shape)) == ((0, 2), "2 of 8 experts in 2 layers")
    write_model(tmp_path / "dense", seed=0)
    with pytest.raises(
        ConfigError, match=r"router_replay = true, and model.path = .* is a qwen3 model without routers"
    ):
        check_routers(tmp_path / "dense", router_replay=True)
    with pytest.raises(UnsupportedModel, match="has routers of no kind"):
        experts.install(loaded(tmp_path / "dense"))
    padded = loaded(folder)
    padded.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(
        UnsupportedModel, match=r"has layers of chunked_attention, so that its rows are padded; set it to"
    ):
        CompletionScorer(padded, 1.0).replay_routers()
    given = {"model": {"path": folder}, "data": {"train": "rows.jsonl"}, "trainer": {"router_replay": True}}
    assert TrainerSettings.model_validate({**given, "rollout": {"environment": "lookup"}}).trainer.router_replay
    with pytest.raises(
        ValueError, match=r"router_replay = true with algorithm\.dpo_coefficient: no engine chose experts"
    ):
        TrainerSettings.model_validate({**given, "algorithm": {"dpo_coefficient": 0.1}})


def test_a_plan_counts_all_experts_in_memory_and_those_of_a_token_in_operations(folder: Path) -> None:
    """As the loaded model counts them; Qwen3-30B-A3B has 30.5 billion parameters, 3.35 of which compute a token."""
    shape, model = read_shape(folder, "model.path"), loaded(folder)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    cost = pass_cost(model)
    norms = sum(one.numel() for name, one in model.named_parameters() if "norm" in name)
    assert shape.active_body == cost.layers + norms
    assert pair_cost(model).whole == pytest.approx(2 * 3 * 16 / shape.active_body)
    lora = adapter.Lora(rank=2, alpha=4.0)
    adapter.attach(model, lora)
    assert shape.adapter(2, ()) == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    published = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    large = shape_of(published, "config.json")
    assert large.parameters == pytest.approx(30.5e9, rel=2e-3)
    assert large.active_body + 2 * large.table == pytest.approx(3.35e9, rel=2e-3)
    with pytest.raises(NotEstimated, match="num_experts_per_tok = 200: expected a number from 1 to 128"):
        shape_of({**published, "num_experts_per_tok": 200}, "config.json")

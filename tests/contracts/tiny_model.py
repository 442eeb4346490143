"""Model folders small enough to build quickly, and the dense forward that computes expected values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.protocol.trajectory import Group

VOCAB = 320
END_TOKEN = 2
CONTEXT = 8192

_KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
MIXTURE = {  # two layers of experts around a dense one
    "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip


def build_model(folder: Path, kind: str = "qwen3", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a random model with a tokenizer and a chat template; returns it for comparison."""
    torch.manual_seed(seed)
    config_class, model_class = _KINDS[kind]
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.1,
        "eos_token_id": END_TOKEN,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    model = model_class(config_class(**(shape | changes))).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # zeros and ones would hide an error
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def build_endless_model(folder: Path, *, seed: int = 0) -> None:
    """Write a random model that never ends a completion."""
    build_model(folder, seed=seed, eos_token_id=None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of fewer than VOCAB tokens and a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, what is 1 + 1? The answer is 2."], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_changed_copy(source: Path, target: Path, *, seed: int, scale: float = 0.02) -> Path:
    """Write ``source`` with every weight moved a little: a next policy version."""
    generator = torch.Generator().manual_seed(seed)
    tensors = read_tensors(source)
    moved = {name: item + scale * torch.randn(item.shape, generator=generator) for name, item in tensors.items()}
    return write_tensors(source, target, moved)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write_tensors(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja"):
            (target / path.name).write_bytes(path.read_bytes())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


class Dense:
    """The dense forward of a model folder by transformers, in float32: the judge of tokens and logprobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Return [len(tokens), vocab]: row i is for token i + 1."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens]), use_cache=False).logits[0].float()
        return (logits / temperature).log_softmax(-1)

    def of_completion(self, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
        table = self.logprobs(prompt + completion, temperature)
        start = len(prompt) - 1
        return [table[start + index, token].item() for index, token in enumerate(completion)]

    def check_reply(self, prompt: list[int], reply: dict[str, Any], tolerance: float = 1e-5) -> None:
        """Hold the log-probabilities of an engine's reply, in nats, against the dense forward of its tokens."""
        triples = reply["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in triples] == reply["output_ids"]
        expected = self.of_completion(prompt, reply["output_ids"])
        assert [logprob for logprob, _, _ in triples] == pytest.approx(expected, abs=tolerance)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the most likely tokens, one full forward each: no cache that could be wrong alike."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logprobs(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def extend(self, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
        """Return [len(tokens), vocab] as `logprobs`, of tokens behind those whose keys and values are held."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0].float()
        return logits.log_softmax(-1)


def logprobs_by_version(
    models: Mapping[int, Dense], prompt: list[int], completion: list[int], runs: Iterable[tuple[int, int, int]]
) -> list[float]:
    """Return each token's logprob under its own version's weights, everything before it computed by them too.

    ``runs`` are (version, start, end) of the completion.
    """
    return [
        logprob
        for version, start, end in runs
        for logprob in models[version].of_completion(prompt, completion[:end])[start:]
    ]


def check_groups(groups: Iterable[Group], models: Callable[[int], Dense]) -> set[int]:
    """Recompute every token of a worker's groups by the weights of its own version; return all versions."""
    found: dict[int, Dense] = {}
    for group in groups:
        for row in group.trajectories:
            start, tokens = group.num_prompt_tokens, row.token_ids.tolist()
            runs = [(run.version, run.start - start, run.end - start) for run in row.version_runs]
            assert [first for _, first, _ in runs] == [0, *(end for _, _, end in runs[:-1])]
            assert runs[-1][2] == len(tokens) - start
            found |= {version: models(version) for version, _, _ in runs if version not in found}
            expected = logprobs_by_version(found, tokens[:start], tokens[start:], runs)
            assert row.behaviour_logprobs[start:].tolist() == pytest.approx(expected, abs=1e-4)
    return set(found)


def logprobs_over_kept_cache(
    models: Mapping[int, Dense], prompt: list[int], completion: list[int], runs: Iterable[tuple[int, int, int]]
) -> list[float]:
    """Return each token's logprob under its own version's weights, which read what older versions left behind.

    A token's keys and values are of the version that sampled the token after it: it is computed then.
    """
    tokens, cache, computed = prompt + completion, DynamicCache(), 0
    found: list[float] = []
    for version, start, end in runs:
        upto = len(prompt) + end - 1
        table = models[version].extend(tokens[computed:upto], cache)[len(prompt) + start - 1 - computed :]
        found += [table[index, token].item() for index, token in enumerate(completion[start:end])]
        computed = upto
    return found


LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Adapter:
    """An adapter folder in PEFT's format, and the tensors in it."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def random(cls, model: Path, folder: Path, *, seed: int, rank: int = 4, targets: Sequence[str] = LAYERS) -> Adapter:
        """Make one that changes the model's output; nothing is written yet."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in read_tensors(model).items():
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] in targets:
                down = torch.randn(rank, weight.shape[1], generator=generator)
                tensors[f"base_model.model.{layer}.lora_A.weight"] = 0.1 * down
                up = torch.randn(weight.shape[0], rank, generator=generator)
                tensors[f"base_model.model.{layer}.lora_B.weight"] = 0.1 * up
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 2 * rank,
            "lora_dropout": 0.0,
            "target_modules": sorted(targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "use_rslora": False,
            "base_model_name_or_path": None,
        }
        return cls(folder, config, tensors)

    def in_bfloat16(self) -> Adapter:
        """Return it with its numbers stored in half the bytes."""
        return replace(self, tensors={name: tensor.bfloat16() for name, tensor in self.tensors.items()})

    def write(self) -> Adapter:
        self.folder.mkdir(parents=True)
        (self.folder / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return self

    def merged_into(self, model: Path, target: Path) -> Path:
        tensors = read_tensors(model)
        for layer in {name.rpartition(".lora_")[0] for name in self.tensors}:
            down, up = (self.tensors[f"{layer}.lora_{part}.weight"].float() for part in "AB")
            scale = self.config["lora_alpha"] / self.config["r"] ** (0.5 if self.config["use_rslora"] else 1.0)
            tensors[f"{layer.removeprefix('base_model.model.')}.weight"] += scale * (up @ down)
        return write_tensors(model, target, tensors)

"""The quickstart's task, sorting eight digits: its data and its model, both generated.

10^8 problems, exact-match reward, learnable from scratch in about a minute on one core. A problem is held
out when ``crc32(digits) % 10 == 0``: it is never seen in the warm-up nor in the reinforcement learning,
so held-out accuracy measures sorting, not memory. The files are ordinary ones, read by the ordinary
data path; the model is an ordinary Hugging Face folder of the Qwen3 architecture with 126,848
parameters and a character-level tokenizer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

NUM_DIGITS = 8
MAX_NEW_TOKENS = NUM_DIGITS + 1  # the digits and the end of turn

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ROLES = ("system", "user", "assistant")
_CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789.,:;?!+-*/="
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_HIDDEN = 64
_LAYERS = 2
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 32
_INTERMEDIATE = 192
_CONTEXT = 128


def is_held_out(digits: str) -> bool:
    return zlib.crc32(digits.encode()) % 10 == 0


def problems(seed: int, *, held_out: bool) -> Iterator[str]:
    """Yield distinct random problems of one side of the split, without end; the same for the same seed."""
    rng = np.random.default_rng([seed, int(held_out)])
    seen: set[str] = set()
    while True:
        for number in rng.integers(0, 10**NUM_DIGITS, size=4096):
            digits = f"{number:0{NUM_DIGITS}d}"
            if is_held_out(digits) == held_out and digits not in seen:
                seen.add(digits)
                yield digits


def write_data(folder: Path, *, seed: int, num_sft: int, num_train: int, num_eval: int) -> None:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; warm-up and training share no problem."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = problems(seed, held_out=False)
    write_rows(folder / "sft.jsonl", (_chat_row(next(seen)) for _ in range(num_sft)))
    write_rows(folder / "train.jsonl", (_prompt_row(next(seen)) for _ in range(num_train)))
    # The same held-out problems for every seed, so that runs can be compared.
    held_out = problems(0, held_out=True)
    write_rows(folder / "eval.jsonl", (_prompt_row(next(held_out)) for _ in range(num_eval)))


def _question(digits: str) -> dict[str, str]:
    return {"role": "user", "content": f"sort {digits}"}


def _answer(digits: str) -> str:
    return "".join(sorted(digits))


def _chat_row(digits: str) -> dict[str, Any]:
    return {"messages": [_question(digits), {"role": "assistant", "content": _answer(digits)}]}


def _prompt_row(digits: str) -> dict[str, Any]:
    return {"prompt": [_question(digits)], "ground_truth": _answer(digits), "data_source": "sort_digits"}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def write_model(folder: Path, *, seed: int) -> int:
    """Write a randomly initialised Qwen3 model folder; returns its number of parameters.

    Initialised as transformers does (normal with standard deviation 0.02, norms at one), but in
    numpy: the command that calls this has no reason to load torch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    eos = _SPECIALS.index("<|im_end|>")
    pad = _SPECIALS.index("<|endoftext|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": _vocab_size(),
        "hidden_size": _HIDDEN, "intermediate_size": _INTERMEDIATE, "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD_DIM,
        "max_position_embeddings": _CONTEXT, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "use_sliding_window": False, "dtype": "float32", "eos_token_id": eos, "pad_token_id": pad, "bos_token_id": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "pad_token_id": pad}))
    tensors = _random_weights(np.random.default_rng(seed))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.size for tensor in tensors.values())


def _vocab_size() -> int:
    return len(_SPECIALS) + len(_ROLES) + len(_CHARACTERS)


def _write_tokenizer(folder: Path) -> None:
    words = [*_SPECIALS, *_ROLES, *_CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=_SPECIALS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join((*_ROLES, r"[\s\S]"))), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(list(_SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>", "model_max_length": _CONTEXT, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def _random_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0.0, 0.02, size=shape).astype(np.float32)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": normal(_vocab_size(), _HIDDEN), "model.norm.weight": ones(_HIDDEN)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones(_HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": ones(_HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": normal(_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": normal(_HIDDEN, _HEADS * _HEAD_DIM),
            f"{prefix}.self_attn.q_norm.weight": ones(_HEAD_DIM),
            f"{prefix}.self_attn.k_norm.weight": ones(_HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": normal(_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": normal(_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": normal(_HIDDEN, _INTERMEDIATE),
        }
    return tensors

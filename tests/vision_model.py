"""A tiny model that reads images, made on the spot: Qwen2.5-VL with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tests.contracts.tiny_model import CONTEXT, END_TOKEN, VOCAB, write_tokenizer

PATCH = 4  # pixels; a token is a square of 8 x 8
MIN_PIXELS, MAX_PIXELS = 16 * 16, 64 * 64
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_vision_model(folder: Path, *, seed: int = 0, **changes: Any) -> Qwen2_5_VLForConditionalGeneration:
    """Write a random model with tokenizer, chat template and image processor; returns it for comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_vision_tokenizer(folder)
    torch.manual_seed(seed)
    text = {
        "vocab_size": max(VOCAB, *ids.values()) + 1,
        "hidden_size": 256,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # of 128 dimensions, as in the published models
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [16, 24, 24]},
        "eos_token_id": END_TOKEN,
        "pad_token_id": 0,
        "bos_token_id": None,
        "use_sliding_window": False,
    }
    vision = {
        "depth": 2,
        "hidden_size": 160,
        "intermediate_size": 48,
        "num_heads": 2,  # of 80
        "out_hidden_size": 256,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.05,
    }
    config = Qwen2_5_VLConfig(
        text_config=text | changes,
        vision_config=vision,
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name or "ln_q" in name:  # zeros and ones would hide an error
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def write_vision_tokenizer(folder: Path) -> dict[str, int]:
    """Write the tiny tokenizer with the tokens of images added, and a template that reads parts; returns their ids."""
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in VISION])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": _TEMPLATE}))
    return {text: tokenizer.token_to_id(text) for text in VISION}

"""A model folder that reads images, as far as a worker reads it: no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.agents.proxy.agent_model import tokenizer_json

_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_vision_folder(folder: Path, *, max_pixels: int = 64 * 64) -> Path:
    """Write tokenizer, template, and an image processor whose tokens are squares of 8 x 8 pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in (*_MARKS, "<|im_end|>")}
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    config = {
        "model_type": "qwen2_5_vl",
        "eos_token_id": ids["<|im_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_config": {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
        "text_config": {"vocab_size": 440, "max_position_embeddings": 8192},
    }
    (folder / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**processor, "min_pixels": 16 * 16, "max_pixels": max_pixels})
    )
    return folder

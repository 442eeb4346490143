"""A tiny GGUF file, written by the package ``gguf``: a Llama of 2 layers with a byte-level tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZĊĠ"  # Ċ and Ġ: line feed and space in byte-level tokens
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT = 32, 2, 4, 2, 64, 128
TOKENS = (*SPECIALS, *CHARACTERS, "as")


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0.0, 0.02, size=shape).astype(np.float32)

    found = {"token_embd.weight": normal(len(TOKENS), HIDDEN), "output_norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        kv = HIDDEN // HEADS * KV_HEADS
        found |= {
            f"blk.{layer}.attn_norm.weight": np.ones(HIDDEN, np.float32),
            f"blk.{layer}.ffn_norm.weight": np.ones(HIDDEN, np.float32),
            f"blk.{layer}.attn_q.weight": normal(HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": normal(kv, HIDDEN),
            f"blk.{layer}.attn_v.weight": normal(kv, HIDDEN),
            f"blk.{layer}.attn_output.weight": normal(HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": normal(INNER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": normal(INNER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": normal(HIDDEN, INNER),
        }
    return found


def write_gguf(path: Path, *, quantisation: str = "Q8_0", block_count: int = LAYERS, embedding: int = HIDDEN) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(embedding)
    writer.add_block_count(block_count)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3 if token in SPECIALS else 1 for token in TOKENS])
    writer.add_token_merges(["a s"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, tensor in tensors().items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

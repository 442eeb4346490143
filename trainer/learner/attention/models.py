"""Puts the attention over packed rows into models of transformers, where that is exact, and runs them on a stream.

`use_packed_rows` says for which models it is not, and why. Their rows are then padded and computed as a batch, each
with its whole prompt, without sharing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.algorithm.device_copy import copied_together
from penstock.trainer.algorithm.packed_rows import Layout
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner import experts
from penstock.trainer.learner.attention import backends
from penstock.trainer.learner.experts import Routing
from penstock.trainer.learner.flops import share_of_experts
from penstock.trainer.learner.parallel_shares import TokenShares
from penstock.trainer.learner.vision import is_of_tower, text_body, tower_of

NAME = "penstock_packed"
WHOLE = TokenShares()
_TOKENS_AT_START = 4096  # a run whose attention would not be computed at this length is refused before its first step

_HARMLESS = frozenset(
    {
        "scaling", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
        "output_router_logits",
    }
)  # fmt: skip


def use_packed_rows(model: Any) -> str | None:
    """Let a causal language model compute packed rows; otherwise leave it as it is, and return the reason."""
    reason = why_not_packed(model)
    if reason is None:
        from transformers import AttentionInterface  # noqa: PLC0415  seconds of import

        # It gets no mask of transformers, which would compare positions on the device to make one, and wait for the result.
        AttentionInterface.register(NAME, _attention)
        text_body(model).set_attn_implementation(NAME)  # a vision tower attends within images, in both directions
    return reason


def why_not_packed(model: Any) -> str | None:
    """Return why packed rows would not be exact for a model; None: they are."""
    reason = next(_obstacles(model, model.config.get_text_config()), None)
    return reason and f"{type(model).__name__} {reason}"


def _obstacles(model: Any, config: Any) -> Iterator[str]:
    if not (getattr(model, "_supports_attention_backend", False) and model._can_set_attn_implementation()):
        yield "does not use transformers' attention interface"
        return
    if "position_ids" not in inspect.signature(text_body(model).forward).parameters:
        yield "takes no position_ids"
    layers = set(getattr(config, "layer_types", None) or ())
    if others := sorted(layers - {"full_attention", "sliding_attention"}):
        yield f"has layers of {', '.join(others)}"
    window = getattr(config, "sliding_window", None) if not layers or "sliding_attention" in layers else None
    if window and window < config.max_position_embeddings:
        yield f"has sliding windows of {window} tokens"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        yield f"has rotary embeddings of type {rope['rope_type']}, which depend on the longest row"
    if "mrope_section" in rope and tower_of(model) is None:
        yield "has positions in several dimensions"
    if getattr(config, "attn_logit_softcapping", None):
        yield "caps its attention scores"
    if getattr(config, "attention_dropout", 0.0):
        yield "has dropout in its attention"
    if getattr(config, "alibi", False):
        yield "has attention scores with a bias by distance"


def pair_cost(model: Any) -> float:
    """Return the computation of one token attending to one, relative to a token's other computation in the layers.

    A forward pass of T tokens takes 2 · parameters · T + 4 · layers · width · pairs operations.
    """
    config = model.config.get_text_config()
    tables = [held for held in (model.get_input_embeddings(), model.get_output_embeddings()) if held is not None]
    embedded = {id(held.weight) for held in tables}
    sizes = [
        getattr(p, "ds_numel", p.numel()) * (share_of_experts(config) if ".experts." in name else 1.0)
        for name, p in model.named_parameters()
        if id(p) not in embedded and not is_of_tower(name)
    ]  # ZeRO-3 empties p
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_attention_heads * head / max(1, sum(sizes))


def attention_of(model: Any, device: torch.device) -> str:
    """Return the backend's name for a model's packed rows, compared now; raises NoAttentionKernel."""
    heads, kv_heads, size, value_size = head_sizes(model.config.get_text_config())
    dtype = model.get_input_embeddings().weight.dtype
    query, key, value = (
        torch.empty(1, count, 1, width, device=device, dtype=dtype)
        for count, width in ((heads, size), (kv_heads, size), (kv_heads, max(size, value_size)))
    )
    return backends.choose(query, key, value, _TOKENS_AT_START).name


def head_sizes(config: Any) -> tuple[int, int, int, int]:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if (rotary := getattr(config, "qk_rope_head_dim", None)) and (other := getattr(config, "qk_nope_head_dim", None)):
        return heads, heads, rotary + other, getattr(config, "v_head_dim", None) or size  # multi-head latent attention
    return heads, getattr(config, "num_key_value_heads", None) or heads, size, size


def read_rows(
    body: Any,
    input_ids: Tensor,
    position_ids: Tensor | None,
    layout: Layout | None,
    packed: bool,
    shares: TokenShares = WHOLE,
    routing: Routing | None = None,
    embedded: Tensor | None = None,
) -> Tensor:
    """Return the last hidden states [T, hidden] of a stream of rows, or those [W, hidden] of this rank's tokens; then collective.

    Args:
        body: The model without its output head.
        input_ids: [1, T] int64.
        position_ids: [1, T] int64; None: 0, 1, 2, …
        layout: Which token attends to which; None: one row.
        packed: True if `use_packed_rows` accepted the model; otherwise rows are padded.
        shares: Which tokens this rank computes. Several shares need packed rows with a layout.
        routing: The experts of these tokens, in a model that `router_replay` prepared; None: those that its routers choose.
        embedded: [1, T, H] what the tokens are to the layers, with images; needs packed rows. None: their embeddings.
    """
    tokens = {"input_ids": input_ids} if embedded is None else {"inputs_embeds": embedded}
    if shares.are_several:
        assert packed, "refused before the model was loaded"
        assert position_ids is not None, "a micro-batch has positions and a layout"
        assert embedded is None, "refused before the model was loaded"
        tokens, position_ids = {"input_ids": shares.own(input_ids)}, shares.own(position_ids)
    if layout is None:
        return body(**tokens, use_cache=False, **experts.given(routing)).last_hidden_state[0]
    if not packed:
        assert routing is None, "refused when the model was loaded"
        assert embedded is None, "models that read images are computed as packed rows"
        return _read_padded(body, input_ids, layout)
    layout.num_calls = 0
    options = {"layout": layout, "shares": shares, **experts.given(routing)}
    hidden = body(**tokens, position_ids=position_ids, use_cache=False, **options).last_hidden_state
    expected = body.config.get_text_config().num_hidden_layers
    if layout.num_calls != expected:
        raise UnsupportedModel(
            f"{type(body).__name__} called the attention function {layout.num_calls} times for {expected} layers, so that "
            "its rows would not be computed apart; use another model, and report this one"
        )
    return hidden[0]


def _read_padded(body: Any, input_ids: Tensor, layout: Layout) -> Tensor:
    """Compute each row apart, padded on the right: a causal model never attends to that."""
    rows = layout.rows()
    width = max(map(len, rows))
    index = np.zeros((len(rows), width), dtype=np.int64)
    places = np.zeros(layout.num_tokens, dtype=np.int64)
    for number, row in enumerate(rows):
        index[number, : len(row)] = row
        places[row] = number * width + np.arange(len(row))
    on_device, where = copied_together([torch.from_numpy(index), torch.from_numpy(places)], input_ids.device)
    padded = input_ids[0][on_device]
    hidden = body(input_ids=padded, use_cache=False).last_hidden_state.flatten(0, 1)
    return hidden.index_select(0, where)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    shares: TokenShares = WHOLE,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' interface asks; without a layout by torch's function."""
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415

        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    unknown = _not_exact({**options, "attention_mask": attention_mask}, layout)
    query, key, value = (shares.by_heads(states, layout.num_tokens) for states in (query, key, value))
    if unknown or query.shape[0] != 1 or query.shape[2] != layout.num_tokens or not getattr(module, "is_causal", True):
        raise UnsupportedModel(
            f"{type(module).__name__} asks for attention over packed rows with {', '.join(unknown) or list(query.shape)}, "
            f"which would not be exact for {layout.num_tokens} tokens; use another model, and report this one"
        )
    layout.num_calls += 1
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = shares.by_tokens(backends.attend(query, key, value, layout, scale))
    return out.transpose(1, 2).contiguous(), None


def _not_exact(options: Mapping[str, Any], layout: Layout) -> list[str]:
    unsupported = {name: value for name, value in options.items() if value is not None and name not in _HARMLESS}
    if unsupported.get("is_causal", False) is True:
        del unsupported["is_causal"]
    if unsupported.get("sliding_window", layout.longest_row) >= layout.longest_row:
        unsupported.pop("sliding_window", None)
    if unsupported.get("dropout") == 0.0:
        del unsupported["dropout"]
    return [
        f"{name} = {value}" if isinstance(value, (int, float)) else name for name, value in sorted(unsupported.items())
    ]

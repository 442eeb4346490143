"""Puts the attention over packed rows into models of transformers, where that is exact, and runs them on a stream.

`use_packed_rows` says for which models it is not, and why. Their rows are then padded and computed as a batch, each
with its whole prompt, without sharing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.protocol.chat_tokenizer import LENGTH_DEPENDENT
from penstock.trainer.algorithm.device_copy import copied_together
from penstock.trainer.algorithm.packed_rows import Layout, Node, PairCost
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner import experts
from penstock.trainer.learner.attention import backends
from penstock.trainer.learner.attention.variant import Variant
from penstock.trainer.learner.experts import Routing
from penstock.trainer.learner.flops import share_of_experts, windows_of
from penstock.trainer.learner.parallel_shares import TokenShares
from penstock.trainer.learner.vision import is_of_tower, text_body, tower_of

NAME = "penstock_packed"
WITH_WINDOWS = "penstock_packed_windows"  # some models tell their attention its window by the mask alone
WHOLE = TokenShares()
_TOKENS_AT_START = 4096  # a run whose attention would not be computed at this length is refused before its first step

_HARMLESS = frozenset(
    {
        "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
        "dropout",  # a policy whose samples are compared with its log-probabilities has none
    }
)  # fmt: skip


def use_packed_rows(model: Any) -> str | None:
    """Let a causal language model compute packed rows; otherwise leave it as it is, and return the reason."""
    reason = why_not_packed(model)
    if reason is None:
        from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415  seconds of import

        AttentionInterface.register(NAME, _attention)
        AttentionInterface.register(WITH_WINDOWS, _attention)
        AttentionMaskInterface.register(WITH_WINDOWS, _mask)
        # Others get no mask of transformers, which would compare positions on the device to make one, and wait for the result.
        name = WITH_WINDOWS if any(windows_of(model.config.get_text_config())) else NAME
        text_body(model).set_attn_implementation(name)  # a vision tower attends within images, in both directions
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
    if tower_of(model) is None and any("mrope_section" in rope for rope in _rotary_embeddings(config)):
        yield "has positions in several dimensions"
    if getattr(config, "alibi", False):
        yield "has attention scores with a bias by distance"


def pair_cost(model: Any) -> PairCost:
    """Return the computation of one token attending to one, relative to a token's other computation in the layers.

    A forward pass of T tokens takes 2 · parameters · T + 4 · width · pairs of all layers operations.
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
    windows = windows_of(config)
    whole, windowed = (
        2 * num * config.num_attention_heads * head / max(1, sum(sizes))
        for num in (windows.count(None), len(windows) - windows.count(None))
    )
    return PairCost(whole, windowed, max((window for window in windows if window), default=None))


def attention_of(model: Any, device: torch.device) -> str:
    """Return the names of the backends for the layers of a model's packed rows, compared now; raises NoAttentionKernel."""
    config = model.config.get_text_config()
    heads, kv_heads, size, value_size = head_sizes(config)
    dtype = model.get_input_embeddings().weight.dtype
    query, key, value = (
        torch.empty(1, count, 1, width, device=device, dtype=dtype)
        for count, width in ((heads, size), (kv_heads, size), (kv_heads, max(size, value_size)))
    )
    softcap = getattr(config, "attn_logit_softcapping", None)
    has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    names = [
        backends.choose(
            query, key, value, _TOKENS_AT_START, Variant(window, softcap, query[0, :, 0, 0] if has_sinks else None)
        ).name
        for window in dict.fromkeys((None, *windows_of(config)))  # short rows have no window
    ]
    return ", ".join(dict.fromkeys(names))


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
    if layout is None and not packed:
        return body(**tokens, use_cache=False, **experts.given(routing)).last_hidden_state[0]
    if layout is None:
        num_tokens = input_ids.shape[1]
        layout = Layout((Node(0, num_tokens, num_tokens),), np.arange(num_tokens))
    _check_length(body.config.get_text_config(), layout)
    if not packed:
        assert routing is None, "refused when the model was loaded"
        assert embedded is None, "models that read images are computed as packed rows"
        return _read_padded(body, input_ids, layout)
    layout.windows.clear()
    options = {"layout": layout, "shares": shares, **experts.given(routing)}
    hidden = body(**tokens, position_ids=position_ids, use_cache=False, **options).last_hidden_state
    expected = list(windows_of(body.config.get_text_config()))
    if layout.windows != expected:
        raise UnsupportedModel(
            f"{type(body).__name__} called the attention function {len(layout.windows)} times, with the windows "
            f"{_runs(layout.windows)}, for {len(expected)} layers, which have {_runs(expected)}: its rows would not be computed "
            "as the model does; use another model, and report this one"
        )
    return hidden[0]


def _rotary_embeddings(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of the rotary embeddings, of each type of layers where they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(held for held in parameters.values() if isinstance(held, dict))]


def _check_length(config: Any, layout: Layout) -> None:
    """Raise UnsupportedModel for a row whose length changes the rotary embeddings of all rows, and of its own tokens once more."""
    for rope in _rotary_embeddings(config):
        limit: Any = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        if rope.get("rope_type") in LENGTH_DEPENDENT and layout.longest_row > limit:
            raise UnsupportedModel(
                f"a row of {layout.longest_row:,} tokens, and the rotary embeddings of this model ({rope['rope_type']}) are others beyond "
                f"{limit:,}, for all of its tokens: engines computed the first ones without; set data.max_prompt_tokens and "
                "rollout.max_new_tokens to at most that in all"
            )


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


def _attention(  # noqa: PLR0913  the arguments of transformers' interface
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    shares: TokenShares = WHOLE,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' interface asks; without a layout by torch's function, where that is exact."""
    window = sliding_window or (attention_mask if isinstance(attention_mask, int) else None)
    mask = None if isinstance(attention_mask, int) else attention_mask
    if layout is None and window is None and softcap is None and s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415

        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
    num_tokens = 0 if layout is None else layout.num_tokens
    unknown = _not_exact({**options, "attention_mask": mask})
    query, key, value = (shares.by_heads(states, num_tokens) for states in (query, key, value))
    sinks = None if s_aux is None else shares.of_heads(s_aux)
    if sinks is not None and len(sinks) != query.shape[1]:
        unknown.append(f"s_aux = {len(sinks)} sinks for {query.shape[1]} heads")
    is_causal = getattr(module, "is_causal", True)
    if layout is None or unknown or query.shape[0] != 1 or query.shape[2] != num_tokens or not is_causal:
        raise UnsupportedModel(
            f"{type(module).__name__} asks for attention over packed rows with {', '.join(unknown) or list(query.shape)}, "
            f"which would not be exact for {num_tokens} tokens; use another model, and report this one"
        )
    layout.windows.append(window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = backends.attend(query, key, value, layout, scale, Variant(window, softcap or None, sinks))
    return shares.by_tokens(out).transpose(1, 2).contiguous(), None


def _not_exact(options: Mapping[str, Any]) -> list[str]:
    unsupported = {name: value for name, value in options.items() if value is not None and name not in _HARMLESS}
    if unsupported.get("is_causal", False) is True:
        del unsupported["is_causal"]
    return [
        f"{name} = {value}" if isinstance(value, (int, float)) else name for name, value in sorted(unsupported.items())
    ]


def _runs(windows: Sequence[int | None]) -> str:
    """Return windows as text, each with how often it stands there in a row."""
    return ", ".join(f"{window} x {len(list(run))}" for window, run in groupby(windows)) or "none"


def _mask(*args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any) -> Any:
    """Return the mask of a batch; of packed rows only the window of the layers that receive it, None: of all before."""
    if attention_mask is None:
        return local_size
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415

    return sdpa_mask(*args, attention_mask=attention_mask, local_size=local_size, **kwargs)

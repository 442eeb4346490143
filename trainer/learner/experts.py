"""Experts of a layer: as they are published, and replayed as the engine chose them.

Published: one tensor for each matrix of each expert, as engines and model folders name them.

transformers holds all experts of a layer in two tensors, ``experts.gate_up_proj`` [E, 2 I, H] and ``experts.down_proj`` [E, H, I].
The files of most families have ``experts.0.gate_proj.weight`` [I, H], ``experts.0.up_proj.weight`` [I, H] and
``experts.0.down_proj.weight`` [H, I], which is what SGLang and vLLM read: views of parts of the two, so nothing is computed.

In router replay every token is computed with the experts that the engine chose for it.

The router of a layer computes its probabilities as always; the gates are those of the engine's experts instead of the likeliest ones,
normalised as the model's config says. So the sum over experts is that of the policy that sampled, and gradients reach the router
through the gates of these experts (Rollout Routing Replay, arXiv:2510.11370, section 3).

The choices travel as a keyword through the model, as the layout of packed rows does: with gradient checkpointing a layer's second
forward pass gets the same ones as the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.trainer.errors import UnsupportedModel

APART = frozenset({"qwen2_moe", "qwen3_moe", "olmoe"})  # model_type whose files have each expert's tensors apart
WHOLE = frozenset({"gpt_oss"})  # those whose files have them as transformers holds them
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_KEYWORD = "routing"


def check_family(model: nn.Module, family: str) -> None:
    """Raise UnsupportedModel for a model with experts of a family whose files were not compared with what is published."""
    held = [name for name, _ in model.named_parameters() if ".experts." in name]
    if held and family not in APART | WHOLE:
        raise UnsupportedModel(
            f"model_type {family} has experts ({held[0]}): how its files name their tensors is known for "
            f"{', '.join(sorted(APART | WHOLE))} only, and engines would not find what is published; use one of these"
        )


def published(name: str, shape: tuple[int, ...], family: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes under which a parameter is published: those it has, unless it holds the experts of a layer."""
    prefix, kind = _split(name, family)
    if kind is None:
        yield name, shape
        return
    for expert in range(shape[0]):
        for part in ("gate_proj", "up_proj") if kind == _GATE_UP else ("down_proj",):
            rows = shape[1] // 2 if kind == _GATE_UP else shape[1]
            yield f"{prefix}.experts.{expert}.{part}.weight", (rows, shape[2])


def parts(name: str, tensor: Tensor, family: str) -> Iterator[tuple[str, Tensor]]:
    """Yield a whole parameter as it is published, in the order of `published`: views of it."""
    _, kind = _split(name, family)
    names = [part_name for part_name, _ in published(name, tuple(tensor.shape), family)]
    if kind is None:
        yield name, tensor
    elif kind == _DOWN:
        yield from zip(names, tensor.unbind(0), strict=True)
    else:
        halves = (half for expert in tensor.unbind(0) for half in expert.chunk(2, dim=0))
        yield from zip(names, halves, strict=True)


def _split(name: str, family: str) -> tuple[str, str | None]:
    kind = next((kind for kind in (_GATE_UP, _DOWN) if name.endswith(kind)), None) if family in APART else None
    return name.removesuffix(kind or ""), kind


@dataclass(slots=True, eq=False)
class Routing:
    chosen: Tensor  # [T, layers, k], or only this rank's tokens with several shares
    num_tokens: int  # the first so many of these; what follows them is padding
    changed: dict[int, Tensor] = field(default_factory=dict)  # by layer, [tokens] bool: the router's choice is another

    def figures(self) -> Tensor:
        """Return [2] float64: (token, layer) pairs whose router would choose other experts now, and all of them."""
        changed = [layer.sum(dtype=torch.float64) for layer in self.changed.values()]
        total = self.chosen.new_full((), sum(map(len, self.changed.values())), dtype=torch.float64)
        return torch.stack([torch.stack(changed).sum() if changed else torch.zeros_like(total), total])


def install(model: Any) -> None:
    """Let a causal language model compute with the keyword ``routing``; raises UnsupportedModel for unknown routers."""
    routers = [(layer, layer.mlp.gate) for layer in model.base_model.layers if hasattr(layer.mlp, "experts")]
    names = {type(router).__name__ for _, router in routers}
    if names != {"Qwen3MoeTopKRouter"}:
        raise UnsupportedModel(
            f"trainer.router_replay: {type(model).__name__} has routers of {', '.join(sorted(names)) or 'no kind'}, expected those of "
            "Qwen3-MoE; set it to false"
        )
    for layer in model.base_model.layers:
        place = next((at for at, (owner, _) in enumerate(routers) if owner is layer), None)
        # Of all modules in a layer's forward pass, which gradient checkpointing computes twice, attention alone gets the keywords.
        layer.self_attn.register_forward_pre_hook(_Take(place, layer), with_kwargs=True)
    for _, router in routers:
        router.register_forward_hook(_replace)


def given(routing: Routing | None) -> dict[str, Routing]:
    return {} if routing is None else {_KEYWORD: routing}


@dataclass(slots=True, eq=False)
class _Take:
    """Takes the choices out of the keywords of a layer's attention, which does not know them, and gives the layer's router its choices."""

    place: int | None  # among the layers with experts; None: it has none
    layer: nn.Module

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routing = kwargs.get(_KEYWORD)
        if self.place is not None:
            self.layer.mlp.gate.replayed = None if routing is None else (routing, self.place)  # type: ignore[union-attr]
        return args, {name: value for name, value in kwargs.items() if name != _KEYWORD}


def _replace(router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Replace a router's gates [T, k] and experts [T, k] by those of the choices."""
    given, router.replayed = getattr(router, "replayed", None), None
    if given is None:
        return None
    routing, place = given
    logits, gates, routed = output
    chosen = routing.chosen[:, place].long()
    if chosen.shape != routed.shape:
        raise UnsupportedModel(
            f"experts of {tuple(chosen.shape)} (tokens, k) for a layer that computes {tuple(routed.shape)}; report this model"
        )
    replayed_gates = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
    if router.norm_topk_prob:
        replayed_gates = replayed_gates / replayed_gates.sum(-1, keepdim=True)
    with torch.no_grad():
        differs = (routed.sort(-1).values != chosen).any(-1)[: routing.num_tokens]
        routing.changed[place] = differs
    return logits, replayed_gates.to(gates.dtype), chosen

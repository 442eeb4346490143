"""The experts of a layer as they are published: one tensor for each matrix of each expert, as engines and model folders name them.

transformers holds all experts of a layer in two tensors, ``experts.gate_up_proj`` [E, 2 I, H] and ``experts.down_proj`` [E, H, I].
The files of most families have ``experts.0.gate_proj.weight`` [I, H], ``experts.0.up_proj.weight`` [I, H] and
``experts.0.down_proj.weight`` [H, I], which is what SGLang and vLLM read: views of parts of the two, so nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from penstock.trainer.errors import UnsupportedModel

APART = frozenset({"qwen2_moe", "qwen3_moe", "olmoe"})  # model_type whose files have each expert's tensors apart
WHOLE = frozenset({"gpt_oss"})  # those whose files have them as transformers holds them
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def check_family(model: nn.Module, family: str) -> None:
    """Raise UnsupportedModel for a model with experts of a family whose files were not compared with what is published."""
    held = [name for name, _ in model.named_parameters() if ".experts." in name]
    if held and family not in APART | WHOLE:
        raise UnsupportedModel(
            f"model_type {family} has experts ({held[0]}): how its files name their tensors is known for "
            f"{', '.join(sorted(APART | WHOLE))} only, and engines would not find what is published; use one of these"
        )


def published(name: str, shape: tuple[int, ...], family: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes under which a parameter is published: its own, unless it holds the experts of a layer."""
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
    names = [one for one, _ in published(name, tuple(tensor.shape), family)]
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

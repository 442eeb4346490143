"""The adapter for the vision tower of transformers: pixel values → what the decoder receives of an image.

The modules are those of transformers, built from the model's ``vision_config``: the trainer computes an image with the same ones. Only this
file of the engine imports transformers, and only for a model with images.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

import torch

from penstock.rollout_service.embedded_engine.errors import UnsupportedModel
from penstock.rollout_service.embedded_engine.model.model_config import Vision

PREFIX = "visual."  # of the names of the tower's tensors
_KIND = "qwen2_5_vl_vision"  # the model_type of the only tower that is served; files of the hub name none, or that of the whole model
_MODULE_PREFIXES = {"model.visual.": PREFIX, "model.language_model.": "model."}


def hub_name(name: str) -> str:
    """Return a tensor's name as the model hub has it and `save_pretrained` writes it, from that name or the one in transformers' module."""
    for prefix, stored in _MODULE_PREFIXES.items():
        if name.startswith(prefix):
            return stored + name.removeprefix(prefix)
    return name


class VisionTower:
    def __init__(self, vision: Vision, *, device: torch.device) -> None:
        self._module = _build(vision.tower).to(device)
        for parent in self._module.modules():
            for name, parameter in list(parent.named_parameters(recurse=False)):
                empty = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                setattr(parent, name, empty)
        self._device = device

    def features(
        self, tensors: Mapping[str, torch.Tensor], pixel_values: torch.Tensor, grid: tuple[int, int, int]
    ) -> torch.Tensor:
        """Return what stands in place of the embeddings of an image's tokens, [tokens, hidden].

        ``tensors`` are the tower's weights, by their names in `_build`'s module; ``pixel_values`` [patches, values of a patch] float32 are from
        the image processor; ``grid`` is patches in time, height and width.
        """
        dtype = next(iter(tensors.values())).dtype
        pixels = pixel_values.to(device=self._device, dtype=dtype)
        sizes = torch.tensor([grid], dtype=torch.int64, device=self._device)
        options = {"grid_thw": sizes, "return_dict": True}
        return torch.func.functional_call(self._module, dict(tensors), (pixels,), options).pooler_output


def tower_shapes(vision: Vision) -> dict[str, tuple[int, ...]]:
    return {f"{PREFIX}{name}": tuple(tensor.shape) for name, tensor in _on_meta(vision.tower).state_dict().items()}


def tower_tensors(
    tensors: Mapping[str, torch.Tensor], *, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(PREFIX): tensor.to(device=device, dtype=dtype)
        for name, tensor in tensors.items()
        if name.startswith(PREFIX)
    }


@functools.cache
def _on_meta(tower: str) -> torch.nn.Module:
    with torch.device("meta"):
        return _build(tower)


def _build(tower: str) -> torch.nn.Module:
    try:
        from transformers import AutoConfig, AutoModel  # noqa: PLC0415  (seconds to import, and text models need none of it)
    except ImportError as error:
        raise UnsupportedModel(
            f'a model that reads images needs transformers, whose vision tower is used: pip install "penstock[trainer]" ({error})'
        ) from error
    settings = json.loads(tower)
    try:
        module: torch.nn.Module = AutoModel.from_config(AutoConfig.for_model(_KIND, **settings))
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"no vision tower can be built from this vision_config: {error!r}: {settings}"
        ) from error
    return module.eval()

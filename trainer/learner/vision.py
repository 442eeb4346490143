"""Models that read images: their vision tower, and the embeddings of a stream with images.

The parts of images are put where `stream_images` says they are. transformers looks for them by the id of the image token, which a
policy may sample as well: then its count and that of the images differ, and it refuses the row.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from penstock.trainer.algorithm.stream_images import StreamImages
from penstock.trainer.errors import UnsupportedModel


def tower_of(model: Any) -> Any:
    """Return the vision tower of a language model; None of one that reads no images."""
    return getattr(model.base_model, "visual", None)


def is_of_tower(name: str) -> bool:
    return "model.visual." in name


def text_body(model: Any) -> Any:
    return model.base_model if tower_of(model) is None else model.base_model.language_model


def saved_name(model: Any, name: str) -> str:
    """Return the name under which transformers saves a parameter: models that read images have other names in files."""
    if tower_of(model) is None:
        return name
    for own, saved in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(own):
            return saved + name.removeprefix(own)
    return name


def freeze_tower(model: Any) -> None:
    tower = tower_of(model)
    if tower is not None:
        tower.requires_grad_(False)


class ImageEmbeddings:
    def __init__(self, model: Any) -> None:
        self._tower = tower_of(model)
        if type(self._tower).__name__ != "Qwen2_5_VisionTransformerPretrainedModel":
            raise UnsupportedModel(
                f"{type(model).__name__} has the vision tower {type(self._tower).__name__}, expected that of Qwen2.5-VL; use a model of "
                "this family"
            )
        self._words: nn.Module = model.get_input_embeddings()

    def __call__(self, input_ids: Tensor, images: StreamImages | None) -> Tensor:
        """Return the embeddings [1, T, H] of tokens [1, T] with those of the parts of images in their places.

        Ranks that share the tower's weights compute it equally often: without images, they compute one token of nothing.
        """
        words = self._words(input_ids)
        if images is None and not self._is_shared:
            return words
        learns = any(parameter.requires_grad for parameter in self._tower.parameters())
        with contextlib.nullcontext() if learns else torch.no_grad():
            if images is None:
                features = self._features(*self._nothing(words.device))
            else:
                features = self._features(images.pixel_values().to(words.device), images.grid_thw)
        if images is None:
            return words + 0.0 * features.sum().to(words.dtype)
        return words.index_copy(1, images.places, features.index_select(0, images.parts).to(words.dtype)[None])

    @property
    def _is_shared(self) -> bool:
        """Whether ranks must compute the tower together: it learns, or ZeRO-3 has divided it."""
        return any(p.requires_grad or hasattr(p, "ds_id") for p in self._tower.parameters())

    def _features(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        dtype = self._tower.patch_embed.proj.weight.dtype
        found: Tensor = self._tower(pixel_values.to(dtype), grid_thw=grid_thw).pooler_output
        return found

    def _nothing(self, device: torch.device) -> tuple[Tensor, Tensor]:
        config = self._tower.config
        size = config.spatial_merge_size
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return torch.zeros(size * size, values, device=device), torch.tensor([[1, size, size]], device=device)

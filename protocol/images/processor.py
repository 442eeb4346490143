"""What a model's image processor makes of an image: pixel values, grid, tokens and their places in a row.

As `Qwen2VLImageProcessorPil` of transformers 5 (which also serves Qwen2.5-VL), to the last bit, without transformers
and torch, so that worker, engine and trainer call the same function on the same bytes. `ImageProcessor.sha256` names
everything that the result depends on besides the bytes; a row carries it, and who computes the row refuses another one.

A chat template puts one placeholder token where an image is. A row of Penstock holds an image's tokens all: its ids are
those that the model computes, in task, pack, engine and trainer. Only an engine that expands placeholders itself is
sent the `collapsed` ids. A sampled token may have the id of an image's: images are found by position, never by id.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import ImageRefused, UnsupportedModel
from penstock.protocol.groups import MAX_IMAGES, ImageRef, RowImages
from penstock.protocol.images import admission
from penstock.protocol.images.admission import AdmittedImage
from penstock.protocol.model_folder import read_object

FAMILIES = ("qwen2_5_vl",)  # model_type whose processor and positions are compared with transformers' in tests
VISION_MODELS = ("vision_config", "image_token_id", "image_token_index")  # keys of a config.json that reads images
_VERSION = 1  # of what this file computes
_FIXED: dict[str, tuple[Any, ...]] = {  # values of the configuration that are computed here; the first is the default
    "image_processor_type": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil", None),
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), (True,)),
    "resample": (3,),  # bicubic
}
_OF_TOWER = {  # the processor's numbers by their names in vision_config
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}
_MAX_SIZE = 2**31


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    pixel_values: npt.NDArray[np.float32]  # [patches, 3 * temporal_patch_size * patch_size ** 2]
    grid_thw: tuple[int, int, int]  # patches: temporal (1), of the height, of the width
    num_tokens: int  # of the language model


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    image_token_id: int  # of every token that stands for a part of an image
    patch_size: int  # pixels
    temporal_patch_size: int
    merge_size: int  # patches of a token in each direction
    min_pixels: int
    max_pixels: int
    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def sha256(self) -> str:
        """Hash of this configuration, the version of this code, and the versions of the decoders."""
        document = {"kind": "qwen2_vl", "version": _VERSION, **asdict(self), "decoders": admission.decoders()}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def grid_of(self, width: int, height: int) -> tuple[int, int, int]:
        rows, columns = self._resized(width, height)
        return 1, rows // self.patch_size, columns // self.patch_size

    def num_tokens(self, grid_thw: tuple[int, int, int]) -> int:
        """Return how many tokens stand for a grid of patches; raises ImageRefused for one that no image has."""
        frames, rows, columns = grid_thw
        if frames != 1 or min(grid_thw) < 1 or rows % self.merge_size or columns % self.merge_size:
            raise ImageRefused(
                f"a grid of {grid_thw} patches, expected 1 and two multiples of {self.merge_size}: another model's"
            )
        return rows * columns // self.merge_size**2

    def process(self, data: bytes) -> ProcessedImage:
        width, height = admission.size_of(data)
        rows, columns = self._resized(width, height)
        image = np.moveaxis(admission.pixels(data, (columns, rows)), -1, 0)
        scaled = (image.astype(np.float64) * self.rescale_factor).astype(np.float32)
        mean, std = np.array(self.mean, dtype=np.float32), np.array(self.std, dtype=np.float32)
        normalised = ((scaled.T - mean) / std).T
        grid = self.grid_of(width, height)
        return ProcessedImage(self._patches(normalised, grid), grid, self.num_tokens(grid))

    def check(self, ref: ImageRef, processed: ProcessedImage) -> None:
        expected = (processed.grid_thw, processed.num_tokens)
        if (ref.grid_thw, ref.num_tokens) != expected:
            raise ImageRefused(
                f"image {ref.sha256}: the row says {ref.num_tokens} tokens and a grid of {ref.grid_thw}, its bytes "
                f"give {processed.num_tokens}, {processed.grid_thw}: engine and trainer have different image processors"
            )

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Return height and width after the resize: multiples of a token's sides, within the limits of pixels."""
        factor = self.patch_size * self.merge_size
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if rows * columns > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            rows = max(factor, math.floor(height / beta / factor) * factor)
            columns = max(factor, math.floor(width / beta / factor) * factor)
        elif rows * columns < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * beta / factor) * factor
            columns = math.ceil(width * beta / factor) * factor
        return rows, columns

    def _patches(self, image: npt.NDArray[np.float32], grid_thw: tuple[int, int, int]) -> npt.NDArray[np.float32]:
        _, rows, columns = grid_thw
        merge, size = self.merge_size, self.patch_size
        parts = image.reshape(3, rows // merge, merge, size, columns // merge, merge, size)
        parts = np.transpose(parts, (1, 4, 2, 5, 0, 3, 6))[:, :, :, :, :, None]
        parts = np.broadcast_to(parts, (*parts.shape[:5], self.temporal_patch_size, size, size))
        return np.ascontiguousarray(parts.reshape(rows * columns, -1))


def reads_images(config: Mapping[str, Any]) -> bool:
    return any(name in config for name in VISION_MODELS)


def read_processor(folder: Path) -> ImageProcessor | None:
    """Return the image processor of a model folder; None without a config.json, or if the model reads no images.

    Raises UnsupportedModel for a model of another family, and for a configuration that is not computed here.
    """
    if not (folder / "config.json").is_file():
        return None
    config = read_object(folder / "config.json")
    if not reads_images(config):
        return None
    if config.get("model_type") not in FAMILIES:
        raise UnsupportedModel(
            f"{folder}: model_type {config.get('model_type')!r} reads images, and only {', '.join(FAMILIES)} is "
            "supported; use a model of this family, or one that reads text"
        )
    processor_config = _own_config(folder)
    for name, allowed in _FIXED.items():
        _checked(
            name,
            processor_config.get(name, allowed[0]),
            lambda value, of=allowed: value in of,
            repr(allowed[0]),
            folder,
        )
    size = processor_config.get("size") or {}
    numbers = {
        "patch_size": processor_config.get("patch_size", 14),
        "temporal_patch_size": processor_config.get("temporal_patch_size", 2),
        "merge_size": processor_config.get("merge_size", 2),
        "min_pixels": processor_config.get("min_pixels") or size.get("shortest_edge", 56 * 56),
        "max_pixels": processor_config.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
        "image_token_id": config.get("image_token_id"),
    }
    for name, value in numbers.items():
        _checked(name, value, lambda value: type(value) is int and 0 < value < _MAX_SIZE, "a positive number", folder)
    _check_tower(config.get("vision_config"), numbers, folder)
    factor = numbers["patch_size"] * numbers["merge_size"]
    if not factor**2 <= numbers["min_pixels"] <= numbers["max_pixels"]:
        raise UnsupportedModel(
            f"{folder}: min_pixels {numbers['min_pixels']} and max_pixels {numbers['max_pixels']}, expected at least "
            f"the {factor**2} pixels of one token, and no less than min_pixels"
        )
    return ImageProcessor(
        **numbers,
        rescale_factor=_positive("rescale_factor", processor_config.get("rescale_factor", 1 / 255), folder),
        mean=_colours("image_mean", processor_config.get("image_mean", (0.48145466, 0.4578275, 0.40821073)), folder),
        std=_colours("image_std", processor_config.get("image_std", (0.26862954, 0.26130258, 0.27577711)), folder),
    )


def _own_config(folder: Path) -> dict[str, Any]:
    for name, part in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        if (folder / name).is_file():
            config = read_object(folder / name)
            processor_config = config if part is None else config.get(part)
            if isinstance(processor_config, dict):
                return processor_config
    raise UnsupportedModel(
        f"{folder}: no preprocessor_config.json; save the image processor with `save_pretrained` of transformers"
    )


def _checked(name: str, value: Any, is_valid: Callable[[Any], bool], expected: str, folder: Path) -> Any:
    if not is_valid(value):
        raise UnsupportedModel(f"{folder}: {name} = {value!r} of its image processor, expected {expected}")
    return value


def _check_tower(tower: Any, numbers: Mapping[str, int], folder: Path) -> None:
    for key, name in _OF_TOWER.items():
        value = tower.get(name, numbers[key]) if isinstance(tower, dict) else None
        if value != numbers[key]:
            raise UnsupportedModel(
                f"{folder}: the image processor has {key} {numbers[key]}, vision_config of config.json has {name} "
                f"{value!r}; use the processor of this model"
            )


def _positive(name: str, value: Any, folder: Path) -> float:
    def is_valid(number: Any) -> bool:
        return type(number) in (int, float) and math.isfinite(number) and number > 0

    return float(_checked(name, value, is_valid, "a positive number", folder))


def _colours(name: str, value: Any, folder: Path) -> tuple[float, float, float]:
    _checked(
        name, value, lambda colours: isinstance(colours, list | tuple) and len(colours) == 3, "three numbers", folder
    )
    red, green, blue = (_positive(name, number, folder) for number in value)
    return red, green, blue


def expanded(
    token_ids: Sequence[int], images: Sequence[AdmittedImage], processor: ImageProcessor, *, at: int = 0
) -> tuple[list[int], RowImages | None]:
    """Return token ids with each placeholder replaced by its image's tokens, and where they are.

    ``token_ids`` have one placeholder for each image, in order: a rendered prompt, or what follows ``at`` tokens of a
    row, from whose beginning positions count. Raises ImageRefused for more images than a row may have, and for another
    number of placeholders than images, such as where a text holds the placeholder's.
    """
    num_placeholders = sum(token == processor.image_token_id for token in token_ids)
    if num_placeholders != len(images):
        raise ImageRefused(
            f"{num_placeholders} placeholders of images (token {processor.image_token_id}) for {len(images)} images: "
            "the chat template writes one for each image, and no text may contain it"
        )
    if len(images) > MAX_IMAGES:
        raise ImageRefused(f"{len(images)} images, a row may have {MAX_IMAGES}")
    ids: list[int] = []
    refs = []
    remaining = iter(images)
    for token in token_ids:
        if token != processor.image_token_id:
            ids.append(token)
            continue
        image = next(remaining)
        grid = processor.grid_of(image.width, image.height)
        count = processor.num_tokens(grid)
        refs.append(
            ImageRef(
                position=at + len(ids), num_tokens=count, grid_thw=grid, sha256=image.sha256, size_bytes=len(image.data)
            )
        )
        ids += [token] * count
    return ids, RowImages(processor=processor.sha256, refs=tuple(refs)) if refs else None


def collapsed(token_ids: Sequence[int], images: RowImages | None) -> list[int]:
    """Return token ids with one placeholder for each image, as SGLang expects them beside ``image_data``."""
    ids: list[int] = []
    before = 0
    for ref in images.refs if images is not None else ():
        ids += token_ids[before : ref.position + 1]
        before = ref.end
    return [*ids, *token_ids[before:]]


def joined(images: RowImages | None, other: RowImages | None) -> RowImages | None:
    """Return the images of a row that continues with more; raises ImageRefused for too many or other processors."""
    if images is None or other is None:
        return images or other
    if images.processor != other.processor:
        raise ImageRefused(f"images of the processors {images.processor} and {other.processor} in one row")
    if len(images.refs) + len(other.refs) > MAX_IMAGES:
        raise ImageRefused(f"{len(images.refs) + len(other.refs)} images, a row may have {MAX_IMAGES}")
    return RowImages(processor=images.processor, refs=(*images.refs, *other.refs))


def rope_positions(num_tokens: int, images: RowImages | None, merge_size: int) -> npt.NDArray[np.int64]:
    """Return the rotary positions of a row's tokens, [3, num_tokens]: temporal, of the height, of the width.

    As `get_rope_index` of Qwen2.5-VL in transformers 5: a token of text is one further than the one before it, in all
    three. The tokens of an image count rows and columns from where the text ended, and the text continues behind the
    larger of the two. ``num_tokens`` may end inside an image; the position of a token never depends on what follows it.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    token = position = 0
    for ref in images.refs if images is not None else ():
        positions[:, token : ref.position] = np.arange(
            position, position + max(0, min(ref.position, num_tokens) - token)
        )
        if ref.position >= num_tokens:
            return positions
        position += ref.position - token
        rows, columns = ref.grid_thw[1] // merge_size, ref.grid_thw[2] // merge_size
        grid = np.indices((1, rows, columns)).reshape(3, -1) + position
        token = min(ref.end, num_tokens)
        positions[:, ref.position : token] = grid[:, : token - ref.position]
        position += max(rows, columns)
    positions[:, token:] = np.arange(position, position + num_tokens - token)
    return positions


def next_position(num_tokens: int, images: RowImages | None, merge_size: int) -> int:
    """Return the position, in all directions, of the token behind the first ``num_tokens``, which cut no image."""
    skipped = 0
    for ref in images.refs if images is not None else ():
        if ref.end <= num_tokens:
            skipped += ref.num_tokens - max(ref.grid_thw[1], ref.grid_thw[2]) // merge_size
    return num_tokens - skipped

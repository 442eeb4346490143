"""Models that read images: their vision tower, and the embeddings of a stream with images.

The parts of images are put where `batch.number_parts` says they are. transformers looks for them by the id of the image token, which a
policy may sample as well: then its count and that of the images differ, and it refuses the row.

`ImageReader` reads the images of rows: objects that their hash verifies, and what the model's image processor makes of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from penstock.protocol import blob_keys
from penstock.protocol.errors import BlobCorrupt, BlobMissing, ImageRefused, PackError
from penstock.protocol.groups import BlobRef
from penstock.protocol.images.processor import ImageProcessor, ProcessedImage, read_processor
from penstock.protocol.trajectory import Group, Trajectory
from penstock.trainer.algorithm.batch import StoredImage, StreamImages
from penstock.trainer.algorithm.device_copy import copied_together
from penstock.trainer.errors import UnsupportedModel

MAX_PATCH_BYTES = 512 * 1024**2  # of patches that are kept: ten pictures of 1,920 x 1,080 pixels
MAX_FILE_BYTES = 256 * 1024**2  # of objects that are kept: those of several hundred such pictures
_T = TypeVar("_T")


def tower_of(model: Any) -> Any:
    return getattr(model.base_model, "visual", None)


def is_of_tower(name: str) -> bool:
    return "model.visual." in name


def text_body(model: Any) -> Any:
    return model.base_model if tower_of(model) is None else model.base_model.language_model


def saved_name(model: Any, name: str) -> str:
    if tower_of(model) is None:
        return name
    for prefix, saved in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return saved + name.removeprefix(prefix)
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
                (pixel_values,) = copied_together([images.pixel_values()], words.device)
                features = self._features(pixel_values, images.grid_thw)
        if images is None:
            return words + 0.0 * features.sum().to(words.dtype)
        return words.index_copy(1, images.places, features.index_select(0, images.parts).to(words.dtype)[None])

    @property
    def _is_shared(self) -> bool:
        """Whether ranks must compute the tower together: it learns, or ZeRO-3 has divided it."""
        return any(p.requires_grad or hasattr(p, "ds_id") for p in self._tower.parameters())

    def _features(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        dtype = self._tower.patch_embed.proj.weight.dtype
        features: Tensor = self._tower(pixel_values.to(dtype), grid_thw=grid_thw).pooler_output
        return features

    def _nothing(self, device: torch.device) -> tuple[Tensor, Tensor]:
        config = self._tower.config
        size = config.spatial_merge_size
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return torch.zeros(size * size, values, device=device), torch.tensor([[1, size, size]], device=device)


class ImageReader:
    """The images of one model's rows. Thread-safe.

    An image is fetched once, whatever number of rows have it, while it is among the last ones; so are its patches.
    """

    def __init__(self, get: Callable[[BlobRef], bytes], processor: ImageProcessor) -> None:
        self._get, self._processor, self._sha256 = get, processor, processor.sha256
        self._files: _Kept[bytes] = _Kept(MAX_FILE_BYTES, len)
        self._processed: _Kept[ProcessedImage] = _Kept(MAX_PATCH_BYTES, lambda found: found.pixel_values.nbytes)
        self._lock = threading.Lock()

    def check(self, run_id: str, group: Group) -> None:
        """Fetch and decode the images of a group, so that no step fails at one.

        Raises PackError for images that are missing, are not what the rows say of them, or were prepared by another processor.
        BlobStoreUnreachable passes.
        """
        try:
            shared = [row.prefix_len for episode in group.episodes for row in episode.rows]
            for row, known in zip(group.trajectories, shared or [0] * len(group.trajectories), strict=True):
                self._check_tokens(row, known)
                if row.images is not None:
                    images = [StoredImage(run_id, ref) for ref in row.images.refs]
                    self.fetch(images, row.images.processor)
                    for image in images:
                        self.patches(image)
        except (ImageRefused, BlobMissing, BlobCorrupt) as err:
            raise PackError(f"group {group.group_id}: {err}") from None

    def fetch(self, images: Sequence[StoredImage], processor: str) -> None:
        """Fetch images that are not kept; raises ImageRefused for those of another ``processor``, and BlobError."""
        if processor != self._sha256:
            raise ImageRefused(
                f"its images were prepared by the image processor {processor}, this trainer has {self._sha256}: the model's "
                "preprocessor_config.json, or the version of Pillow, is another one; use the same on all machines"
            )
        for image in images:
            self._file(image)

    def patches(self, image: StoredImage) -> npt.NDArray[np.float32]:
        """Return an image's patches, [P, values]; raises ImageRefused if it is not what its row says, and BlobError."""
        ref = image.ref
        with self._lock:
            processed = self._processed.get(ref.sha256)
        if processed is None:
            processed = self._processor.process(self._file(image))
            with self._lock:
                self._processed.put(ref.sha256, processed)
        self._processor.check(ref, processed)
        return processed.pixel_values

    def _check_tokens(self, row: Trajectory, known: int) -> None:
        """Refuse other tokens in the place of an image, and tokens of an image that the row does not name among those not sampled.

        The first ``known`` are those of an earlier row, where some of them were sampled.
        """
        placed = np.zeros(len(row.token_ids), dtype=np.bool_)
        for ref in row.images.refs if row.images is not None else ():
            placed[ref.position : ref.end] = True
        tokens = row.token_ids == self._processor.image_token_id
        if not np.array_equal(placed[known:], (tokens & ~row.loss_mask)[known:]):
            raise ImageRefused(
                f"a row has {np.count_nonzero(tokens & ~row.loss_mask)} tokens of images (id {self._processor.image_token_id}) that were "
                f"not sampled, and names images with {np.count_nonzero(placed)}, expected the same ones"
            )

    def _file(self, image: StoredImage) -> bytes:
        ref = image.ref
        with self._lock:
            kept = self._files.get(ref.sha256)
        if kept is None:
            key = blob_keys.image(image.run_id, ref.sha256)
            kept = self._get(BlobRef(key=key, size_bytes=ref.size_bytes, sha256=ref.sha256))
            if (digest := hashlib.sha256(kept).hexdigest()) != ref.sha256:
                raise ImageRefused(f"{key} has the sha256 {digest}, expected {ref.sha256}: it is another image")
            with self._lock:
                self._files.put(ref.sha256, kept)
        return kept


class _Kept(Generic[_T]):
    def __init__(self, most: int, size: Callable[[_T], int]) -> None:
        self._most, self._size = most, size
        self._values: OrderedDict[str, _T] = OrderedDict()
        self._total = 0

    def get(self, name: str) -> _T | None:
        if name in self._values:
            self._values.move_to_end(name)
        return self._values.get(name)

    def put(self, name: str, value: _T) -> None:
        if name in self._values:
            return
        self._values[name] = value
        self._total += self._size(value)
        while self._total > self._most and len(self._values) > 1:
            _, dropped = self._values.popitem(last=False)
            self._total -= self._size(dropped)


def image_reader(get: Callable[[BlobRef], bytes], model_folder: Path) -> ImageReader | None:
    processor = read_processor(model_folder)
    return None if processor is None else ImageReader(get, processor)

"""The images of a run in S3, and the processor of the worker's model that every task and every tool's image is held against.

An image is read once and kept, since the tasks of a group and of later epochs show the same ones; memory is bounded. What a task says
of an image is compared with its bytes before anything is sampled: engine and trainer must compute the same prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from pathlib import Path

from penstock.protocol import blob_keys
from penstock.protocol.errors import BlobCorrupt, BlobMissing, ImageRefused, UnsupportedModel
from penstock.protocol.groups import BlobRef, ImageRef, RowImages, Task
from penstock.protocol.images import admission
from penstock.protocol.images.admission import AdmittedImage
from penstock.protocol.images.processor import ImageProcessor, read_processor
from penstock.protocol.transport.blobs import Blobs
from penstock.rollout_service.errors import TaskRefused
from penstock.rollout_service.retry import retry

_MAX_BYTES = 256 * 1024**2  # of images that are kept, as they are stored


class RunImages:
    """Reads and stores the images of a run, for one worker. For one event loop."""

    def __init__(self, blobs: Blobs, run_id: str, *, max_bytes: int = _MAX_BYTES) -> None:
        self.num_bytes = 0
        self._blobs = blobs
        self._run_id = run_id
        self._max_bytes = max_bytes
        self._folder = Path()
        self._processor: ImageProcessor | None = None
        self._kept: OrderedDict[str, bytes] = OrderedDict()  # by sha256, used longest ago first
        self._admitted: dict[str, AdmittedImage] = {}  # of those, by the hash of what was sent

    def use_model(self, folder: Path) -> None:
        self._folder, self._processor = folder, None

    async def processor(self) -> ImageProcessor:
        if self._processor is None:
            try:
                self._processor = await asyncio.to_thread(read_processor, self._folder)
            except UnsupportedModel as err:
                raise ImageRefused(str(err)) from None
            if self._processor is None:
                raise ImageRefused(f"the model in {self._folder} reads text alone; use one that reads images")
        return self._processor

    async def of_task(self, task: Task) -> dict[str, bytes]:
        """Return the images of a task by their sha256.

        Raises TaskRefused if they were placed by another processor, are missing or damaged, or are others than the task says.
        """
        if task.images is None:
            return {}
        try:
            await self._check(task.images)
            return {ref.sha256: await self.read(ref) for ref in task.images.refs}
        except ImageRefused as err:
            raise TaskRefused("images_refused", f"{task.group_id}: {err}") from None
        except (BlobMissing, BlobCorrupt) as err:
            raise TaskRefused("image_missing", f"{task.group_id}: {err}") from None

    async def _check(self, images: RowImages) -> None:
        processor = await self.processor()
        if images.processor != processor.sha256:
            raise ImageRefused(
                f"its images were placed by image processor {images.processor[:12]}, and this worker has {processor.sha256[:12]}: give "
                "trainer and worker the same model folder and the same versions of Pillow, libjpeg and libwebp"
            )

    async def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of an image of this run, checked against what its row says of it.

        Raises ImageRefused, BlobMissing or BlobCorrupt; waits while S3 is unreachable.
        """
        data = self._kept.get(ref.sha256)
        if data is None:
            blob = BlobRef(key=blob_keys.image(self._run_id, ref.sha256), size_bytes=ref.size_bytes, sha256=ref.sha256)
            data = await retry(lambda: asyncio.to_thread(self._blobs.get, blob), f"read image {ref.sha256}")
        self._keep(ref.sha256, data)
        processor = await self.processor()
        grid = processor.grid_of(*await asyncio.to_thread(admission.size_of, data))
        if (ref.size_bytes, ref.grid_thw, ref.num_tokens) != (len(data), grid, processor.num_tokens(grid)):
            raise ImageRefused(
                f"image {ref.sha256}: the row says {ref.size_bytes} bytes, a grid of {ref.grid_thw} and {ref.num_tokens} tokens; this "
                f"worker finds {len(data)} bytes, {grid} and {processor.num_tokens(grid)}"
            )
        return data

    async def admit(self, image: bytes | AdmittedImage) -> AdmittedImage:
        if isinstance(image, AdmittedImage):
            return image
        name = hashlib.sha256(image).hexdigest()
        admitted = self._admitted.pop(name, None)
        if admitted is None or admitted.sha256 not in self._kept:
            admitted = await asyncio.to_thread(admission.admit, image)
            key = blob_keys.image(self._run_id, admitted.sha256)
            await retry(
                lambda: asyncio.to_thread(self._blobs.put, key, admitted.data), f"store image {admitted.sha256}"
            )
        self._keep(admitted.sha256, admitted.data)
        self._admitted[name] = admitted
        self._admitted = {
            sent: stored_image for sent, stored_image in self._admitted.items() if stored_image.sha256 in self._kept
        }
        return admitted

    def _keep(self, sha256: str, data: bytes) -> None:
        self.num_bytes += len(data) - len(self._kept.pop(sha256, b""))
        self._kept[sha256] = data
        while self.num_bytes > self._max_bytes and len(self._kept) > 1:
            self.num_bytes -= len(self._kept.popitem(last=False)[1])

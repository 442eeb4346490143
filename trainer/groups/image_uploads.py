"""Stores the images of tasks, each once, before the message that names them."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.protocol import blob_keys
from penstock.protocol.images.admission import AdmittedImage
from penstock.protocol.transport.blobs import Blobs


class ImageUploads:
    """The images of a run that this process has stored; for one thread."""

    def __init__(self, blobs: Blobs, run_id: str) -> None:
        self._blobs, self._run_id = blobs, run_id
        self._stored: set[str] = set()

    def store(self, images: Iterable[AdmittedImage]) -> None:
        """Store images that are not stored yet; raises BlobError. Their keys are their hashes, so that a repetition changes nothing."""
        for image in images:
            if image.sha256 not in self._stored:
                self._blobs.put(blob_keys.image(self._run_id, image.sha256), image.data)
                self._stored.add(image.sha256)

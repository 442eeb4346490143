"""What a published version consists of: the manifest, written last, naming every file with its hash.

This form carries full safetensors. Sparse patches against the last committed version get their own
``kind`` beside ``full``; the manifest is the place where a reader learns which it is.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationError

from protocol.errors import MalformedFact
from protocol.facts import BlobRef, Count, Identifier, Wire


class ModelFile(Wire):
    """One file of a Hugging Face model folder and the object that holds it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # no slash: it becomes a file name
    blob: BlobRef


class WeightsManifest(Wire):
    """One complete version: ``shards`` are safetensors, ``model_files`` config and tokenizer."""

    schema_tag: Literal["weights_manifest.v1"] = "weights_manifest.v1"
    kind: Literal["full"] = "full"
    run_id: Identifier
    version: Count
    step: Count
    dtype: str
    num_parameters: Count
    shards: Annotated[tuple[ModelFile, ...], Field(min_length=1)]
    model_files: tuple[ModelFile, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.blob.size_bytes for shard in self.shards)

    def to_json(self) -> bytes:
        """Return the manifest as JSON, fields in a fixed order."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WeightsManifest:
        """Read a manifest; raises MalformedFact with the first offending field."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as err:
            first = err.errors()[0]
            raise MalformedFact(
                f"weights manifest: {'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"
            ) from None

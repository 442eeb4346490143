"""A run's groups with other rewards: the input of a run that trains without generating.

`penstock rescore` writes it, the trainer reads it (``data.from_run``). It has an id like a run's, and all its
objects are below ``runs/<id>/``: copies of the packs, byte for byte, pieces with the groups and their new rewards in
the order in which the source run trained them, and last the input itself, whose key contains its sha256. A run that
trains on it writes a marker there: its record references these packs, and it has no copies of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from penstock.protocol import blob_keys
from penstock.protocol.errors import RecordBroken
from penstock.protocol.facts import BlobRef, Count, Fact, Finite, Identifier, decode
from penstock.protocol.record.lineage import RecordedGroup
from penstock.protocol.transport.blobs import Blobs


class RescoredPiece(Fact):
    """Some groups, in order; their ``use`` is 1, and ``pack`` is the number in ``packs``."""

    schema_tag = "rescored_piece.v1"
    packs: tuple[BlobRef, ...]
    groups: Annotated[tuple[RecordedGroup, ...], Field(min_length=1)]


class RescoredInput(Fact):
    """The index of a rescored input, written last, once."""

    schema_tag = "rescored_input.v1"
    run_id: Identifier  # of the input
    source: Identifier  # the run it was made from
    source_record: BlobRef  # its last chapter
    source_version: Count  # at the end of that
    reward: str | None  # name of the reward that scored; None: the stored rewards and parts
    weights: dict[str, Finite] = Field(default={})  # of parts; none: the reward as scored
    temperature: Annotated[float, Field(gt=0)]  # that every group was sampled at
    pieces: Annotated[tuple[BlobRef, ...], Field(min_length=1)]
    num_groups: Count
    left_out: dict[Identifier, str] = Field(default={})  # groups without a score, and why


def find_input(name: str, blobs: Blobs) -> tuple[RescoredInput, str]:
    """Return an input by its id, and its sha256.

    Raises RecordBroken when there is none, BlobCorrupt for an altered one.
    """
    prefix = blob_keys.rescored_prefix(name)
    stats = [stat for stat in blobs.list(prefix) if blob_keys.rescored_sha256(name, stat.key)]
    if len(stats) != 1:
        raise RecordBroken(
            f"{len(stats)} rescored inputs are called {name} in bucket {blobs.bucket}; make one with: "
            f"penstock rescore RUN --reward NAME --into {name}"
        )
    sha256 = blob_keys.rescored_sha256(name, stats[0].key)
    data = blobs.get(BlobRef(key=stats[0].key, size_bytes=stats[0].size_bytes, sha256=sha256))
    return decode(data, RescoredInput), sha256


def pieces(of: RescoredInput, blobs: Blobs) -> Iterator[RescoredPiece]:
    """Read an input piece by piece; raises BlobMissing, BlobCorrupt or WireError."""
    for reference in of.pieces:
        yield decode(blobs.get(reference), RescoredPiece)


def mark_use(name: str, run_id: str, blobs: Blobs) -> None:
    key = blob_keys.input_users_prefix(name) + run_id
    if not blobs.exists(key):
        blobs.put(key, b"")


def users(name: str, blobs: Blobs) -> list[str]:
    """Return the other runs that train on this input and still have a record."""
    prefix = blob_keys.input_users_prefix(name)
    marked = sorted(stat.key.removeprefix(prefix) for stat in blobs.list(prefix))
    return [run for run in marked if run != name and any(blobs.list(blob_keys.lineage_prefix(run)))]


def packs_of_input(name: str, blobs: Blobs) -> set[str]:
    if not any(blob_keys.rescored_sha256(name, stat.key) for stat in blobs.list(blob_keys.rescored_prefix(name))):
        return set()
    return {pack.key for piece in pieces(find_input(name, blobs)[0], blobs) for pack in piece.packs}

"""The texts of a generated pack, fetched and verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from penstock.protocol.errors import PackError
from penstock.protocol.facts import BlobRef, GeneratedGroup
from penstock.protocol.packs import group_pack, pack_bounds
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.protocol.transport.blobs import Blobs


def fetch(blobs: Blobs, pack: BlobRef, groups: Sequence[GeneratedGroup]) -> list[GroupTexts]:
    """Return the texts of the groups, in order; token columns are never read.

    Raises BlobMissing, BlobCorrupt or BlobStoreUnreachable for the object, and PackError when it
    differs from the message.
    """
    pack_bounds.check_message(pack, groups)
    try:
        texts = group_pack.decode_texts(blobs.get(pack), [group.row_group for group in groups], described=groups)
    except PackError as err:
        raise PackError(f"{pack.key}: {err}") from None
    return [
        dataclasses.replace(text, completion_tokens=group.completion_tokens)
        for group, text in zip(groups, texts, strict=True)
    ]

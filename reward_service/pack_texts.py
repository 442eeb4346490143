"""The texts of a generated pack, fetched and verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from penstock.protocol import group_pack
from penstock.protocol.errors import PackError
from penstock.protocol.facts import BlobRef, GeneratedGroup
from penstock.protocol.group_pack import GroupTexts
from penstock.protocol.transport.blobs import Blobs


def fetch(blobs: Blobs, pack: BlobRef, groups: Sequence[GeneratedGroup]) -> list[GroupTexts]:
    """Return the texts of the groups, in order; token columns are never read.

    Raises BlobMissing, BlobCorrupt or BlobStoreUnreachable for the object, and PackError when it
    differs from the message.
    """
    texts = group_pack.decode_texts(blobs.get(pack), [group.row_group for group in groups])
    for group, text in zip(groups, texts, strict=True):
        if text.group_id != group.group_id:
            raise PackError(
                f"{pack.key}: row group {group.row_group} holds group {text.group_id}, the message says {group.group_id}"
            )
        if len(text.completions) != len(group.completion_tokens):
            raise PackError(
                f"{pack.key}: group {group.group_id} has {len(text.completions)} completions, the message says "
                f"{len(group.completion_tokens)}"
            )
        if text.reward.name != group.reward_name:
            raise PackError(
                f"{pack.key}: group {group.group_id} asks for reward {text.reward.name}, the message for {group.reward_name}"
            )
    return [
        dataclasses.replace(text, completion_tokens=group.completion_tokens)
        for group, text in zip(groups, texts, strict=True)
    ]

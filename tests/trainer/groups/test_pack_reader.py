"""What a pack must not say about the versions that sampled its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import pytest
from tests.protocol.hostile_packs import honest

from penstock.protocol.errors import UnpublishedVersion
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.groups.pack_reader import PackReader


def test_a_pack_that_names_a_version_that_was_never_published_is_refused() -> None:
    """Every token's version must be one that workers can have served; the first other one is in the error."""
    good = honest()
    pack = BlobRef(key="runs/r/p", sha256=hashlib.sha256(good.data).hexdigest(), size_bytes=len(good.data))
    num = len(good.described.completion_tokens)
    scored = ScoredGroup(generated=good.described, rewards=(0.0,) * num, scorer="a")
    asked: list[set[PolicyVersion]] = []
    unpublished: set[PolicyVersion] = set()

    def never_published(versions: Iterable[PolicyVersion]) -> list[PolicyVersion]:
        asked.append(set(versions))
        return sorted(unpublished.intersection(asked[-1]))

    reader = PackReader(lambda _: good.data, never_published=never_published)
    (group,) = reader.read(pack, [scored], [good.promise])
    assert asked == [{run.version for row in group.trajectories for run in row.version_runs}]
    unpublished.add(max(asked[0]))
    with pytest.raises(UnpublishedVersion, match=rf"runs/r/p: group {group.group_id} names version {max(asked[0])}"):
        reader.read(pack, [scored], [good.promise])

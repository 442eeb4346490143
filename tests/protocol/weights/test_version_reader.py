"""What a reader of versions keeps in memory while it follows a run."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.protocol.weights.published_weights import PublishedWeights, changed_state, held_of, random_state

from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights import version_reader
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.version_reader import WeightReader


def test_a_mirror_that_follows_every_version_keeps_a_bounded_number_of_manifests() -> None:
    """Each is read once, the old ones are forgotten, and a plan over more versions than are kept is still found."""
    rng = np.random.default_rng(0)
    run = PublishedWeights()
    run.publish_anchor(random_state(rng))
    objects: Any = run
    reader, empty = WeightReader(objects, run.run_id), WeightReader(objects, run.run_id)
    num_versions = version_reader._MANIFESTS_KEPT + 20
    held: VersionManifest | None = None
    refs: list[BlobRef] = []
    for number in range(num_versions):
        if number:
            run.publish(changed_state(run.state, rng, 0.01))
        assert run.head_ref is not None
        refs.append(run.head_ref)
        target = reader.manifest(run.head_ref, PolicyVersion(number))
        assert reader.plan(target, held and held_of(held)).target is target
        held = target
    assert run.read == [ref.key for ref in refs]
    reader.manifest(refs[-1], PolicyVersion(num_versions - 1))
    assert len(run.read) == num_versions
    reader.manifest(refs[0], PolicyVersion(0))
    assert len(run.read) == num_versions + 1
    whole = empty.plan(empty.manifest(refs[-1], PolicyVersion(num_versions - 1)), None)
    assert len(whole.manifests) == num_versions

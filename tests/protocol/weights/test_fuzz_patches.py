"""Ten thousand hostile segments, manifests, layouts and adapters; `make proof NAME=patches` tries twenty times as many."""

from __future__ import annotations

import resource

from tests.rigs.fuzz_patches import Fuzzer


def test_hostile_patches_are_refused_or_harmless():
    """Only the named errors, nothing outside the bucket, no byte the hash would not catch, no large allocation."""
    fuzzer = Fuzzer(seed=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counters = fuzzer.go(10_000)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert counters.num_mutations == 10_000
    assert counters.outcomes["segment: refused"] > 3500
    assert counters.outcomes["segment: applied, refused by the bucket's hash"] > 200
    assert counters.outcomes["manifest: refused"] > 1000
    assert counters.outcomes["layout: refused"] > 1000
    assert counters.outcomes["adapter: refused"] > 700
    assert counters.peak_bytes < 4 * 2**20, "the largest bucket has 0.2 MiB"
    assert grown_kib < 64 * 2**10, "a frame that unfolds to 64 MiB was unfolded"

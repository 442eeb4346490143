"""The short form of `make fuzz-agents`: random agents, and planted errors that it finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.rigs.fuzz_agents.model import Recorded, _record_of
from tests.rigs.fuzz_agents.run import Fuzzer

from penstock.agents.proxy.rows import TreeRow
from penstock.protocol.trajectory import Trajectory
from penstock.protocol.versions import PolicyVersion, VersionRun


@pytest.mark.parametrize(("engine", "requests"), [("function", 120), ("embedded", 40)])
async def test_random_agents_train_only_what_was_sampled(tmp_path: Path, engine: str, requests: int) -> None:
    fuzzer = Fuzzer(tmp_path, engine=engine, seed=1)
    try:
        await fuzzer.run(requests)
    finally:
        fuzzer.stop()
    assert fuzzer.findings.problems == []
    assert fuzzer.findings.trained_tokens > requests
    assert fuzzer.counts["turns"] > requests // 2


@pytest.mark.parametrize("plant", ["prompt", "row"])
async def test_a_planted_rendering_of_the_history_is_found(tmp_path: Path, plant: str) -> None:
    fuzzer = Fuzzer(tmp_path, engine="function", seed=0, plant=plant, templates=("qwen25", "smollm2"))
    await fuzzer.run(120)
    assert fuzzer.findings.problems


def test_of_two_answers_that_begin_alike_each_is_found() -> None:
    recorded = Recorded()
    recorded.add([1, 2], [7, 8, 9], [-0.5, -0.25, -1.0])
    recorded.add([1, 2], [7], [-0.5])
    for sampled in reversed(recorded.by_prompt[np.asarray([1, 2], dtype=np.int32).tobytes()]):
        count = len(sampled.token_ids)
        trajectory = Trajectory(
            np.asarray([1, 2, *sampled.token_ids], dtype=np.int32), np.asarray([False, False] + [True] * count),
            np.asarray([0, 0, *sampled.logprobs], dtype=np.float32), (VersionRun(PolicyVersion(3), 2, 2 + count),), "stop", "",
        )  # fmt: skip
        found = _record_of(TreeRow(trajectory, ()), 2, 2 + count, recorded)
        assert found is sampled
        found.num_trained = count

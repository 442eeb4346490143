"""The short form of `make fuzz-agents`: random agents, and planted errors that it finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.fuzz_agents.run import Fuzzer


@pytest.mark.parametrize(("engine", "requests"), [("function", 300), ("embedded", 60)])
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

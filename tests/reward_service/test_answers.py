"""The table of answers (tests/data/answers.jsonl): what every built-in reward says of them, with a source or a reason each."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protocol.facts import RewardRequest
from protocol.group_pack import GroupTexts
from reward_service.built_in import BUILT_INS, Graders
from reward_service.grader_pool import GraderPool
from reward_service.scores import GroupScores

TABLE: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "answers.jsonl").read_text().splitlines()
]


@pytest.fixture
async def graders() -> AsyncIterator[Graders]:
    """Real grader processes, one of each kind."""
    math, patterns = GraderPool(1, cpu_s=2.0), GraderPool(1, cpu_s=0.3, kind="pattern")
    yield Graders(math, patterns, None)
    await math.close()
    await patterns.close()


def test_the_table_is_large_and_gives_reasons() -> None:
    """At least 200 different answers, each with its reason, for every built-in reward but the one that runs programs."""
    assert len({json.dumps(row, sort_keys=True) for row in TABLE}) == len(TABLE) >= 200
    assert all(row["why"] for row in TABLE)
    assert {row["reward"] for row in TABLE} == BUILT_INS.keys() - {"code", "format"}
    assert all(Counter(row["score"] > 0 for row in TABLE).values())


async def test_every_answer_gets_its_verdict(graders: Graders) -> None:
    """Right is right and wrong is wrong, whatever an answer costs: exhausted graders are bounded and say wrong."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in TABLE:
        groups.setdefault(json.dumps([row["reward"], row.get("parameters", {})]), []).append(row)
    found = await asyncio.gather(*(_differing(*json.loads(key), rows, graders) for key, rows in groups.items()))
    wrong = [one for some in found for one in some]
    assert not wrong, "\n".join(map(str, wrong))


async def _differing(
    name: str, given: dict[str, Any], rows: list[dict[str, Any]], graders: Graders
) -> list[tuple[Any, ...]]:
    built_in = BUILT_INS[name]
    scorer = built_in.make(built_in.parameters.model_validate_json(json.dumps(given), strict=True), graders)
    assert scorer is not None
    outcomes = await scorer.score([_group(name, row) for row in rows], attempt=1)
    scores = [one.rewards[0] if isinstance(one, GroupScores) else repr(one) for one in outcomes]
    return [
        (name, given, row["answer"][:80], row["truth"], f"expected {row['score']}, got {score}", row["why"])
        for row, score in zip(rows, scores, strict=True)
        if score != row["score"]
    ]


def _group(name: str, row: dict[str, Any]) -> GroupTexts:
    truth = None if row["truth"] is None else json.dumps(row["truth"])
    return GroupTexts("g", "", (row["answer"],), ("stop",), RewardRequest(name=name, ground_truth=truth))

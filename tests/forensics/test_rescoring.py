"""Stored parts with new weights: by the rule of the reward, or as a plain sum."""

from __future__ import annotations

from typing import Any

import pytest
from tests.groups import make_group

from penstock.forensics.rescore import GroupToScore, Rule, reweight, score_again
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.protocol.record.lineage import RecordedGroup

PARTS = {"correct": {"reward": "numeric"}, "form": {"reward": "tags", "weight": 0.2, "needs": 1.0, "otherwise": -0.5}}
DEFINE = RewardSettings.model_validate({"define": {"mine": {"parts": PARTS}}}).define
GROUP = make_group("g", size=3)
COLUMNS = {"correct": (1.0, 0.0, 1.0), "form": (1.0, 1.0, 0.0), "form.x": (7.0, 7.0, 7.0)}


def scored(scorer: str) -> ScoredGroup:
    return ScoredGroup(generated=GROUP.summary(0), rewards=(1.2, 0.2, -0.5), parts=COLUMNS, scorer=scorer)


def test_other_weights_leave_gates_and_the_other_weights_of_a_made_reward() -> None:
    """Only the named weights change; closed gates remain closed; an unknown part is refused by name."""
    found = reweight(scored("mine(numeric, tags)"), {"form": 0.5}, DEFINE)
    assert isinstance(found, ScoredGroup)
    assert found.rewards == pytest.approx((1.5, 0.5, -0.5))
    assert found.scorer == "mine(numeric, tags) weighed form=0.5"
    assert found.parts == COLUMNS
    assert (
        reweight(scored("mine(numeric, tags)"), {"fame": 1.0}, DEFINE)
        == "the reward has no part fame; its parts are correct, form"
    )


def test_any_other_reward_is_the_plain_sum_of_the_parts_that_are_named() -> None:
    for scorer, weights, expected in (
        ("judge@2", {"form": 0.5}, (0.5, 0.5, 0.0)),
        ("mine(numeric, tags)", {"reward": 1.0, "correct": 1.0}, (2.2, 0.2, 0.5)),
    ):
        found = reweight(scored(scorer), weights, DEFINE)
        assert isinstance(found, ScoredGroup)
        assert found.rewards == pytest.approx(expected)
    assert (
        reweight(scored("judge@2"), {"fame": 1.0}, DEFINE)
        == "it has no part fame; it has correct, form, form.x, reward"
    )


def test_a_length_reward_gets_the_lengths_of_stored_completions() -> None:
    member = RecordedGroup(prompt=0, pack=0, scored=scored("mine(numeric, tags)"))
    text = GroupTexts("g", "p", ("a", "b", "c"), ("stop",) * 3, GROUP.reward)
    sent: list[dict[str, Any]] = []

    class Service:
        def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
            sent.append(body or {})
            score = {"score": 1.0, "parts": {}}
            return {"results": [{"group_id": "g", "scores": [score] * 3, "error": None, "scorer": "overlong"}]}

    group = GroupToScore(member, BlobRef(key="k", size_bytes=1, sha256="0" * 64), text)
    found = score_again([group], Rule("overlong"), Service())
    assert sent[0]["groups"][0]["completion_tokens"] == list(member.scored.generated.completion_tokens)
    assert isinstance(found["g"], ScoredGroup)

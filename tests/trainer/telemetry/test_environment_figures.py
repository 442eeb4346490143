"""What a step reports of each environment: rewards, lengths, ends, failures and versions of its episodes."""

from __future__ import annotations

from dataclasses import replace

from tests.episodes import forked, group_of, one_turn
from tests.groups import make_group

from penstock.protocol.episode import Episode
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.telemetry.metrics import environment_metrics

PACK = BlobRef(key="k", size_bytes=1, sha256="0" * 64)


def ready(number: int, rewards: tuple[float, ...], *episodes: Episode) -> ReadyGroup:
    group_id = f"e0.p{number}.a0"
    own = [replace(episode, group_id=group_id, episode_id=f"{group_id}#{episode.index}") for episode in episodes]
    group = group_of(*own) if own else make_group(group_id, size=len(rewards))
    scored = ScoredGroup(generated=group.summary(number), rewards=rewards, scorer="environment")
    return ReadyGroup(scored, PACK, group)


def test_each_environment_is_reported_by_itself() -> None:
    lake = replace(one_turn(1, status="truncated"), environment="lake", environment_version="", attempt=2)
    batch = [
        ready(0, (1.0, 0.0), forked(0), one_turn(1)),
        ready(1, (0.5, -0.5), replace(lake, index=0), replace(lake, index=1, attempt=0, status="done")),
        ready(2, (9.0, 9.0)),
    ]
    found = environment_metrics(batch)
    assert found == {
        "lake": {
            "episodes": 2, "reward_mean": 0.0, "turns_mean": 1.0, "tokens_mean": 2.0, "cut_share": 0.5, "failures": 2,
        },
        "lookup": {
            "episodes": 2, "reward_mean": 0.5, "turns_mean": 2.5, "tokens_mean": 4.5, "cut_share": 0.0, "failures": 0,
            "versions": {"1.2": 2},
        },
    }  # fmt: skip
    assert environment_metrics(batch[2:]) == {}

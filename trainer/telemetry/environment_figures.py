"""What a step reports of each environment whose episodes it trains on; pure.

| name            | unit     | means                                                                             |
|-----------------|----------|-----------------------------------------------------------------------------------|
| `episodes`      |          | of this step                                                                      |
| `reward_mean`   |          | over its episodes                                                                 |
| `turns_mean`    |          | answers of the policy that are trained, of one episode                            |
| `tokens_mean`   | tokens   | sampled tokens of one episode                                                     |
| `cut_share`     | share    | ended by a limit instead of by the environment                                    |
| `failures`      |          | attempts at these episodes that failed before; each was restarted with its seed |
| `versions`      | episodes | by version of the environment's rules, where it has versions                      |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from penstock.protocol.episode import Episode
from penstock.trainer.learner.step_plan import ReadyGroup


def environment_figures(batch: Sequence[ReadyGroup]) -> dict[str, dict[str, Any]]:
    """Return the figures by environment; of trajectories that are no episodes there are none."""
    found: dict[str, list[tuple[Episode, float, int]]] = {}
    for group in batch:
        trained = group.trained
        episodes = group.group.episodes[: len(trained.rewards)]
        for one in zip(episodes, trained.rewards, trained.lengths, strict=False):
            found.setdefault(one[0].environment, []).append(one)
    return {name: _figures(episodes) for name, episodes in sorted(found.items())}


def _figures(played: Sequence[tuple[Episode, float, int]]) -> dict[str, Any]:
    episodes = [episode for episode, _, _ in played]
    versions = Counter(one.environment_version for one in episodes if one.environment_version)
    return {
        "episodes": len(episodes),
        "reward_mean": fmean(reward for _, reward, _ in played),
        "turns_mean": fmean(len(one.turns) for one in episodes),
        "tokens_mean": fmean(length for _, _, length in played),
        "cut_share": fmean(one.status != "done" for one in episodes),
        "failures": sum(one.attempt for one in episodes),
        **({"versions": dict(sorted(versions.items()))} if versions else {}),
    }

"""The groups of a simulated run: prompts without a text, and the facts about what was generated."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.groups import GeneratedGroup, RewardRequest, ScoredGroup
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.data.dataset import Prompt


class SimulatedPrompts:
    """Prompts without a text, as many as a run may need."""

    fingerprint = "simulated"

    def __init__(self, num: int) -> None:
        self._num = num
        self.num_tokens = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, (index,), "", RewardRequest(name="simulated"))


def scored_group(group_id: str, lengths: Sequence[int], oldest: PolicyVersion, newest: PolicyVersion) -> ScoredGroup:
    """Return the fact of a group; its values are right by construction, and checking them takes a tenth of a run."""
    generated = GeneratedGroup.model_construct(
        group_id=group_id, row_group=0, split="train", attempt=0, reward_name="simulated", issued_version=oldest,
        oldest_version=oldest, newest_version=newest, prompt_tokens=1, completion_tokens=tuple(lengths),
        finish_reasons=("stop",) * len(lengths),
    )  # fmt: skip
    return ScoredGroup.model_construct(generated=generated, rewards=(1.0,) * len(lengths), scorer="simulated")

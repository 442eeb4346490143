"""The record of what a policy sampled: trajectories, and the group of all trajectories of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import PackError
from penstock.protocol.facts import FinishReason, GeneratedGroup, RewardRequest, Split
from penstock.protocol.versions import PolicyVersion, VersionRun, newest, oldest

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """Prompt and completion of one sample as token ids; text is never tokenised again.

    All per-token arrays have the same length T; checked on construction (PackError).
    """

    token_ids: Int32s  # [T] int32, prompt then completion
    loss_mask: Bools  # [T] bool, True where the policy sampled the token
    behaviour_logprobs: Float32s  # [T] float32, as the engine reported; 0.0 where loss_mask is False
    version_runs: tuple[VersionRun, ...]  # cover exactly the tokens with loss_mask True
    finish_reason: FinishReason
    completion_text: str
    is_baseline: bool = False  # sampled greedily, to be scored and compared with, never trained on

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if len(self.loss_mask) != length or len(self.behaviour_logprobs) != length:
            raise PackError(
                f"per-token arrays differ: {length} token ids, {len(self.loss_mask)} mask entries, "
                f"{len(self.behaviour_logprobs)} behaviour_logprobs"
            )
        if not np.isfinite(self.behaviour_logprobs).all():
            raise PackError("behaviour_logprobs hold NaN or infinity; the engine's answer cannot be used")
        inside = all(0 <= run.start < run.end <= length for run in self.version_runs)
        num_sampled = np.count_nonzero(self.loss_mask)
        if not inside or self.num_completion_tokens != num_sampled:
            raise PackError(
                f"version runs {list(self.version_runs)} do not cover the {num_sampled} sampled tokens of a trajectory "
                f"of {length}"
            )

    @property
    def num_completion_tokens(self) -> int:
        """Number of sampled tokens; the version runs cover exactly those."""
        return sum(run.end - run.start for run in self.version_runs)

    @property
    def oldest_version(self) -> PolicyVersion:
        """Oldest version among the sampled tokens; staleness is measured from it."""
        return oldest(self.version_runs)

    @property
    def newest_version(self) -> PolicyVersion:
        """Newest version among the sampled tokens."""
        return newest(self.version_runs)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All trajectories of one prompt: the unit of scoring, staleness, training and accounting."""

    group_id: str
    split: Split
    attempt: int
    issued_version: int
    prompt_text: str
    num_prompt_tokens: int
    reward: RewardRequest
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise PackError(f"group {self.group_id} has no trajectory")
        if any(trajectory.is_baseline for trajectory in self.trajectories[:-1]):
            raise PackError(
                f"group {self.group_id}: a baseline is not the last trajectory; at most one is allowed, the last"
            )

    def summary(self, row_group: int) -> GeneratedGroup:
        """Describe the group for the message that announces it."""
        return GeneratedGroup(
            group_id=self.group_id,
            row_group=row_group,
            split=self.split,
            attempt=self.attempt,
            reward_name=self.reward.name,
            issued_version=self.issued_version,
            oldest_version=min(t.oldest_version for t in self.trajectories),
            newest_version=max(t.newest_version for t in self.trajectories),
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=tuple(t.num_completion_tokens for t in self.trajectories),
            finish_reasons=tuple(t.finish_reason for t in self.trajectories),
            has_baseline=self.trajectories[-1].is_baseline,
        )

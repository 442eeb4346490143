"""The record of what a policy sampled: trajectories, and the group of all trajectories of one prompt."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import PackError
from penstock.protocol.groups import (
    AbandonedCompletion,
    FinishReason,
    GeneratedGroup,
    RewardRequest,
    RouterShape,
    RowImages,
    Split,
)
from penstock.protocol.versions import PolicyVersion, VersionRun, newest, oldest

if TYPE_CHECKING:
    from penstock.protocol.episode import Episode, Turn
    from penstock.protocol.token_annotations import ExpertChoices, TeacherScores

# Of recorded groups: a token of probability exp(-1000), which is 0 in every format, is never sampled.
LOWEST_LOGPROB = -1000.0
# Engines draw from probabilities in float32, whose least above 0 is exp(-103.28): a token of less is never drawn.
LOWEST_SAMPLED_LOGPROB = -104.0
LOGPROB_SLACK = 1e-3  # a probability of 1 may round to a log-probability just above 0

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
    experts: ExpertChoices | None = None  # of a mixture of experts, where the task asked for them
    images: RowImages | None = None  # those whose tokens are among ``token_ids``

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if len(self.loss_mask) != length or len(self.behaviour_logprobs) != length:
            raise PackError(
                f"per-token arrays differ: {length} token ids, {len(self.loss_mask)} mask entries, "
                f"{len(self.behaviour_logprobs)} behaviour_logprobs"
            )
        if not np.isfinite(self.behaviour_logprobs).all():
            raise PackError("behaviour_logprobs hold NaN or infinity; the engine's answer cannot be used")
        _check_runs(self.version_runs, self.loss_mask, self.behaviour_logprobs)
        _check_images(self.images, self.token_ids, self.loss_mask)
        if self.experts is not None:
            self.experts.check_length(length)

    @classmethod
    def of_checked_values(  # noqa: PLR0913  a trajectory has these
        cls,
        token_ids: Int32s,
        loss_mask: Bools,
        behaviour_logprobs: Float32s,
        version_runs: tuple[VersionRun, ...],
        finish_reason: FinishReason,
        completion_text: str,
        is_baseline: bool,
        *,
        experts: ExpertChoices | None = None,
        images: RowImages | None = None,
    ) -> Trajectory:
        """Build from arrays of equal length that `check_token_values` has checked; checks only runs and images.

        A pack checks the values of all its trajectories at once, which costs a tenth.
        """
        _check_runs(version_runs, loss_mask, behaviour_logprobs)
        _check_images(images, token_ids, loss_mask)
        new = object.__new__(cls)
        of_row = (finish_reason, completion_text, is_baseline, experts, images)
        values = (token_ids, loss_mask, behaviour_logprobs, version_runs, *of_row)
        for name, value in zip(cls.__slots__, values, strict=True):
            object.__setattr__(new, name, value)
        if experts is not None:
            experts.check_length(len(token_ids))
        return new

    @property
    def num_completion_tokens(self) -> int:
        return sum(run.end - run.start for run in self.version_runs)

    @property
    def oldest_version(self) -> PolicyVersion:
        """Oldest version among the sampled tokens; staleness is measured from it."""
        return oldest(self.version_runs)

    @property
    def newest_version(self) -> PolicyVersion:
        return newest(self.version_runs)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All trajectories of one prompt: the unit of scoring, staleness, training and accounting.

    A group of episodes holds their rows as its trajectories, in order. Rewards, lengths and finish reasons are then one
    for each episode, and ``num_prompt_tokens`` counts what precedes the first sampled token of the first row.
    """

    group_id: str
    split: Split
    attempt: int
    issued_version: int
    prompt_text: str
    num_prompt_tokens: int
    reward: RewardRequest
    trajectories: tuple[Trajectory, ...]
    episodes: tuple[Episode, ...] = ()  # none: each trajectory is a prompt and its one completion
    teacher: TeacherScores | None = None  # its log-probabilities of the sampled tokens
    abandoned: tuple[AbandonedCompletion, ...] = ()  # as its worker counts them; not stored in the pack

    @classmethod
    def of_episodes(
        cls,
        episodes: tuple[Episode, ...],
        *,
        split: Split,
        attempt: int,
        issued_version: int,
        prompt_text: str,
        reward: RewardRequest,
    ) -> Group:
        """Return the group of one task's episodes; raises PackError for what is not one group of trainable ones."""
        if not episodes or not episodes[0].rows:
            raise PackError("a group without an episode, or whose first episode has no row")
        rows: list[Any] = [row.trajectory for episode in episodes for row in episode.rows]
        return cls(
            group_id=episodes[0].group_id, split=split, attempt=attempt, issued_version=issued_version,
            prompt_text=prompt_text, num_prompt_tokens=episodes[0].rows[0].turns[0].start, reward=reward,
            trajectories=tuple(rows), episodes=episodes,
        )  # fmt: skip

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise PackError(f"group {self.group_id} has no trajectory")
        if self.episodes:
            self._check_episodes()
        if any(member.is_baseline for member in (self.episodes or self.trajectories)[:-1]):
            raise PackError(f"group {self.group_id}: a baseline is not the last trajectory; at most that one is")
        self._check_processor()
        shapes = {str(row.experts and row.experts.shape) for row in self.trajectories}
        if len(shapes) > 1:
            raise PackError(
                f"group {self.group_id}: experts of its trajectories: {' and '.join(sorted(shapes))}, not the same"
            )

    @property
    def image_processor(self) -> str | None:
        return next((row.images.processor for row in self.trajectories if row.images is not None), None)

    @property
    def routers(self) -> RouterShape | None:
        experts = self.trajectories[0].experts
        return experts.shape if experts is not None else None

    @property
    def has_baseline(self) -> bool:
        return self.trajectories[-1].is_baseline

    @property
    def rows_of(self) -> list[range]:
        """The numbers of each episode's rows among the trajectories; without episodes, of each trajectory."""
        ends = list(itertools.accumulate((len(e.rows) for e in self.episodes), initial=0))
        spans = itertools.pairwise(ends if self.episodes else range(len(self.trajectories) + 1))
        return [range(*span) for span in spans]

    @property
    def turns(self) -> list[tuple[Turn, ...]]:
        """The turns of each trajectory, in the order of its tokens; () where the group has no episodes."""
        turn_lists = [row.turns for episode in self.episodes for row in episode.rows]
        return turn_lists or [()] * len(self.trajectories)

    @property
    def trained_rows(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.trajectories if not trajectory.is_baseline]

    def _check_processor(self) -> None:
        processors = {row.images.processor for row in self.trajectories if row.images is not None}
        if len(processors) > 1:
            raise PackError(
                f"group {self.group_id}: images by the processors {' and '.join(sorted(processors))}, expected one"
            )

    def _check_episodes(self) -> None:
        rows = [row.trajectory for episode in self.episodes for row in episode.rows]
        if len(rows) != len(self.trajectories) or any(a is not b for a, b in zip(rows, self.trajectories, strict=True)):
            raise PackError(f"group {self.group_id}: its trajectories are not the rows of its episodes, in order")
        places = [episode.index for episode in self.episodes]
        if places != sorted(set(places)):
            raise PackError(f"group {self.group_id}: its episodes have the places {places[:8]}, expected rising ones")
        if len({episode.episode_id for episode in self.episodes}) != len(self.episodes):
            raise PackError(f"group {self.group_id}: two of its episodes have the same id")
        for episode in self.episodes:
            if (episode.group_id, episode.environment) != (self.group_id, self.episodes[0].environment):
                raise PackError(
                    f"group {self.group_id} holds episode {episode.episode_id} of {episode.group_id}, environment "
                    f"{episode.environment}, expected this group and environment {self.episodes[0].environment}"
                )
            if not episode.is_trainable:
                raise PackError(
                    f"group {self.group_id}: leave out episode {episode.episode_id}, whose status is {episode.status}"
                )

    def check_prompt(self) -> None:
        """Raise PackError unless all trajectories begin with one prompt of ``num_prompt_tokens``, none sampled.

        The rows of episodes may begin differently, since their environment renders them.
        """
        num, first = self.num_prompt_tokens, self.trajectories[0]
        if self.episodes:
            if num != first.version_runs[0].start:
                raise PackError(
                    f"group {self.group_id}: {num} prompt tokens, the first sampled is {first.version_runs[0].start}"
                )
            return
        prompt = first.token_ids[:num].tobytes()
        if num < 1 or len(prompt) != num * first.token_ids.itemsize:
            raise PackError(f"group {self.group_id}: {num} prompt tokens in a trajectory of {len(first.token_ids)}")
        for number, row in enumerate(self.trajectories):
            if row.token_ids[:num].tobytes() != prompt:
                raise PackError(f"group {self.group_id}: trajectory {number} has another prompt than trajectory 0")
            if row.images != first.images:
                raise PackError(f"group {self.group_id}: trajectory {number} has other images than trajectory 0")
            if row.version_runs[0].start < num:
                raise PackError(f"group {self.group_id}: trajectory {number} says tokens of the prompt were sampled")

    def check_logprobs(self) -> None:
        least = min(float(row.behaviour_logprobs.min()) for row in self.trajectories)
        if not least >= LOWEST_SAMPLED_LOGPROB:
            raise PackError(
                f"group {self.group_id}: a sampled token has log-probability {least}, expected at least "
                f"{LOWEST_SAMPLED_LOGPROB}: a less probable one has probability 0 in float32, and is never drawn"
            )

    def check_described_by(self, described: GeneratedGroup) -> None:
        fields = self._described_fields()
        check_equal(described.group_id, *((name, value, getattr(described, name)) for name, value in fields.items()))

    @property
    def teacher_top_k(self) -> int | None:
        return self.teacher.top_k if self.teacher is not None else None

    @property
    def completion_tokens(self) -> tuple[int, ...]:
        """Sampled tokens of each episode; without episodes, of each trajectory."""
        if self.episodes:
            return tuple([e.num_sampled_tokens for e in self.episodes])
        return tuple([t.num_completion_tokens for t in self.trajectories])

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        return tuple([member.finish_reason for member in (self.episodes or self.trajectories)])

    def summary(self, row_group: int) -> GeneratedGroup:
        return GeneratedGroup(row_group=row_group, abandoned=self.abandoned, **self._described_fields())

    def _described_fields(self) -> dict[str, Any]:
        versions = [run.version for row in self.trajectories for run in row.version_runs]
        return {
            "group_id": self.group_id,
            "split": self.split,
            "attempt": self.attempt,
            "reward_name": self.reward.name,
            "issued_version": self.issued_version,
            "oldest_version": min(versions),
            "newest_version": max(versions),
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reasons": self.finish_reasons,
            "has_baseline": self.has_baseline,
            "rows": tuple([len(e.rows) for e in self.episodes]),
            "row_tokens": sum(e.num_tokens for e in self.episodes) if self.episodes else None,
            "teacher_top_k": self.teacher_top_k,
            "routers": self.routers,
            "image_processor": self.image_processor,
        }


def check_token_values(token_ids: Int32s, logprobs: Float32s, vocab_size: int | None) -> None:
    """Raise PackError for a token id or log-probability that no engine can sample; both [T], of any number of rows."""
    if not len(token_ids):
        raise PackError("a pack without a token")
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        vocabulary = "a vocabulary" if vocab_size is None else f"a vocabulary of {vocab_size}"
        raise PackError(f"token id {lowest if lowest < 0 else highest} is not one of {vocabulary}")
    least, most = float(logprobs.min()), float(logprobs.max())  # NaN if any is NaN
    if not (least >= LOWEST_LOGPROB and most <= LOGPROB_SLACK):
        raise PackError(
            f"behaviour_logprobs are from {least} to {most}, expected finite ones from {LOWEST_LOGPROB} to 0"
        )


def check_equal(group_id: str, *fields: tuple[str, object, object]) -> None:
    """Raise PackError naming the first field whose value in the pack differs from that in the message."""
    for name, actual, expected in fields:
        if actual != expected:
            raise PackError(
                f"the pack holds another group than {group_id} as the message describes it: {name} is "
                f"{str(actual)[:200]}, the message says {str(expected)[:200]}"
            )


def _check_images(images: RowImages | None, token_ids: Int32s, loss_mask: Bools) -> None:
    for ref in images.refs if images is not None else ():
        span = slice(ref.position, ref.end)
        if ref.end > len(token_ids) or np.ptp(token_ids[span]) or np.count_nonzero(loss_mask[span]):
            raise PackError(
                f"image {ref.sha256}: tokens {ref.position} to {ref.end} of a row of {len(token_ids)} are not one "
                "token, repeated, or were sampled; those of an image never are"
            )


def _check_runs(runs: tuple[VersionRun, ...], loss_mask: Bools, logprobs: Float32s) -> None:
    """Raise PackError unless the runs, in order, cover the tokens of the mask, which alone have log-probabilities."""
    length, position, sampled = len(loss_mask), 0, 0
    for version, start, end in runs:
        if (
            not position <= start < end <= length
            or version < 0
            or np.count_nonzero(loss_mask[start:end]) != end - start
        ):
            break
        if np.count_nonzero(logprobs[position:start]):
            raise PackError(f"tokens {position} to {start} have log-probabilities and no version run: none was sampled")
        sampled += end - start
        position = end
    else:
        if sampled == np.count_nonzero(loss_mask) and not np.count_nonzero(logprobs[position:]):
            return
    raise PackError(
        f"version runs {[tuple(run) for run in runs[:8]]} do not cover exactly the {np.count_nonzero(loss_mask)} "
        f"sampled tokens of a trajectory of {length}"
    )

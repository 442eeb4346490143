"""The rewards that come with the service, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from protocol.group_pack import GroupTexts
from reward_service.errors import RewardCrashed, RewardError
from reward_service.grader_pool import GraderPool
from reward_service.rewards import (
    answer_line,
    code,
    exact_match,
    format,
    gsm8k,
    latex,
    math_answer,
    question_answer,
)
from reward_service.rewards.verdict import Verdict
from reward_service.sandbox.pool import SandboxPool
from reward_service.scores import GroupScores, Outcome, Scorer, extra_info, ground_truth

log = structlog.get_logger("reward_service.built_in")

Judge = Callable[[tuple[str, ...], Any], list[Verdict]]

DESCRIPTIONS: dict[str, str] = {
    code.NAME: "the share of the row's tests that the completion's Python program passes, in a sandbox",
    exact_match.NAME: "1 when the completion is the ground truth, white space around it aside",
    format.NAME: "1 when the completion is <think>...</think> then <answer>...</answer> and nothing else",
    gsm8k.NAME: "1 when the number after the last #### is the ground truth's number",
    format.THINK: "1 when the completion begins with its only <think> and closes it",
    gsm8k.FLEXIBLE: "1 when the last number, wherever it stands, is the ground truth's number",
    question_answer.EXACT: "1 when the answer in the last <answer> tags is an accepted one, word for word",
    question_answer.INSIDE: "1 when an accepted answer is inside the last <answer> tags",
    math_answer.NAME: "1 when the last \\boxed{} equals the ground truth, by value (math-verify in processes of its own)",
    answer_line.NAME: "the same of the last 'Answer: ...' line; without one, of the last \\boxed{}",
}


def scorers(grader: GraderPool, programs: CodeReward | None) -> dict[str, Scorer]:
    """Return every built-in reward by its name; ``programs`` is None where no sandbox holds."""
    pure: dict[str, Judge] = {
        exact_match.NAME: exact_match.judge,
        format.NAME: format.judge,
        format.THINK: format.judge_think,
        gsm8k.NAME: gsm8k.judge,
        gsm8k.FLEXIBLE: gsm8k.judge_flexible,
        question_answer.EXACT: question_answer.judge_exact,
        question_answer.INSIDE: question_answer.judge_inside,
    }
    found: dict[str, Scorer] = {name: PureReward(name, judge) for name, judge in pure.items()}
    found[math_answer.NAME] = MathReward(math_answer.NAME, grader, latex.last_boxed, "boxed")
    found[answer_line.NAME] = MathReward(answer_line.NAME, grader, answer_line.last_answer, "has_answer")
    return found if programs is None else {**found, code.NAME: programs}


@dataclass(frozen=True, slots=True)
class PureReward:
    """A reward that needs nothing but the texts."""

    name: str
    judge: Judge
    slow: bool = False

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        """Score the groups; a reward that raises fails its group, not the pack."""
        return [self._one(group) for group in groups]

    def _one(self, group: GroupTexts) -> Outcome:
        try:
            return GroupScores.of(self.judge(group.completions, ground_truth(group.reward)), self.name)
        except RewardError as err:
            return err
        except Exception as err:  # noqa: BLE001 a bug in one reward must not take the other groups with it
            return _crashed(self.name, group.group_id, err)


@dataclass(frozen=True, slots=True)
class MathReward:
    """A reward whose hard cases go to grader processes."""

    name: str
    grader: GraderPool
    find: math_answer.Find
    part: str
    slow: bool = True

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        """Score the groups; the pool bounds how many of their answers are graded at once."""
        return list(await asyncio.gather(*(self._one(group) for group in groups)))

    async def _one(self, group: GroupTexts) -> Outcome:
        try:
            truth = ground_truth(group.reward)
            verdicts = await math_answer.judge(
                group.completions, truth, self.grader.equal, find=self.find, part=self.part
            )
            return GroupScores.of(verdicts, self.name)
        except RewardError as err:
            return err
        except Exception as err:  # noqa: BLE001 a bug in one reward must not take the other groups with it
            return _crashed(self.name, group.group_id, err)


@dataclass(frozen=True, slots=True)
class CodeReward:
    """The reward that runs programs."""

    sandboxes: SandboxPool
    all_or_nothing: bool
    slow: bool = True

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        """Score the groups; the pool bounds how many programs run at once."""
        return list(await asyncio.gather(*(self._one(group) for group in groups)))

    async def _one(self, group: GroupTexts) -> Outcome:
        try:
            verdicts = await code.judge(
                group.completions,
                ground_truth(group.reward),
                extra_info(group.reward),
                self.sandboxes.grade,
                all_or_nothing=self.all_or_nothing,
            )
            return GroupScores.of(verdicts, code.NAME)
        except RewardError as err:
            return err
        except Exception as err:  # noqa: BLE001 a bug in one reward must not take the other groups with it
            return _crashed(code.NAME, group.group_id, err)


def _crashed(name: str, group_id: str, err: Exception) -> RewardCrashed:
    log.error("a built-in reward raised", reward=name, group_id=group_id, exc_info=err)
    return RewardCrashed(f"built-in reward {name} raised {type(err).__name__}: {err} (group {group_id})")

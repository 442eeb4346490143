"""Define the classes of built-in rewards and their verdicts; a reward is an instance at the top level of a file of this package.

Such a file contains everything about a reward: the function that judges completions, the parameters that a run file may
set, how it is scored, and the data sets it fits. `registry/built_in.py` finds it; nothing else needs to be edited.

    def judge(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
        return [Verdict(float(text.isupper())) for text in completions]

    REWARD = PureReward(name="upper_case", description="1 when every letter is a capital", judge=judge, success=1.0)

`judge` returns one `Verdict` for each completion, in order. It raises BadGroundTruth when the row's ground truth does not
fit; any other exception is an error of the group. A reward with a ``parameters`` class gets its instance as the first argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import ValidationError

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.parsing import final_answer

AnswerT = TypeVar("AnswerT")


class Verdict(NamedTuple):
    """The reward of one completion, and its named parts."""

    reward: float
    parts: Mapping[str, float] = MappingProxyType({})


def truth_text(truth: Any, reward: str) -> str:
    if isinstance(truth, bool) or not isinstance(truth, str | int | float):
        raise BadGroundTruth(
            f"{reward}: the row's ground_truth must be a text or a number, got {_kind(truth)}; "
            "map the right column with data.map"
        )
    return truth if isinstance(truth, str) else repr(truth)


def verdicts_on(answers: Iterable[AnswerT | None], compare: Callable[[AnswerT], float]) -> list[Verdict]:
    """Return the verdict on each answer, None being 0; the part ``has_answer`` is 1 if there was one."""
    return [
        Verdict(0.0 if answer is None else float(compare(answer)), {"has_answer": float(answer is not None)})
        for answer in answers
    ]


def _kind(truth: Any) -> str:
    return "missing" if truth is None else f"{type(truth).__name__} {str(truth)[:80]!r}"


class NoParameters(Section):
    """The parameters of a reward that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A built-in reward.

    Attributes:
        name: The name in run files and rows.
        description: The value it returns, in one line.
        judge: The function; its arguments depend on the subclass.
        parameters: Frozen settings class of the keys that `reward.define` may set.
        data_sources: Values of ``data_source`` whose rows it scores when their reward is ``auto``.
        parts: Names of the parts of its verdicts.
        notes: Cost and pitfalls, for the table in docs/graders.md.
        reads: "answer": its completions get the ``<think>`` that ends their prompt, so that an unfinished chain is no answer;
            "answer and prompt": `judge` also gets ``prompt``; "answer and columns": the row's extra_info, as ``extra``.
        success: The reward from which on a completion counts as correct; None: its rewards have no such value.
    """

    name: str
    description: str
    judge: Callable[..., Any]
    parameters: type[Section] = NoParameters
    data_sources: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    notes: str = ""
    success: float | None = None
    reads: Literal["", "answer", "answer and prompt", "answer and columns"] = ""

    @property
    def default(self) -> Section | None:
        """The parameters when none are set; None for a reward whose parameters must be set in `reward.define`."""
        try:
            return self.parameters()
        except ValidationError:
            return None

    def bind(self, parameters: Section) -> Callable[..., Any]:
        return self.judge if self.parameters is NoParameters else partial(self.judge, parameters)


class PureReward(Reward):
    """Scored in the service itself: ``judge(completions, truth)``, in time linear in the completions' length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReward(PureReward):
    """Derive from it to compare answers by a rule of your own; both methods may be replaced.

    class Colour(AnswerReward):
        def compare_answers(self, answer: str, truth: Any) -> bool:
            return answer.casefold() == str(truth).casefold()

    REWARD = Colour(name="colour", description="1 when the colour is right", success=1.0)
    """

    judge: Callable[..., Any] = field(init=False)
    parts: tuple[str, ...] = ("has_answer",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "judge", self.verdicts)

    def extract_answer(self, completion: str) -> str | None:
        """Return the answer of a completion, None if it has none; a chain in ``<think>`` is not read."""
        return final_answer.find(final_answer.spoken(completion), "auto")

    def compare_answers(self, answer: str, truth: Any) -> float:
        """Return the reward of an answer; raises BadGroundTruth for a truth that no answer can equal."""
        return float(answer == truth_text(truth, self.name))

    def verdicts(self, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
        return verdicts_on(map(self.extract_answer, completions), lambda answer: self.compare_answers(answer, truth))


class LengthReward(Reward):
    """Scored by lengths: ``judge(parameters, lengths)``; the parameters' ``unit`` is tokens, words or characters."""


class GivenReward(Reward):
    """Read from the episodes: ``judge(episodes)`` gets what the environment says of each (`EpisodeTexts`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedReward(Reward):
    """Scored with grader processes, which have a CPU limit: ``async judge(completions, truth, grade=...)``.

    ``grader`` names the kind of process: ``graders/<grader>_grader.py``.
    """

    grader: Literal["math", "pattern"]


class SandboxedReward(Reward):
    """Runs programs in the sandbox: ``async judge(completions, truth, extra_info, grade, all_or_nothing=...)``."""

r"""How the answer of a completion is found for maj@k: by the reward that scored it, or by ``--answer``.

The built-in rewards that compare an answer define one; for them the answer that votes is the one that is scored. For any
other reward maj@k is not defined, unless ``--answer`` says where the answer is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import cast, get_args

from penstock.console.evaluation_results import Answers, Extract, Outcome
from penstock.protocol.errors import ConfigError
from penstock.reward_service.rewards import choice, gsm8k, math_answer
from penstock.reward_service.rewards.parsing import final_answer, latex
from penstock.reward_service.rewards.parsing.final_answer import Where

LAST_NUMBER = "last_number"
PLACES = (*get_args(Where), LAST_NUMBER)


def _normalised(find: Callable[[str], str | None]) -> Extract:
    def extract(text: str) -> Hashable | None:
        answer = find(text)
        return None if answer is None else latex.normalise(answer)

    return extract


def _choice(text: str) -> Hashable | None:
    answer = final_answer.find(text, "auto")
    return None if answer is None else choice.chosen(answer, choice.Parameters().letters)


BY_REWARD: Mapping[str, tuple[str, Extract]] = MappingProxyType(
    {
        "gsm8k": ("the number after the last ####", gsm8k.last_answer),
        "gsm8k_flexible": ("the last number", gsm8k.last_number),
        "math": ("the last \\boxed{}, normalised", _normalised(latex.last_boxed)),
        "math_flexible": ("boxed, in tags, after ####, after a phrase, or the last number", _normalised(math_answer.anywhere)),
        "multiple_choice": ("the letter chosen", _choice),
        "exact_match": ("the whole completion without surrounding white space", str.strip),
    }
)  # fmt: skip


def answers(place: str | None, reward_of: Callable[[Outcome], str], rewards: set[str]) -> Answers:
    """Return how answers are found.

    Args:
        place: ``--answer``; None: by reward.
        reward_of: The reward that scored a prompt.
        rewards: All of them.

    Raises:
        ConfigError: ``place`` is unknown.
    """
    if place is not None:
        extract = _at(place)
        return Answers(f"answer at {place} (--answer)", lambda _: extract)
    unknown = sorted(rewards - BY_REWARD.keys())
    if unknown or not rewards:
        text = (
            f"not defined: the reward {', '.join(unknown) or '(none)'} does not say what the answer of a completion is; "
            f"name its place with --answer ({', '.join(PLACES)})"
        )
        return Answers(text, None)
    rules = {name: BY_REWARD[name] for name in sorted(rewards)}
    return Answers(
        "; ".join(f"{name}: {rule}" for name, (rule, _) in rules.items()),
        lambda outcome: BY_REWARD[reward_of(outcome)][1],
    )


def check_place(place: str | None) -> None:
    """Raise ConfigError for a place of answers that is not known."""
    if place is not None and place not in PLACES:
        raise ConfigError(f"--answer {place}: expected one of {', '.join(PLACES)}")


def _at(place: str) -> Extract:
    check_place(place)
    if place == LAST_NUMBER:
        return gsm8k.last_number
    where = cast(Where, place)
    return _normalised(lambda text: final_answer.find(text, where))

"""1 when the answer between the last ``<answer>`` tags is one of the accepted ones, by its words (SQuAD, Search-R1).

Words are compared in lower case, in Unicode's composed form, without punctuation, articles before a word and extra spaces; numbers
keep their sign, point and operators (`-5`, `1.5`, `1/2`), `C++` and `A-` their ends. A truth without words (`A`, `?`) is compared as it
is written, an empty one refused. To yes and no the first word of an answer counts. Truths are a text, a list of them, true or
false, or a row's object as in TriviaQA (``aliases``), SQuAD (``text``), Search-R1 (``target``). `qa_em` requires all words,
`qa_subem` those of an accepted answer in a row somewhere inside. A chain in ``<think>`` is not read. Without tags in the answer, the
place `auto` is read if the prompt does not mention ``<answer>``. Part ``has_answer`` is 1 if an answer was found; verl gives
a wrong answer in tags 0.1, here it is 0. `qa_f1` is the harmonic mean of precision and recall of the words (of Chinese
and Japanese: the characters), the best over the accepted answers.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import unicodedata
from collections import Counter
from dataclasses import replace
from typing import Any

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.parsing import final_answer, latex
from penstock.reward_service.rewards.parsing.final_answer import Where
from penstock.reward_service.rewards.parsing.final_answer import words as split
from penstock.reward_service.rewards.reward import PureReward, Verdict, truth_text, verdicts_on

EXACT, INSIDE, F1 = "qa_em", "qa_subem", "qa_f1"
_ARTICLES = frozenset({"a", "an", "the"})
_DASHES = str.maketrans("‐‑‒–—−", "------")
_KEPT = re.compile(  # what belongs to a number, a formula, a version, a grade or a name such as C++
    r"\s*(?:->|<-|=>|!=|&&|\|\|)\s*|(?<=[0-9]e)[-+](?=[0-9])|(?<=[0-9]),(?=[0-9])|(?<=[0-9])['′\"″](?!\w*[a-z])(?:\s*(?=[0-9]))?|"
    r"(?<=[0-9])\s*[-/:^*+×÷=<>]\s*(?=[-+.]?[0-9])|(?<=[0-9])\.(?=[0-9])|(?<!\w)[-+<>≤≥=±]?\.?(?=[0-9])"
    r"|\s*[<=>¬±×÷№←-⋿⟀-⟿⤀-⫿♀♂♠-♯✓-✘]\s*|(?<=\w)\^(?=\w)|(?<=(?<!\w)\w)\*(?=\w(?!\w))|\s*\+\s*(?=\w)|(?<!\w)[-+!~](?=(?:[a-zα-ω∞√]|pi|ln|log|sin|cos|tan|sqrt)(?![a-z]))"
    r"|(?<=[a-z][0-9])-(?!\w)|(?<=[0-9])\+(?!\w)|(?<![^\W_])(?<=[a-z])[+#]+(?!\w)|(?<=(?<!\w)[a-z])[-+#*]+(?!\w)|(?<=(?<!\w)[a-z]{2})[-+#]+(?!\w)"
)
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_PUNCTUATION = re.compile(r"[^\w\s€£¥]|_")
_YES, _NO = frozenset({"yes", "true"}), frozenset({"no", "false"})
_NO_ANSWER = re.compile(r"no (?:one|doubt|idea|matter|more|less|wonder|problem)\b")
_ALIASES = ("target", "aliases", "normalized_aliases", "text", "answers", "value")
_DATA_SETS = (
    "qa", "trivia", "searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa",
    "searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle",
)  # fmt: skip


class Parameters(Section):
    where: Where = Field(default="tags", description="Place of the answer; auto: boxed, tags, ####, phrase, last line.")


def judge_exact(parameters: Parameters, completions: tuple[str, ...], truth: Any, prompt: str = "") -> list[Verdict]:
    accepted = _accepted(truth, EXACT)
    return verdicts_on(
        _answers(completions, parameters, prompt), lambda answer: not accepted.isdisjoint(_readings(answer, accepted))
    )


def judge_inside(parameters: Parameters, completions: tuple[str, ...], truth: Any, prompt: str = "") -> list[Verdict]:
    accepted = _accepted(truth, INSIDE)
    answers = _answers(completions, parameters, prompt, keeps_articles=True)
    return verdicts_on(answers, lambda answer: any(_is_inside(key, answer) for key in accepted))


def judge_f1(parameters: Parameters, completions: tuple[str, ...], truth: Any, prompt: str = "") -> list[Verdict]:
    accepted = _accepted(truth, F1)
    return verdicts_on(
        _answers(completions, parameters, prompt), lambda answer: max(f1(key, answer) for key in accepted)
    )


def f1(gold: str, answer: str) -> float:
    """Return the F1 of the bags of words of two normalised texts, as in SQuAD's evaluation."""
    wanted, actual = Counter(split(gold)), Counter(split(answer))
    shared = (wanted & actual).total()
    if not wanted or not actual:
        return float(wanted == actual)
    return 2.0 * shared / (wanted.total() + actual.total())


def words(text: str, *, keeps_articles: bool = False) -> str:
    """Return the words of a text as they are compared; empty if there are none besides articles."""
    plain = re.sub(r"\$", "", unicodedata.normalize("NFC", text).casefold().translate(_DASHES))
    plain = _THOUSANDS.sub("", plain)
    if not re.search("[^\\W0-9_]", plain):  # 2, 3
        plain = re.sub(r"(?<=[0-9]),\s+(?=[-0-9.])", ",", plain)
    pieces, end = [], 0
    for match in _KEPT.finditer(plain):
        pieces += [_PUNCTUATION.sub("", plain[end : match.start()]), re.sub(r"\s", "", match[0])]
        end = match.end()
    parts = "".join([*pieces, _PUNCTUATION.sub("", plain[end:])]).split()
    if _ARTICLES.issuperset(parts):
        return ""
    parts = [re.sub(r"(?<![\w.])\.(?=[0-9])", "0.", part) for part in parts]
    return " ".join(
        part for place, part in enumerate(parts) if part not in _ARTICLES or keeps_articles or place == len(parts) - 1
    )


def key(text: str, *, keeps_articles: bool = False) -> str:
    """Return a text's words; of a text without words the text itself."""
    plain = " ".join(unicodedata.normalize("NFC", text).casefold().split())
    return words(text, keeps_articles=keeps_articles) or _PUNCTUATION.sub("", plain).strip() or plain


def _accepted(truth: Any, reward: str) -> frozenset[str]:
    if isinstance(truth, bool):
        return _YES if truth else _NO
    if isinstance(truth, str) and re.match(r"""\s*\[(?:"|'.*'\]\s*$)""", truth):  # as JSON, or as Python prints a list
        with contextlib.suppress(ValueError, SyntaxError):
            truth = ast.literal_eval(truth) if "['" in truth[:8] else json.loads(truth)
    if isinstance(truth, dict) and truth.keys() & set(_ALIASES):
        listed = [truth[name] for name in _ALIASES if name in truth]
        truth = [text for part in listed for text in (part if isinstance(part, list) else [part])]
    alternatives = [part for part in truth if part is not None] if isinstance(truth, list) else [truth]
    keys = frozenset(key(truth_text(alternative, reward)) for alternative in alternatives) - {""}
    if not keys:
        raise BadGroundTruth(
            f"{reward}: the row's ground_truth has no answer that could be given, got {str(truth)[:80]!r}"
        )
    return keys


def _answers(
    completions: tuple[str, ...], parameters: Parameters, prompt: str, *, keeps_articles: bool = False
) -> list[str | None]:
    asks_no_tags = parameters.where == "tags" and prompt != "" and "<answer>" not in prompt
    answers = []
    for text in map(final_answer.spoken, completions):
        where = "auto" if asks_no_tags and "<answer>" not in text else parameters.where
        answer = final_answer.find(text, where)
        if answer is not None and "\\" in answer:
            answer = latex.plain_text(answer)
        answers.append(
            None if answer is None else key(re.sub(r"^>\s+(?=\W*[^\W\d])", "", answer), keeps_articles=keeps_articles)
        )
    return answers


def _readings(answer: str, accepted: frozenset[str]) -> set[str]:
    """Return an answer, and for yes and no its first word, unless it says the opposite too."""
    if not answer or _NO_ANSWER.match(answer):
        return {answer} - {""}
    first, said = answer.split(maxsplit=1)[0], set(answer.split())
    is_plain = accepted <= _YES | _NO and first in _YES | _NO and not (said & _YES and said & _NO)
    return {answer, first} if is_plain else {answer}


def _is_inside(wanted: str, answer: str) -> bool:
    """Return True if the words of a key are in a row in an answer; articles between them are passed over."""
    if _ARTICLES.issuperset(split(wanted)):
        return wanted in split(words(answer)) or wanted == answer
    articles = "(?:(?:a|an|the) )*"
    pattern = f" {articles}".join(map(re.escape, split(wanted)))
    return re.search(rf"(?<!\S){pattern}(?!\S)", " ".join(split(answer))) is not None


EXACT_REWARD = PureReward(
    name=EXACT,
    description="1 when the answer in the last <answer> tags is an accepted one, by its words (SQuAD's normalisation)",
    judge=judge_exact,
    parameters=Parameters,
    reads="answer and prompt",
    data_sources=_DATA_SETS,
    parts=("has_answer",),
    success=1.0,
)

INSIDE_REWARD = replace(
    EXACT_REWARD,
    name=INSIDE,
    description="1 when an accepted answer is inside the last <answer> tags",
    judge=judge_inside,
    data_sources=(),
    notes="a long answer that lists many candidates passes",
)

F1_REWARD = replace(
    EXACT_REWARD,
    name=F1,
    description="F1 of the words (Chinese and Japanese: characters) shared with the best accepted answer, in [0, 1]",
    judge=judge_f1,
    data_sources=(),
    success=None,
)

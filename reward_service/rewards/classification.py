"""1 when the label is the ground truth's.

The final answer (tags, box, phrase or last line) gives a label if it equals one, ignoring case and punctuation, or
if exactly one label is mentioned in it, as a whole word and not after a negation. Several labels count as none (part
``ambiguous`` is 1). Part ``has_answer`` is 1 if a label was found.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.parsing import final_answer, latex
from penstock.reward_service.rewards.parsing.final_answer import Where
from penstock.reward_service.rewards.reward import PureReward, Verdict, truth_text

NAME = "classification"
_NEGATED = re.compile(  # before a label in its clause: not, hardly, far from, nicht, pas
    r"""(?<![^\W_])(?:not|no|non|never|neither|nor|isnt|wasnt|cannot|without|hardly|barely|scarcely|nothing|nowhere|lacks?|less|fails?|(?:avoid|refuse|stop|cease|decline)s?|unrelated|little|opposite|against|condemns?|ignores?|rejects?|wrong|incorrect|unlikely
    |rather\sthan|instead\sof|opposed\sto|far\sfrom|anything\sbut|free\s(?:of|from)|nicht|kein\w*|nie(?:mals)?|kaum|weder|alles\sandere\sals
    |pas|jamais|guère|ni|não|nunca|jamás|tampoco|mai|не|нет)(?![^\W_])|n['’]t(?!\w)|(?:non|un|anti)-\W*$|难说|[不没沒無无未非别]\w{0,3}$""",
    re.VERBOSE,
)
_STATES = re.compile(  # what ends before a label: "sentiment", "is", "classified as", at most a few words before it
    r"""(?:(?<!\w)(?:is|are|was|be|as|belongs?\sto|under|say|call|label\w*|classif\w*|categor\w*|class|sentiment|topic|emotion|tone|stance|relation\w*|verdict|answer
    |prediction|(?:show|express|convey|contain|seem|look|sound|feel|appear|lean|mean|indicate|suggest|reflect)(?:e?s|ed)?|think|believe|guess|choose|pick|so|thus|hence|therefore
    |ist|lautet|bleibt|est|es|è|é|это|stimmung|\w+['’](?:s|d|m))(?:\s\S+){0,3}|^(?:(?!\w+s\s?$)\S+)?)\s?$""",
    re.VERBOSE,
)
_FILLER = re.compile(r"(?<!\S)(?:an?|the|very|clearly|overall|really|quite|mostly|mainly)\s")
_AFFIRMED = re.compile(
    r"\b(?:(?:no|without(?: a| any)?|beyond(?: a| any)?) (?:doubt|question)|not (?:only|just|merely))\b"
)
_DENIED = re.compile(  # after it: positive is wrong, ポジティブではない
    r"-?free\b|\s?(?:(?:is|was|would be|seems|ist|est|es) (?:not\b|nicht\b|pas\b|wrong\b|incorrect\b|false\b|ruled out\b|falsch\b)|(?:is|was|does|do|did|would|could|can|will)(?: not|not|n['’]t|['’]t)\b|(?:で|じゃ)は?(?:な|あり)|이?[가이]? ?(?:않|아니|아닙))"
)
_CLAUSE = re.compile(r"[.,;:!?\n，。；：！？]|(?<!anything )\bbut\b|\bsondern\b")
_NO_SPACES = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")
_MAX_CHARS = 2000


class Parameters(Section):
    labels: tuple[str, ...] = Field(
        default=(), max_length=1000, description="All labels; none: only an answer that is exactly the label counts."
    )
    where: Where = Field(default="auto", description="Place of the answer; auto: boxed, tags, ####, phrase, last line.")


def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    text = truth_text(truth, NAME)
    gold, labels = plain(text), tuple(plain(label) for label in parameters.labels)
    if not gold or (labels and gold not in labels):
        known = f" of {', '.join(parameters.labels[:10])}" if labels else ""
        raise BadGroundTruth(f"{NAME}: the row's ground_truth must be a label{known}, got {text[:80]!r}")
    texts = map(final_answer.spoken, completions)
    return [_verdict(_find(text, parameters.where, labels), gold, labels) for text in texts]


def _find(text: str, where: Where, labels: tuple[str, ...]) -> str | None:
    """Return the answer at a place; the first line if the last one, after it, mentions no label."""
    answer = final_answer.find(text, where)
    if answer is None or where != "auto" or not labels or answer != final_answer.last_line(text):
        return answer
    first, _, rest = text.strip().partition("\n")
    return answer if _pattern(labels).search(plain(rest)) or final_answer.TAKES_BACK.search(rest) else first


def plain(label: str) -> str:
    """Return a label's words in lower case, without surrounding punctuation, separated by single spaces."""
    return re.sub(r"[^\w'+#&/-]+", " ", label.casefold().replace("_", " ")).strip(" '-/")


def mentioned(answer: str, labels: tuple[str, ...]) -> set[str]:
    """Return the labels that an answer mentions if it states one: of two that overlap the longer one, none that its clause negates."""
    mentions, is_stated = set(), False
    for clause in map(plain, _CLAUSE.split(_AFFIRMED.sub(" ", answer.casefold()))):
        for match in _pattern(labels).finditer(clause):
            before = clause[: match.start()]
            if not _NEGATED.search(before) and not _DENIED.match(clause, match.end()):
                mentions.add(labels[int((match.lastgroup or "_0")[1:])])
                is_stated |= bool(_NO_SPACES.search(match[0]) or _STATES.search(_FILLER.sub("", before)))
    return mentions if is_stated else set()


def _verdict(answer: str | None, gold: str, labels: tuple[str, ...]) -> Verdict:
    text = latex.plain_text(answer[:_MAX_CHARS]) if answer else ""
    said = plain(text)
    if not labels or said in labels:
        return Verdict(float(said == gold), {"has_answer": float(bool(said)), "ambiguous": 0.0})
    mentions = mentioned(text, labels)
    return Verdict(
        float(mentions == {gold}), {"has_answer": float(len(mentions) == 1), "ambiguous": float(len(mentions) > 1)}
    )


@lru_cache(64)
def _pattern(labels: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(range(len(labels)), key=lambda place: len(labels[place]), reverse=True)
    named = (f"(?P<_{place}>{_spelt(labels[place])})" for place in longest_first)
    return re.compile("|".join(named))


def _spelt(label: str) -> str:
    """Return a pattern of a label: by itself, except in a script without spaces; hyphens may be spaces or left out."""
    pattern = re.escape(label).replace("\\-", r"[- ]?")
    return pattern if _NO_SPACES.search(label) else rf"(?<!\w){pattern}(?!\w)"


REWARD = PureReward(
    name=NAME,
    description="1 when the label is the ground truth's; an answer with several labels has none",
    judge=judge,
    reads="answer",
    parameters=Parameters,
    data_sources=("classification",),
    parts=("has_answer", "ambiguous"),
    notes='without `labels` the whole answer is compared; a label after "not", "no" or "non-" does not count',
    success=1.0,
)

"""The similarity of two texts, from 0 to 1; pure.

``fuzzy_match`` is rapidfuzz's ratio (OpenAI names the library, not which of its functions). ``rouge_n`` and ``rouge_l`` are F1 over words
(Lin 2004, https://aclanthology.org/W04-1013); ``gleu`` is the smaller of precision and recall over n-grams of 1 to 4
words (Wu et al. 2016, https://arxiv.org/abs/1609.08144). Words are runs of letters and digits in lower case.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rapidfuzz import fuzz
from rapidfuzz.distance import LCSseq

_WORD = re.compile(r"[^\W_]+")
_LONGEST = 4


def similarity(metric: str, text: str, reference: str) -> float:
    """Return the similarity of two texts by a metric of `TextSimilarity`.

    Except for ``fuzzy_match``, a text without words gives 1 if the other has none either, else 0.
    """
    if metric == "fuzzy_match":
        return fuzz.ratio(text, reference) / 100.0
    words, wanted = _words(text), _words(reference)
    if not words or not wanted:
        return float(words == wanted)
    if metric == "rouge_l":
        return _f1(LCSseq.similarity(words, wanted), len(words), len(wanted))
    if metric == "gleu":
        sizes = range(1, _LONGEST + 1)
        shared = sum((_grams(words, size) & _grams(wanted, size)).total() for size in sizes)
        most = max(sum(_grams(one, size).total() for size in sizes) for one in (words, wanted))
        return shared / most
    size = int(metric.removeprefix("rouge_"))
    given, expected = _grams(words, size), _grams(wanted, size)
    return _f1((given & expected).total(), given.total(), expected.total())


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[place : place + size]) for place in range(len(words) - size + 1))


def _f1(shared: int, given: int, expected: int) -> float:
    return 2.0 * shared / (given + expected) if shared else 0.0

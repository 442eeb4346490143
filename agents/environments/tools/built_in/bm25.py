"""Rank passages by BM25 (Robertson and Zaragoza, "The probabilistic relevance framework", 2009; the idf of Lucene). Pure."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75  # of Lucene


def words_of(text: str) -> list[str]:
    """Return the words of a text: letters, digits and underscores, without regard to case."""
    return _WORD.findall(text.casefold())


class Bm25:
    """An index of passages. A passage of 100 words takes about 800 bytes."""

    def __init__(self, passages: Iterable[str]) -> None:
        """Count the words of every passage."""
        found: dict[str, tuple[array[int], array[int]]] = {}  # by word: passages, and how often it is in each
        lengths = array("i")
        for number, text in enumerate(passages):
            words = words_of(text)
            lengths.append(len(words))
            for word, count in Counter(words).items():
                places, counts = found.setdefault(word, (array("i"), array("i")))
                places.append(number)
                counts.append(count)
        self._found = found
        self.num_passages = len(lengths)
        mean = sum(lengths) / max(self.num_passages, 1)
        sizes = np.frombuffer(lengths, dtype=np.int32) if self.num_passages else np.zeros(0, dtype=np.int32)
        self._norms = _K1 * (1.0 - _B + _B * sizes / max(mean, 1e-9))

    def best(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return the numbers and scores of the best passages, best first; those without a word of the query are none.

        ``score = sum over the query's different words of idf c (k1 + 1) / (c + k1 (1 - b + b length / mean length))`` with
        ``idf = ln(1 + (N - n + 0.5) / (n + 0.5))``, c the word's count in the passage, n the passages that have it. Of equal
        scores the earlier passage is first.
        """
        scores = np.zeros(self.num_passages)
        for word in dict.fromkeys(words_of(query)):
            if word not in self._found:
                continue
            places = np.frombuffer(self._found[word][0], dtype=np.int32)
            counts = np.frombuffer(self._found[word][1], dtype=np.int32)
            idf = math.log(1.0 + (self.num_passages - len(places) + 0.5) / (len(places) + 0.5))
            scores[places] += idf * counts * (_K1 + 1.0) / (counts + self._norms[places])
        hits = np.flatnonzero(scores)
        order = hits[np.argsort(-scores[hits], kind="stable")[:count]]
        return [(int(one), float(scores[one])) for one in order]

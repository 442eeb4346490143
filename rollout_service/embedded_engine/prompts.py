"""The prompts of one pass: which sequences share one, what of it is known, and how they are packed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from penstock.rollout_service.embedded_engine.kept_prefixes import KeptPrefixes, Reused
from penstock.rollout_service.embedded_engine.model.transformer import PromptSpan
from penstock.rollout_service.embedded_engine.scheduler import padded_rows
from penstock.rollout_service.embedded_engine.sequence import Prefix, Sequence


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is computed once for all ``sequences`` that have it, behind what of it is known."""

    prefix: Prefix
    sequences: list[Sequence]
    reused: Reused

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of its tokens."""
        return self.prefix[1]

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """The tokens to compute, at least one: the hidden state of the last is needed."""
        return self.tokens[self.reused.length :]


def prompts_of(admitted: Items[Sequence], kept: KeptPrefixes) -> list[Prompt]:
    """Return the prompts of sequences; neighbours are equally long where that is possible, so that they share attention calls."""
    groups: dict[Prefix, list[Sequence]] = {}
    for sequence in admitted:
        groups.setdefault(sequence.prefix(), []).append(sequence)
    prompts = [
        Prompt(prefix, same, kept.find(prefix, min(one.num_reusable for one in same)))
        for prefix, same in groups.items()
    ]
    return sorted(prompts, key=lambda one: (len(one.new_tokens), one.reused.length))


def spans_of(prompts: Items[Prompt]) -> list[PromptSpan]:
    """Return the runs of prompts of equal lengths."""
    lengths = ((one.reused.length, len(one.new_tokens)) for one in prompts)
    return [PromptSpan(len(list(same)), start, length) for (start, length), same in itertools.groupby(lengths)]


def packed(prompts: Items[Prompt]) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and positions of what is to be computed, [N] int64 each, padded with zeros to a number of `padded_rows`."""
    num_tokens = sum(len(one.new_tokens) for one in prompts)
    token_ids, positions = np.zeros((2, padded_rows(num_tokens)), dtype=np.int64)
    token_ids[:num_tokens] = list(itertools.chain.from_iterable(one.new_tokens for one in prompts))
    positions[:num_tokens] = np.concatenate([np.arange(one.reused.length, len(one.tokens)) for one in prompts])
    return token_ids, positions

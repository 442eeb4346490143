"""The prompts of one pass: which sequences share one, what of it is known, and how they are packed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.protocol.images.processor import rope_positions
from penstock.rollout_service.embedded_engine.caches import PrefixCache, Reused
from penstock.rollout_service.embedded_engine.model.transformer import PromptSpan
from penstock.rollout_service.embedded_engine.scheduler import padded_rows
from penstock.rollout_service.embedded_engine.sequence import Image, Images, Prefix, Sequence


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is computed once for all ``sequences`` that have it, behind what of it is known."""

    prefix: Prefix
    sequences: list[Sequence]
    reused: Reused

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prefix[1]

    @property
    def images(self) -> Images | None:
        return self.sequences[0].images

    @property
    def new_tokens(self) -> tuple[int, ...]:
        return self.tokens[self.reused.length :]


def prompts_of(admitted: Items[Sequence], kept: PrefixCache) -> list[Prompt]:
    """Return the prompts of sequences; neighbours are equally long where that is possible, so that they share attention calls."""
    groups: dict[Prefix, list[Sequence]] = {}
    for sequence in admitted:
        groups.setdefault(sequence.prefix(), []).append(sequence)
    prompts = [
        Prompt(prefix, same, kept.find(prefix, min(member.num_reusable for member in same)))
        for prefix, same in groups.items()
    ]
    return sorted(prompts, key=lambda one: (len(one.new_tokens), one.reused.length))


def spans_of(prompts: Items[Prompt]) -> list[PromptSpan]:
    lengths = ((prompt.reused.length, len(prompt.new_tokens)) for prompt in prompts)
    return [PromptSpan(len(list(same)), start, length) for (start, length), same in itertools.groupby(lengths)]


def packed(prompts: Items[Prompt], merge_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and positions of what is to be computed, padded with zeros to a number of `padded_rows`.

    Both are int64, ids [N] and 0 where an image is, positions [N], or [N, 3] where a prompt has images.
    """
    num_tokens = sum(len(prompt.new_tokens) for prompt in prompts)
    token_ids = np.zeros(padded_rows(num_tokens), dtype=np.int64)
    token_ids[:num_tokens] = list(itertools.chain.from_iterable(prompt.new_tokens for prompt in prompts))
    if all(prompt.images is None for prompt in prompts):
        positions = np.zeros(len(token_ids), dtype=np.int64)
        positions[:num_tokens] = np.concatenate(
            [np.arange(prompt.reused.length, len(prompt.tokens)) for prompt in prompts]
        )
        return token_ids, positions
    positions = np.zeros((len(token_ids), 3), dtype=np.int64)
    positions[:num_tokens] = np.concatenate([_rope_positions(prompt, merge_size) for prompt in prompts])
    return np.maximum(token_ids, 0), positions


def _rope_positions(prompt: Prompt, merge_size: int) -> np.ndarray:
    places = None if prompt.images is None else prompt.images.places
    return rope_positions(len(prompt.tokens), places, merge_size)[:, prompt.reused.length :].T


class ShownPart(NamedTuple):
    row: int  # of its first token
    image: Image
    start: int  # tokens [start, end) of the image
    end: int


def shown_parts(prompts: Items[Prompt]) -> list[ShownPart]:
    """Return the images, or parts of them, that are to be computed, in the order of their rows."""
    parts: list[ShownPart] = []
    first = 0
    for prompt in prompts:
        known = prompt.reused.length
        if prompt.images is not None:
            for ref, image in zip(prompt.images.places.refs, prompt.images.shown, strict=True):
                start = max(ref.position, known)
                if start < ref.end:
                    row = first + start - known
                    parts.append(ShownPart(row, image, start - ref.position, ref.num_tokens))
        first += len(prompt.new_tokens)
    return parts

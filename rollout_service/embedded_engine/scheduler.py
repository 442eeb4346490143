"""Decide which waiting sequences start now. Pure.

First come, first served, so every sequence starts eventually. Three rules:

1. The KV rectangle must hold the worst case: (padded rows x longest possible sequence) <= ``max_total_tokens``.
   An admitted sequence is therefore never evicted for lack of memory.
2. One prompt pass computes at most ``max_prefill_tokens`` different prompt tokens (a single longer prompt
   is computed alone). Sequences with the same tokens, key and adapter are computed once, at no further cost;
   tokens whose keys and values are known cost nothing either, where the sequence can do without computing them.
3. While sequences run, new ones are admitted by an eighth of the rows at a time (or all that wait, if
   fewer): a prompt pass stalls every running sequence, so it should start many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.rollout_service.embedded_engine.caches import FEWEST_TOKENS
from penstock.rollout_service.embedded_engine.sequence import Prefix, Sequence

_EXACT_ROWS = 8


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int  # sequences that decode together
    max_total_tokens: int  # rows x columns of the KV rectangle
    max_prefill_tokens: int  # different prompt tokens computed in one pass


def padded_rows(num_rows: int) -> int:
    """Return how many rows to compute for ``num_rows``: at most an eighth (or seven) more, and few values.

    oneDNN prepares every new matrix shape for about half a millisecond, more than a small model computes on
    it; with all row counts allowed, its cache of prepared shapes would also overflow.
    """
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = max(_EXACT_ROWS, 1 << (num_rows.bit_length() - 4))
    return -(-num_rows // step) * step


def are_admitted(num_free: int, num_waiting: int, num_running: int, max_running: int) -> bool:
    """Return True if waiting sequences start now, as far as rule 3 decides: ``num_free`` of ``max_running`` rows are free."""
    if not num_waiting or num_free <= 0:
        return False
    return not num_running or num_free >= min(num_waiting, max(1, max_running // 8))


def choose_admissions(
    waiting: deque[Sequence],
    running: Iterable[Sequence],
    limits: Limits,
    num_known: Callable[[Prefix], int] = lambda _: 0,
) -> list[Sequence]:
    """Return the head of ``waiting`` that starts now, possibly empty; removes nothing.

    ``num_known`` returns how many of a prompt's first tokens have keys and values that are known.
    """
    current = list(running)
    free = limits.max_running - len(current)
    if not are_admitted(free, len(waiting), len(current), limits.max_running):
        return []
    longest = max((sequence.max_tokens for sequence in current), default=0)
    chosen: list[Sequence] = []
    counted: dict[Prefix, tuple[int, int]] = {}  # tokens that are known, and those that the pass computes
    prefill_tokens = 0
    for sequence in waiting:
        longest = max(longest, sequence.max_tokens)
        if len(chosen) == free or padded_rows(len(current) + len(chosen) + 1) * longest > limits.max_total_tokens:
            break
        prefix = sequence.prefix()
        known, computed = counted.get(prefix) or (num_known(prefix), 0)
        reused = min(known, sequence.num_reusable)
        more = max(0, sequence.num_tokens - (reused if reused >= FEWEST_TOKENS else 0) - computed)
        if chosen and more and prefill_tokens + more > limits.max_prefill_tokens:
            break
        counted[prefix] = known, computed + more
        prefill_tokens += more
        chosen.append(sequence)
    return chosen

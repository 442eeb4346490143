"""The prefix cache, and the cache of image features.

The turns of an episode, the samples of a prompt that do not start together, and the episodes of a group begin with the same tokens:
their keys and values are computed once. There is a radix tree of tokens for each cache key and adapter; a node holds the keys and values
of its tokens, and the experts that computed them. Everything was computed with one set of weights: `clear` when the weights change.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.rollout_service.embedded_engine.sequence import Prefix

if TYPE_CHECKING:
    import torch

    from penstock.rollout_service.embedded_engine.model.kv_cache import Computed


FEWEST_TOKENS = 32  # shorter beginnings cost more to find and copy than to compute
_FREED_SHARE = 8  # one eviction frees an eighth of the memory, so that the tree is searched for leaves rarely

_Key = tuple[str | None, int]


@dataclass(frozen=True, slots=True)
class Reused:
    """The beginning of a sequence whose keys and values are known: tokens [0, length)."""

    length: int
    parts: tuple[Computed, ...]  # one after the other


NOTHING = Reused(0, ())


@dataclass(slots=True, eq=False)
class _Node:
    tokens: np.ndarray  # [n] int32, at least one
    computed: Computed  # of these tokens
    parent: _Node | None  # None: its tokens are the first ones
    siblings: dict[int, _Node]  # by their first token, this node included
    used: int  # when it was found or kept last; no child has a greater one
    children: dict[int, _Node] = field(default_factory=dict)


class PrefixCache:
    """The keys and values of up to ``max_tokens`` tokens. For one thread."""

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        self.num_evicted = 0  # tokens, since the start; those that new weights make useless are not counted
        self._max_tokens = max_tokens
        self._trees: dict[_Key, dict[int, _Node]] = {}
        self._clock = itertools.count(1)

    def num_known(self, prefix: Prefix) -> int:
        """Return how many of the first tokens `find` would return, without counting this as a use."""
        if not self._may_know(prefix):
            return 0
        length = sum(count for _, count in self._path(prefix[0], _array(prefix[1])))
        return length if length >= FEWEST_TOKENS else 0

    def find(self, prefix: Prefix, at_most: int) -> Reused:
        """Return the longest known beginning of up to ``at_most`` tokens; `NOTHING` if it is shorter than `FEWEST_TOKENS`."""
        if at_most < FEWEST_TOKENS or not self._may_know(prefix):
            return NOTHING
        now, length, parts = next(self._clock), 0, []
        for node, count in self._path(prefix[0], _array(prefix[1][:at_most])):
            node.used = now
            length += count
            parts.append(node.computed.first(count))
        return Reused(length, tuple(parts)) if length >= FEWEST_TOKENS else NOTHING

    def keep(self, prefix: Prefix, read: Callable[[int, int], Computed]) -> None:
        """Keep the keys and values of all tokens of a prefix; ``read(start, end)`` returns a copy of those that are not known yet."""
        key, tokens = prefix
        if not FEWEST_TOKENS <= len(tokens) <= self._max_tokens:
            return
        ids, now = _array(tokens), next(self._clock)
        path = list(self._path(key, ids))
        for node, _ in path:
            node.used = now
        length = sum(count for _, count in path)
        if length == len(ids):
            return
        parent, siblings = None, self._trees.setdefault(key, {})
        if path:
            last, count = path[-1]
            parent = last if count == len(last.tokens) else _split(last, count)
            siblings = parent.children
        siblings[int(ids[length])] = _Node(ids[length:].copy(), read(length, len(ids)), parent, siblings, now)
        self.num_tokens += len(ids) - length
        if self.num_tokens > self._max_tokens:
            self._evict()

    def drop_adapter(self, number: int) -> None:
        for key in [key for key in self._trees if key[1] == number]:
            self.num_tokens -= sum(len(node.tokens) for node in _all(self._trees.pop(key)))

    def clear(self) -> None:
        self._trees.clear()
        self.num_tokens = 0

    def _may_know(self, prefix: Prefix) -> bool:
        return prefix[0] in self._trees and len(prefix[1]) >= FEWEST_TOKENS

    def _path(self, key: _Key, ids: np.ndarray) -> Iterator[tuple[_Node, int]]:
        nodes, at = self._trees.get(key, {}), 0
        while at < len(ids) and (node := nodes.get(int(ids[at]))) is not None:
            count = _num_equal(node.tokens, ids[at:])
            yield node, count
            if count < len(node.tokens):
                return
            nodes, at = node.children, at + count

    def _evict(self) -> None:
        nodes = (node for tree in self._trees.values() for node in _all(tree))
        leaves = [(node.used, number, node) for number, node in enumerate(nodes) if not node.children]
        heapq.heapify(leaves)
        target = self._max_tokens - self._max_tokens // _FREED_SHARE
        number = itertools.count(-1, -1)  # so that two leaves of one time are not compared
        while leaves and self.num_tokens > target:
            leaf = heapq.heappop(leaves)[2]
            del leaf.siblings[int(leaf.tokens[0])]
            self.num_tokens -= len(leaf.tokens)
            self.num_evicted += len(leaf.tokens)
            parent = leaf.parent
            if parent is not None and not parent.children:
                heapq.heappush(leaves, (parent.used, next(number), parent))
        self._trees = {key: tree for key, tree in self._trees.items() if tree}


def _split(lower: _Node, count: int) -> _Node:
    """Divide a node behind its first ``count`` tokens; return the new one that holds these, above the other."""
    tokens = lower.tokens
    first, rest = lower.computed.divided(count)
    upper = _Node(tokens[:count].copy(), first, lower.parent, lower.siblings, lower.used)
    upper.siblings[int(tokens[0])] = upper
    lower.tokens, lower.computed = tokens[count:].copy(), rest
    lower.parent, lower.siblings = upper, upper.children
    upper.children[int(lower.tokens[0])] = lower
    return upper


def _all(nodes: dict[int, _Node]) -> Iterator[_Node]:
    stack = list(nodes.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _array(tokens: tuple[int, ...]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def _num_equal(first: np.ndarray, second: np.ndarray) -> int:
    shorter = min(len(first), len(second))
    differ = first[:shorter] != second[:shorter]
    at = int(differ.argmax()) if shorter else 0
    return at if shorter and differ[at] else shorter


class ImageFeatureCache:
    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._found: OrderedDict[int, torch.Tensor] = OrderedDict()  # used longest ago first

    def find(self, number: int) -> torch.Tensor | None:
        features = self._found.get(number)
        if features is not None:
            self._found.move_to_end(number)
        return features

    def keep(self, number: int, features: torch.Tensor) -> None:
        size = features.numel() * features.element_size()
        if size > self._max_bytes:
            return
        self._found[number] = features
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, dropped = self._found.popitem(last=False)
            self.num_bytes -= dropped.numel() * dropped.element_size()

    def clear(self) -> None:
        self._found.clear()
        self.num_bytes = 0

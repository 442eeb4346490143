"""Groups of layers, by the names that parameters have in transformers; pure.

Every parameter is in one group by what it does (`KINDS`), and, if it belongs to a block, in one by its depth as well: at most
`MAX_RANGES` ranges of blocks. So the squared norms of the groups of one view add up to that of their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

ALL = "all"  # everything that is trained, in figures by group
KINDS = ("embedding", "attention", "mlp", "norm", "head", "other")
MAX_RANGES = 4

_BLOCK = re.compile(r"(?:^|\.)(\d+)(?=\.)")
_NORM = re.compile(r"norm|(?:^|\.)ln_?\d*(?:_\w+)?\.")
_ATTENTION = re.compile(r"attn|attention")
_MLP = re.compile(r"mlp|feed_forward|ffn|expert|moe|router|(?:^|\.)fc\d?\.")
_HEAD = re.compile(r"head|embed_out|score")
_EMBEDDING = re.compile(r"emb|(?:^|\.)w[tp]e\.")


def layer_groups(names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the groups of each parameter: its kind, and the range of blocks that it is in, if any.

    A tied output head is in ``embedding``. A parameter that no rule knows is in ``other``.
    """
    blocks = {name: _block(name) for name in names}
    num_blocks = max((number for number in blocks.values() if number is not None), default=-1) + 1
    return {
        name: (_kind(name, in_block=number is not None), *([] if number is None else [_range(number, num_blocks)]))
        for name, number in blocks.items()
    }


def _block(name: str) -> int | None:
    found = _BLOCK.search(name)
    return int(found[1]) if found else None


def _kind(name: str, *, in_block: bool) -> str:
    if _NORM.search(name):
        return "norm"
    rules = ((_ATTENTION, "attention"), (_MLP, "mlp")) if in_block else ((_HEAD, "head"), (_EMBEDDING, "embedding"))
    return next((kind for rule, kind in rules if rule.search(name)), "other")


def _range(number: int, num_blocks: int) -> str:
    """Return the range of blocks of a block; ranges are as equal in size as possible."""
    count = min(MAX_RANGES, num_blocks)
    index = (number * count) // num_blocks
    first = -(-index * num_blocks // count)
    last = -(-(index + 1) * num_blocks // count) - 1
    return f"block {first}" if first == last else f"blocks {first}-{last}"

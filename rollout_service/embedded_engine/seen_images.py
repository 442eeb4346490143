"""What was computed of images with the served weights, by their numbers: the turns of an episode show the same ones again.

Memory is bounded by bytes; when they are used up, those that were used longest ago are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class SeenImages:
    """Features of images. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._found: OrderedDict[int, torch.Tensor] = OrderedDict()  # used longest ago first

    def find(self, number: int) -> torch.Tensor | None:
        """Return the features [tokens, hidden] of an image; None if they have to be computed."""
        found = self._found.get(number)
        if found is not None:
            self._found.move_to_end(number)
        return found

    def keep(self, number: int, features: torch.Tensor) -> None:
        """Keep the features of an image that was not found."""
        size = features.numel() * features.element_size()
        if size > self._max_bytes:
            return
        self._found[number] = features
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, dropped = self._found.popitem(last=False)
            self.num_bytes -= dropped.numel() * dropped.element_size()

    def clear(self) -> None:
        """Drop everything: other weights compute other features."""
        self._found.clear()
        self.num_bytes = 0

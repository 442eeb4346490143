"""A prompt with images, as an environment gives it to an engine's client; any other sequence of token ids has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.protocol.facts import RowImages
from penstock.rollout_service.errors import TaskRefused


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt(Sequence[int]):
    """Token ids with all tokens of their images, and the images."""

    token_ids: Sequence[int]
    images: RowImages
    data: Mapping[str, bytes]  # by sha256

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.token_ids)

    def __getitem__(self, at: Any) -> Any:
        """Return a token, or a list of them, without images."""
        return self.token_ids[at]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the tokens."""
        return iter(self.token_ids)


def refuse_images(prompts: Sequence[Sequence[int]], engine: str) -> None:
    """Raise TaskRefused if a prompt has images, for an engine whose client sends none."""
    if any(isinstance(prompt, ImagePrompt) for prompt in prompts):
        raise TaskRefused(
            "images_unsupported",
            f"a prompt has images, and {engine} gets token ids alone: use the embedded engine or SGLang, or data without images",
        )

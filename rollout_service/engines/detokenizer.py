"""The adapter file of tokenizers in the worker: token ids → text, with the tokenizer of the published weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class Detokenizer:
    """The ``tokenizer.json`` of a model folder, where it has one."""

    def __init__(self, folder: Path) -> None:
        """Read the file, if there is one."""
        from tokenizers import Tokenizer  # noqa: PLC0415  (most workers never decode)

        path = folder / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None

    @property
    def has_tokenizer(self) -> bool:
        """Whether token ids can be decoded."""
        return self._tokenizer is not None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text; an empty text without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

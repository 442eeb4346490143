"""The embedded engine's search for stop strings in the end of a completion, on the tokens of a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contracts.tiny_model import write_tokenizer
from tokenizers import Tokenizer

from penstock.rollout_service.embedded_engine.http.text import Text
from penstock.rollout_service.embedded_engine.sequence import Sampling, Sequence


@pytest.mark.parametrize("stop", ["</answer>", "停止生成停止生成停止生成停止生成", "✓" * 20])
def test_a_string_of_long_characters_is_found(stop: str, tmp_path: Path) -> None:
    """A character may take as many tokens as it has UTF-8 bytes."""
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    sequence = Sequence("r", (1,), Sampling(max_new_tokens=500, stop_strings=("nowhere", stop)))
    text = Text(tmp_path)
    tokens = [token for letter in f"so {stop}" for token in tokenizer.encode(letter).ids]
    sequence.output_ids = tokens[:-1]
    assert text.find_stop_string(sequence) is None
    sequence.output_ids = tokens
    assert text.find_stop_string(sequence) == stop
